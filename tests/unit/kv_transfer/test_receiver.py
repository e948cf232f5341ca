"""The receiving end: nothing becomes a sequence unless everything agrees."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_transfer.receiver import ReceiveTransfer
from protocol.errors import InternalError
from protocol.lifecycle import ReceiveEvent, ReceiveState
from protocol.messages import Announce, Commit
from protocol.types import PageRef, TicketId, TokenLogprobs

ID = TicketId("q")
LOGPROB = TokenLogprobs(5, -0.5, 1)
GOOD = Commit(ID, (5,), 3, 300, (11, 22))


def granted() -> ReceiveTransfer:
    transfer = ReceiveTransfer(ID, "prefill-0", 3, 100)
    transfer.follow(ReceiveEvent.CREDIT)
    transfer.follow(ReceiveEvent.GRANT)
    return transfer


def whole() -> ReceiveTransfer:
    transfer = granted()
    transfer.announced((PageRef(4, 0), PageRef(9, 2)))
    transfer.announced((PageRef(1, 1),))
    transfer.received(0, 11)
    transfer.received(1, 22)
    return transfer


def test_counts_generations_and_checksums_agree() -> None:
    transfer = whole()
    transfer.committed(GOOD)
    assert transfer.complete
    assert transfer.refs() == [PageRef(4, 0), PageRef(9, 2), PageRef(1, 1)]
    assert transfer.fault(generations_agree=True) is None
    assert transfer.first_token == 5
    transfer.follow(ReceiveEvent.SEAL)
    assert transfer.over


@pytest.mark.parametrize(
    ("commit", "generations_agree", "named"),
    [
        (replace(GOOD, n_pages=2), True, "2 pages of 300 bytes were committed"),
        (replace(GOOD, n_bytes=299), True, "3 pages of 299 bytes"),
        (replace(GOOD, checksums=(11, 23)), True, r"checksums of segments \[1\] differ"),
        (replace(GOOD, checksums=(11,)), True, "1 checksums for 2 segments"),
        (replace(GOOD, first_tokens=()), True, "0 first tokens for 1 choices"),
        (replace(GOOD, first_tokens=(5, 6)), True, "2 first tokens for 1 choices"),
        (replace(GOOD, logprobs=(LOGPROB, LOGPROB)), True, "2 logprobs for 1 choices"),
        (GOOD, False, "changed its owner"),
    ],
)
def test_any_difference_is_data_loss(commit: Commit, generations_agree: bool, named: str) -> None:
    transfer = whole()
    transfer.committed(commit)
    fault = transfer.fault(generations_agree)
    assert fault is not None and fault.reason == "DATA_LOSS"
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(fault.message)


def test_a_commit_that_comes_before_the_prompt_is_covered_is_data_loss() -> None:
    transfer = granted()
    transfer.announced((PageRef(4, 0),))
    transfer.received(0, 11)
    transfer.committed(Commit(ID, (5,), 1, 100, (11,)))
    fault = transfer.fault(generations_agree=True)
    assert fault is not None and "the prompt covers 3" in fault.message


def test_a_commit_waits_for_the_last_receive() -> None:
    transfer = granted()
    transfer.announced((PageRef(4, 0), PageRef(9, 2), PageRef(1, 1)))
    transfer.committed(replace(GOOD, checksums=(11,)))
    assert not transfer.complete
    transfer.received(0, 11)
    assert transfer.complete


@pytest.mark.parametrize(
    "message",
    [
        Announce(ID, 1, 0, 1, 100),  # wrong segment
        Announce(ID, 0, 1, 1, 100),  # a hole
        Announce(ID, 0, 0, 4, 400),  # beyond the prompt
        Announce(ID, 0, 0, 0, 0),  # nothing
        Announce(ID, 0, 0, 2, 100),  # bytes do not fit the pages
    ],
)
def test_announcements_that_cannot_be_next(message: Announce) -> None:
    fault = granted().announce_fault(message)
    assert fault is not None and fault.reason == "DATA_LOSS"


def test_the_next_announcement_is_fine() -> None:
    assert granted().announce_fault(Announce(ID, 0, 0, 3, 300)) is None


def test_what_is_held_is_neither_announced_nor_counted() -> None:
    transfer = granted()
    transfer.held(2)
    early = transfer.announce_fault(Announce(ID, 0, 0, 3, 300))
    assert early is not None and "segment 0 from page 2 was due" in early.message
    assert transfer.announce_fault(Announce(ID, 0, 2, 1, 100)) is None
    transfer.announced((PageRef(7, 0),))
    transfer.received(0, 11)
    transfer.committed(Commit(ID, (5,), 1, 100, (11,)))
    assert transfer.complete and transfer.fault(generations_agree=True) is None
    assert transfer.refs() == [PageRef(7, 0)] and transfer.held_pages == 2


def test_a_commit_that_counts_held_pages_is_data_loss() -> None:
    transfer = granted()
    transfer.held(2)
    transfer.announced((PageRef(7, 0),))
    transfer.received(0, 11)
    transfer.committed(Commit(ID, (5,), 3, 300, (11,)))
    fault = transfer.fault(generations_agree=True)
    assert fault is not None and "covers 3, 2 of which were here" in fault.message


def test_a_prompt_that_is_held_whole_is_committed_with_nothing() -> None:
    transfer = granted()
    transfer.held(3)
    transfer.committed(Commit(ID, (5,), 0, 0, ()))
    assert transfer.complete and transfer.fault(generations_agree=True) is None


def test_a_commit_without_pages_is_data_loss_when_some_are_missing() -> None:
    transfer = granted()
    transfer.held(2)
    transfer.committed(Commit(ID, (5,), 0, 0, ()))
    assert transfer.complete
    assert transfer.fault(generations_agree=True) is not None


def test_every_choice_needs_its_first_token() -> None:
    transfer = ReceiveTransfer(ID, "prefill-0", 1, 100, n_choices=2)
    transfer.follow(ReceiveEvent.CREDIT)
    transfer.follow(ReceiveEvent.GRANT)
    transfer.announced((PageRef(7, 0),))
    transfer.received(0, 11)
    transfer.committed(Commit(ID, (5, 6), 1, 100, (11,), (LOGPROB, LOGPROB)))
    assert transfer.fault(generations_agree=True) is None
    assert transfer.first_tokens == (5, 6) and transfer.first_token == 5


def test_misuse_raises() -> None:
    transfer = ReceiveTransfer(ID, "prefill-0", 3, 100)
    with pytest.raises(InternalError):
        transfer.announced((PageRef(0, 0),))
    with pytest.raises(InternalError):
        transfer.held(4)
    late = whole()
    with pytest.raises(InternalError):
        late.held(1)
    transfer.follow(ReceiveEvent.ABORT)
    assert transfer.state is ReceiveState.ABORTED
    with pytest.raises(InternalError):
        transfer.follow(ReceiveEvent.CREDIT)

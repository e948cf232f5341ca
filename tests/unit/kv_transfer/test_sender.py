"""The sending end: what is announced when, and when it is committed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.layout import SegmentRule
from kv_transfer.sender import SendTransfer
from protocol.errors import InternalError
from protocol.lifecycle import SendState
from protocol.types import TicketId, TokenLogprobs

ID = TicketId("q")


def spans(transfer: SendTransfer) -> list[tuple[int, int, int]]:
    return [(s.index, s.first_page, s.n_pages) for s in transfer.take_segments()]


def test_a_short_prompt_goes_out_as_one_bulk_segment() -> None:
    transfer = SendTransfer(ID, 3, SegmentRule(100, 1000))
    transfer.computed(3)
    assert spans(transfer) == []  # nobody granted
    transfer.grant(8, 0)
    assert spans(transfer) == [(0, 0, 3)]
    assert spans(transfer) == []


def test_a_long_prompt_goes_out_chunk_by_chunk() -> None:
    transfer = SendTransfer(ID, 5, SegmentRule(100, 1000))
    transfer.grant(8, 0)
    transfer.computed(2)
    assert spans(transfer) == [(0, 0, 2)]
    transfer.computed(2)  # the chunk filled no further page
    assert spans(transfer) == []
    transfer.computed(5)
    assert spans(transfer) == [(1, 2, 3)]


def test_large_segments_are_split_and_the_window_holds() -> None:
    transfer = SendTransfer(ID, 7, SegmentRule(100, 250))
    transfer.grant(2, 0)
    transfer.computed(7)
    assert spans(transfer) == [(0, 0, 2), (1, 2, 2)]
    assert transfer.waits_for_receiver
    transfer.widen(1)
    assert spans(transfer) == [(2, 4, 2)]


def test_what_the_receiver_holds_is_not_sent() -> None:
    transfer = SendTransfer(ID, 4, SegmentRule(100, 1000))
    transfer.computed(4)
    transfer.grant(8, 3)
    assert spans(transfer) == [(0, 3, 1)]
    transfer.sent(0, 9)
    commit = transfer.commit((5,))
    assert (commit.n_pages, commit.n_bytes, commit.checksums) == (1, 100, (9,))


@pytest.mark.parametrize("held", [4, 9])
def test_a_receiver_that_holds_everything_gets_a_commit_with_nothing(held: int) -> None:
    transfer = SendTransfer(ID, 4, SegmentRule(100, 1000))
    transfer.grant(8, held)
    assert transfer.can_commit and not transfer.can_announce
    transfer.computed(4)
    assert spans(transfer) == []
    logprobs = (TokenLogprobs(5, -0.5, 1), TokenLogprobs(6, -1.5, 2))
    commit = transfer.commit(
        (5, 6), logprobs, cached_tokens=12, prompt_logprobs=(TokenLogprobs(1, -2.0, 3),)
    )
    assert (commit.n_pages, commit.n_bytes, commit.checksums) == (0, 0, ())
    assert (commit.first_tokens, commit.logprobs, commit.cached_tokens) == ((5, 6), logprobs, 12)
    assert len(commit.prompt_logprobs) == 1


def test_a_held_prefix_that_is_not_computed_here_yet_is_skipped() -> None:
    transfer = SendTransfer(ID, 6, SegmentRule(100, 1000))
    transfer.grant(8, 3)
    transfer.computed(2)
    assert not transfer.can_announce and not transfer.waits_for_receiver and spans(transfer) == []
    transfer.computed(5)
    assert transfer.can_announce and spans(transfer) == [(0, 3, 2)]


def test_the_commit_waits_for_every_link_operation_and_orders_checksums() -> None:
    transfer = SendTransfer(ID, 4, SegmentRule(100, 200))
    transfer.grant(8, 0)
    transfer.computed(4)
    transfer.take_segments()
    transfer.sent(1, 22)
    assert not transfer.can_commit
    transfer.sent(0, 11)
    assert transfer.can_commit
    assert transfer.commit((7,)).checksums == (11, 22)
    assert transfer.state is SendState.COMMITTED
    transfer.seal()
    assert transfer.over


def test_nothing_is_announced_after_an_abort() -> None:
    transfer = SendTransfer(ID, 4, SegmentRule(100, 200))
    transfer.grant(8, 0)
    transfer.computed(4)
    transfer.abort()
    assert spans(transfer) == []
    with pytest.raises(InternalError):
        transfer.abort()


@pytest.mark.parametrize("misuse", ["seal", "commit"])
def test_an_unknown_pair_of_state_and_event_raises(misuse: str) -> None:
    transfer = SendTransfer(ID, 4, SegmentRule(100, 200))
    with pytest.raises(InternalError, match="offered cannot take"):
        transfer.seal() if misuse == "seal" else transfer.commit((1,))


@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 10_000),
    st.integers(0, 30),
)
def test_every_page_that_is_not_held_is_announced_once_in_order(
    n_pages: int, max_pages: int, window: int, seed: int, held: int
) -> None:
    held = min(held, n_pages)
    transfer = SendTransfer(ID, n_pages, SegmentRule(10, 10 * max_pages))
    rng = random.Random(seed)
    announced: list[int] = []
    open_segments: list[int] = []
    final, granted = 0, False
    while not transfer.can_commit:
        step = rng.choice(("grant", "compute", "sent"))
        if step == "grant" and not granted:
            transfer.grant(window, held)
            granted = True
        elif step == "compute":
            final = min(n_pages, final + rng.randint(0, 5))
            transfer.computed(final)
        elif step == "sent" and open_segments:
            transfer.sent(open_segments.pop(0), 0)
            transfer.widen(1)
        for segment in transfer.take_segments():
            assert 1 <= segment.n_pages <= max_pages
            announced += range(segment.first_page, segment.first_page + segment.n_pages)
            open_segments.append(segment.index)
        assert len(open_segments) <= window
        assert announced == list(range(held, held + len(announced)))
        assert not announced or announced[-1] < final
    assert announced == list(range(held, n_pages))

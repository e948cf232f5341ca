"""The prefix cache of a decode worker: what is found, what is named when, what is said of it."""

from __future__ import annotations

import pytest
from unit.decode_worker.decode_bench import (
    EOS,
    Q,
    done,
    grant,
    home,
    items,
    make,
    open_,
    peer,
    said,
    step,
    ticket,
)

from protocol.errors import ErrorInfo
from protocol.events import FromRouter, SegmentReceived
from protocol.messages import Announce, Cancel, Commit, Grant, Offer, Reserved, Sealed
from protocol.step import RowResult, StepResult
from protocol.types import SamplingParams, TicketId

ROOT = {"hash_root": b"root"}
TWO = TicketId("two")


def test_a_local_prompt_begins_where_the_cache_ends() -> None:
    role = make(20, **ROOT)
    open_(role, ticket(10, sender=None, max_tokens=1))
    assert items(step(role))[0].cached_tokens == 0
    open_(role, ticket(10, TWO, sender=None, max_tokens=1))
    plan = role.plan(0.0)
    assert plan is not None
    (row,) = plan.rows
    assert (row.start, len(row.tokens)) == (8, 2)  # two full pages of four were found
    (item,) = items(role.step_done(StepResult((RowResult((5,)),)), 0.0))
    assert item.cached_tokens == 8
    home(role)


@pytest.mark.parametrize(("n", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_prompt_token_is_always_computed(n: int, found: int) -> None:
    role = make(20, **ROOT)
    for id_ in (Q, TWO):
        open_(role, ticket(n, id_, sender=None, max_tokens=1))
        (item,) = items(step(role))
    assert item.cached_tokens == found


def test_a_conversation_finds_its_own_answer() -> None:
    """The second turn's prompt is the first turn, its answer and a new question."""
    role = make(40, **ROOT)
    open_(role, ticket(10, sender=None, max_tokens=9))
    for token in range(50, 59):
        step(role, token)
    turn = (*range(10), *range(50, 59), 7, 7, 7)
    open_(role, ticket(22, TWO, sender=None, tokens=turn, max_tokens=1))
    (item,) = items(step(role))
    assert item.cached_tokens == 16  # 18 positions were computed: four full pages


def test_a_page_is_named_when_it_is_full_and_not_before() -> None:
    role = make(40, **ROOT)
    open_(role, ticket(6, sender=None))
    step(role, 50)  # six positions computed: one full page
    open_(role, ticket(12, TWO, sender=None, tokens=(*range(6), 50, 51, 52, 53, 54, 55)))
    assert said(open_(role, ticket(6, TicketId("c"), sender=None)), Reserved) == [
        Reserved(TicketId("c"), 2)
    ]
    plan = role.plan(0.0)
    assert plan is not None and {r.ticket_id: r.start for r in plan.rows} == {
        Q: 6,
        TWO: 4,
        TicketId("c"): 4,
    }


def test_tenants_do_not_find_each_others_pages() -> None:
    role = make(40, **ROOT)
    for number, salt in enumerate(("", "a", "b", "a")):
        t = ticket(10, TicketId(f"t{number}"), sender=None, max_tokens=1, salt=salt)
        open_(role, t)
        (item,) = items(step(role))
        assert item.cached_tokens == (8 if number == 3 else 0)


def test_without_a_known_model_nothing_is_found() -> None:
    role = make(20)
    for id_ in (Q, TWO):
        open_(role, ticket(10, id_, sender=None, max_tokens=1))
        (item,) = items(step(role))
    assert item.cached_tokens == 0
    home(role)


def test_prompt_logprobs_need_every_position_but_leave_their_pages_to_others() -> None:
    role = make(20, **ROOT)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for id_ in (Q, TWO):
        open_(role, ticket(10, id_, sender=None, sampling=params))
        plan = role.plan(0.0)
        assert plan is not None and plan.rows[0].start == 0
        role.step_done(StepResult((RowResult((5,)),)), 0.0)
    open_(role, ticket(10, TicketId("c"), sender=None, max_tokens=1))
    assert items(step(role))[0].cached_tokens == 8


def test_a_grant_says_what_is_here_and_only_the_rest_is_received() -> None:
    role = make(20, **ROOT)
    open_(role, ticket(8, sender=None, max_tokens=1))
    step(role)
    effects = grant(role, ticket(10, TWO))
    assert said(effects, Grant) == [Grant(TWO, 1, 2, prefix_tokens=8)]
    peer(role, Announce(TWO, 0, 2, 1, 100))
    peer(role, Commit(TWO, (5,), 1, 100, (11,), cached_tokens=3))
    (item,) = items(role.handle(SegmentReceived("prefill-0", TWO, 0, 11), 0.0))
    assert item.cached_tokens == 3  # what nobody computed is the sender's to say
    plan = role.plan(0.0)
    assert plan is not None and len(plan.rows[0].pages) == 3 and plan.rows[0].start == 10


def test_a_prompt_that_is_here_whole_comes_with_the_commit_alone() -> None:
    role = make(20, **ROOT)
    open_(role, ticket(8, sender=None, max_tokens=1))
    step(role)
    effects = grant(role, ticket(8, TWO))
    assert said(effects, Grant) == [Grant(TWO, 0, 2, prefix_tokens=8)]
    effects = peer(role, Commit(TWO, (5,), 0, 0, ()))
    assert said(effects, Sealed) and items(effects)
    step(role)
    role.handle(FromRouter("r", Cancel(TWO, "")), 0.0)
    home(role)


def test_received_pages_are_found_after_the_seal_and_not_before() -> None:
    role = make(40, **ROOT)
    grant(role, ticket(8))
    peer(role, Announce(Q, 0, 0, 2, 200))
    role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)
    open_(role, ticket(9, TWO, sender=None, max_tokens=1))
    assert items(step(role))[0].cached_tokens == 0
    peer(role, Commit(Q, (EOS,), 2, 200, (11,)))
    open_(role, ticket(9, TicketId("c"), sender=None, max_tokens=1))
    assert items(step(role))[0].cached_tokens == 8


def test_a_lapsed_grant_is_taken_again_only_with_the_pages_it_promised() -> None:
    role = make(4, **ROOT)
    open_(role, ticket(8, sender=None, max_tokens=1))
    step(role)
    open_(role, ticket(10, TWO, remaining_s=1000.0), 0.0)
    (granted,) = said(peer(role, Offer(TWO, 10, 0.0), 0.0), Grant)
    assert isinstance(granted, Grant) and granted.prefix_tokens == 8
    role.tick(10.1)  # the credit lapses, and the pages of the prefix are only cached now
    other = ticket(15, TicketId("other"), sender=None, max_tokens=1, tokens=(3,) * 15)
    open_(role, other, 10.2)
    for _ in range(2):
        step(role, now=10.2)  # it takes all four pages: the prefix is evicted
    effects = peer(role, Announce(TWO, 0, 2, 1, 100), 10.3)
    (end,) = done(effects)
    assert end.error is not None and "lapsed" in end.error.message


def test_pages_of_a_row_that_failed_are_not_found_again() -> None:
    role = make(40, **ROOT)
    open_(role, ticket(10, sender=None))
    step(role, 5)
    role.plan(0.0)
    role.step_done(StepResult((RowResult(error=ErrorInfo("INTERNAL", "nan")),)), 0.0)
    open_(role, ticket(10, TWO, sender=None, max_tokens=1))
    assert items(step(role))[0].cached_tokens == 0
    home(role)

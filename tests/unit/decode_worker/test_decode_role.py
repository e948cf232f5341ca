"""The decode role: places, answers and their ends, message by message."""

from __future__ import annotations

import pytest
from unit.decode_worker.decode_bench import (
    EOS,
    ME,
    Q,
    done,
    grant,
    hand_over,
    home,
    items,
    make,
    open_,
    peer,
    said,
    step,
    ticket,
)

from protocol.errors import ErrorInfo, InternalError
from protocol.events import (
    Count,
    FromRouter,
    ReceivePages,
    RouterLost,
    SegmentReceived,
    ToRouter,
    ToSender,
)
from protocol.messages import (
    Abort,
    Announce,
    Cancel,
    Commit,
    Grant,
    Offer,
    Queued,
    Reserved,
    Sealed,
    Stop,
    TokenItem,
    Tokens,
    Window,
)
from protocol.step import RowResult, StepResult
from protocol.types import FinishReason, Outcome, Peer, SamplingParams, Ticket, TicketId


def test_the_whole_way_of_a_remote_ticket() -> None:
    role = make()
    assert open_(role, ticket(10), 1.0) == [ToRouter("r", Reserved(Q, 3))]  # the prompt's pages
    effects = peer(role, Offer(Q, 10, 0.5), 1.5)
    assert effects == [ToSender("prefill-0", Grant(Q, 3, 2))]
    (receive,) = peer(role, Announce(Q, 0, 0, 2, 200), 2.0)
    assert isinstance(receive, ReceivePages) and receive.n_bytes == 200
    assert receive.pages is not None and len(receive.pages) == 2
    assert role.plan(2.0) is None
    effects = role.handle(SegmentReceived("prefill-0", Q, 0, 11), 2.1)
    assert effects == [ToSender("prefill-0", Window(Q, 1))]
    peer(role, Announce(Q, 1, 2, 1, 100), 2.2)
    assert peer(role, Commit(Q, (5,), 3, 300, (11, 22)), 2.3) == []
    effects = role.handle(SegmentReceived("prefill-0", Q, 1, 22), 2.4)
    assert effects[:2] == [
        ToSender("prefill-0", Sealed(Q)),
        ToRouter("r", Tokens((TokenItem(Q, 0, (5,)),))),
    ]
    plan = role.plan(3.0)
    assert plan is not None
    row = plan.rows[0]
    assert (list(row.tokens), row.start, row.token_index, len(row.pages)) == ([5], 10, 1, 3)
    assert items(role.step_done(StepResult((RowResult((6,)),)), 3.1)) == [TokenItem(Q, 1, (6,))]
    for index in (2, 3, 4):
        assert items(step(role, 8)) == [TokenItem(Q, index, (8,))]
    effects = step(role, 9, now=4.0)
    assert items(effects) == [TokenItem(Q, 5, (9,), FinishReason.LENGTH)]
    (end,) = done(effects)
    assert end.outcome is Outcome.OK
    assert [t.stage for t in end.timings] == ["reserve", "decode"]
    home(role)


def test_the_first_token_counts_for_max_tokens() -> None:
    role = make()
    effects = hand_over(role, ticket(max_tokens=1))
    assert items(effects) == [TokenItem(Q, 0, (5,), FinishReason.LENGTH)]
    assert [d.outcome for d in done(effects)] == [Outcome.OK]
    home(role)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_first_token_counts_for_eos(ignore_eos: bool) -> None:
    role = make()
    params = SamplingParams(max_tokens=6, ignore_eos=ignore_eos)
    effects = hand_over(role, ticket(sampling=params), EOS)
    assert items(effects)[0].finish_reason is (None if ignore_eos else FinishReason.STOP)
    assert len(done(effects)) == (0 if ignore_eos else 1)


def test_a_local_prompt_is_computed_here_beside_running_decodes() -> None:
    role = make(20)
    hand_over(role, ticket())
    open_(role, ticket(20, TicketId("local"), sender=None))
    plan = role.plan(0.0)
    assert plan is not None
    assert dict(plan.advance) == {Q: 1, TicketId("local"): 11}
    role.step_done(StepResult((RowResult((6,)), RowResult())), 0.0)
    effects = step(role, 6, 7)
    (message,) = said(effects, Tokens)
    assert isinstance(message, Tokens)  # one message for all tokens of one router
    assert {i.ticket_id: i.index for i in message.items} == {Q: 2, TicketId("local"): 0}


def test_tokens_of_two_routers_are_two_messages() -> None:
    role = make(20)
    open_(role, ticket(2, TicketId("a"), sender=None), router="r1")
    open_(role, ticket(2, TicketId("b"), sender=None), router="r2")
    effects = step(role, 1, 2)
    told = [(e.router_id, e.message) for e in effects if isinstance(e, ToRouter)]
    assert [router for router, m in told if isinstance(m, Tokens)] == ["r1", "r2"]


def test_tokens_after_the_prompt_are_output_in_every_respect() -> None:
    """A request that goes on: 3 of its 6 output tokens were delivered by another worker."""
    role = make()
    t = Ticket(Q, None, ME, tuple(range(10)), 7, SamplingParams(max_tokens=6), n_delivered=3)
    open_(role, t)
    assert items(step(role, 8)) == [TokenItem(Q, 3, (8,))]
    step(role, 8)
    assert items(step(role, 8)) == [TokenItem(Q, 5, (8,), FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("t", "reason", "words"),
    [
        (ticket(receiver=Peer("decode-0", "old", "d:1")), "WRONG_STATE", "decode-0 (old)"),
        (ticket(40, max_tokens=9), "NEVER_FITS", "need 13 pages of 4; decode-0 has 12"),
        (ticket(40, max_tokens=61), "CONTEXT_LENGTH_EXCEEDED", "together 101"),
        (ticket(remaining_s=0.0), "DEADLINE_EXCEEDED", "deadline"),
        (ticket(0), "INVALID_ARGUMENT", "empty"),
    ],
)
def test_refusals_name_the_numbers(t: Ticket, reason: str, words: str) -> None:
    role = make()
    (end,) = done(open_(role, t))
    assert end.outcome is Outcome.FAILED and end.error is not None
    assert end.error.reason == reason and words in end.error.message
    home(role)


def test_the_queue_is_bounded_and_says_who_is_ahead() -> None:
    role = make(4)
    open_(role, ticket(id_=TicketId("holds")))
    for i in range(3):
        (queued,) = said(open_(role, ticket(id_=TicketId(f"w{i}"))), Queued)
        assert isinstance(queued, Queued) and queued.ahead == i
        assert "1 of 4 pages are free, 1 of 4 sequences are taken" in queued.reason
    (end,) = done(open_(role, ticket()))
    assert end.error is not None and end.error.reason == "OVERLOADED"
    assert end.error.retry_after_s is not None
    effects = role.handle(FromRouter("r", Cancel(TicketId("holds"), "gone")), 1.0)
    assert said(effects, Reserved) == [Reserved(TicketId("w0"), 3)]


def test_max_num_seqs_caps_places() -> None:
    role = make(100, max_num_seqs=2)
    for i in range(2):
        assert said(open_(role, ticket(id_=TicketId(f"a{i}"))), Reserved)
    assert said(open_(role, ticket()), Queued)


def test_a_big_request_that_was_passed_over_gets_the_next_pages() -> None:
    role = make(12, max_waiting=100)
    open_(role, ticket(20, TicketId("holds"), max_tokens=6))  # 5 of 12 pages
    open_(role, ticket(30, TicketId("big")))  # needs 8
    passed = 0
    for i in range(30):
        small = ticket(4, TicketId(f"s{i}"), max_tokens=4)
        if said(open_(role, small), Reserved):
            passed += 1
            role.handle(FromRouter("r", Cancel(small.id, "")), 0.0)
    assert passed == 8
    effects = role.handle(FromRouter("r", Cancel(TicketId("holds"), "")), 0.0)
    reserved = said(effects, Reserved)
    assert reserved and reserved[0] == Reserved(TicketId("big"), 8)


def test_a_running_answer_ends_at_its_deadline() -> None:
    role = make()
    hand_over(role, ticket(remaining_s=5.0))
    (end,) = done(role.tick(5.0))
    assert end.error is not None and end.error.reason == "DEADLINE_EXCEEDED"
    home(role)


def test_stop_ends_the_choice_with_what_was_before() -> None:
    role = make()
    hand_over(role, ticket())
    assert role.plan(0.0) is not None
    assert done(role.handle(FromRouter("r", Stop(Q, 1)), 0.0)) == []  # the step still runs
    effects = role.step_done(StepResult((RowResult((6,)),)), 0.0)
    assert items(effects) == [] and [d.outcome for d in done(effects)] == [Outcome.OK]
    assert isinstance(role.handle(FromRouter("r", Stop(Q, 1)), 0.0)[0], Count)
    home(role)


def test_a_cancel_in_a_step_keeps_the_pages_until_the_step_has_ended() -> None:
    role = make()
    hand_over(role, ticket())
    assert role.plan(0.0) is not None
    assert role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0) == []
    assert role.load(0.0).free_pages == 9
    assert [d.outcome for d in done(role.step_done(StepResult((RowResult((6,)),)), 0.0))] == [
        Outcome.CANCELLED
    ]
    home(role)


def test_a_failed_row_fails_alone() -> None:
    role = make(20)
    hand_over(role, ticket())
    hand_over(role, ticket(id_=TicketId("p")))
    assert role.plan(0.0) is not None
    nan = ErrorInfo("INTERNAL", "not finite")
    effects = role.step_done(StepResult((RowResult(error=nan), RowResult((1,)))), 0.0)
    assert [(d.ticket_id, d.error) for d in done(effects)] == [(Q, nan)]
    assert items(effects) == [TokenItem(TicketId("p"), 1, (1,))]
    assert role.plan(0.0) is not None
    assert len(done(role.step_failed(nan, 0.0))) == 1
    home(role)


def test_a_lost_router_cancels_its_tickets() -> None:
    role = make(20)
    hand_over(role, ticket())
    open_(role, ticket(id_=TicketId("p")), router="other")
    (end,) = done(role.handle(RouterLost("r"), 0.0))
    assert (end.ticket_id, end.outcome) == (Q, Outcome.CANCELLED)


def test_attempts_are_fenced() -> None:
    role = make(40)
    open_(role, ticket(id_=TicketId("q", 2)))
    effects = open_(role, ticket(id_=TicketId("q", 3)))
    assert [(d.ticket_id.attempt, d.outcome) for d in done(effects)] == [(2, Outcome.CANCELLED)]
    (end,) = done(open_(role, ticket(id_=TicketId("q", 1))))
    assert end.error is not None and end.error.reason == "STALE_ATTEMPT"
    assert len(said(peer(role, Offer(TicketId("q", 2), 10, 0.0)), Abort)) == 1


def test_everyone_who_is_passed_over_has_a_reason() -> None:
    role = make(20, max_num_seqs=3, max_waiting=10)
    hand_over(role, ticket())
    grant(role, ticket(id_=TicketId("coming")))
    open_(role, ticket(id_=TicketId("not offered")))
    open_(role, ticket(id_=TicketId("no place")))
    plan = role.plan(0.0)
    assert plan is not None and list(plan.advance) == [Q]
    reasons = {t.request_id: why for t, why in plan.reasons.items()}
    assert reasons["coming"] == "waits for its KV from prefill-0"
    assert reasons["not offered"] == "waits for the offer of prefill-0"
    assert reasons["no place"].startswith("waits for a place: 11 of 20 pages are free")


def test_misuse_by_the_runtime_raises() -> None:
    role = make()
    with pytest.raises(InternalError):
        role.step_done(StepResult(()), 0.0)
    hand_over(role, ticket())
    role.plan(0.0)
    with pytest.raises(InternalError):
        role.plan(0.0)

"""The prefill role, message by message."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kv_transfer.pages import Pages
from prefill_worker.role import PrefillRole
from protocol.errors import ErrorInfo, InternalError
from protocol.events import (
    BreakLink,
    Count,
    Effect,
    FromPeer,
    FromRouter,
    LinkBroken,
    PeerLost,
    RouterLost,
    SegmentSent,
    SegmentStale,
    SendPages,
    ToReceiver,
    ToRouter,
)
from protocol.messages import (
    Abort,
    Announce,
    Cancel,
    Commit,
    Done,
    Grant,
    Offer,
    Open,
    Sealed,
    TransferHeartbeat,
    Window,
)
from protocol.role import RoleOptions
from protocol.step import RowResult, StepPlan, StepResult
from protocol.types import Outcome, Peer, SamplingParams, Ticket, TicketId

ME = Peer("prefill-0", "inc-p", "p:1")
D = Peer("decode-0", "inc-d", "d:1")
Q = TicketId("q")
BROKEN = ErrorInfo("UNAVAILABLE", "it broke")


def make(total: int = 8, **changes: int) -> PrefillRole:
    values: dict[str, int] = {
        "page_bytes": 100,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "max_model_len": 100,
        "min_prefill_tokens": 4,
        "lease_s": 10,
        "max_waiting": 3,
        **changes,
    }
    return PrefillRole(ME, Pages(total, 4), RoleOptions(**values))  # type: ignore[arg-type]


def ticket(n: int = 10, id_: TicketId = Q, sender: Peer | None = ME, **changes: float) -> Ticket:
    return Ticket(
        id_,
        sender,
        D,
        tuple(range(n)),
        n,
        SamplingParams(max_tokens=8),
        **changes,  # type: ignore[arg-type]
    )


def open_(role: PrefillRole, t: Ticket, now: float = 0.0) -> list[Effect]:
    return role.handle(FromRouter("r", Open(t)), now)


def peer(
    role: PrefillRole, message: Grant | Window | Sealed | Abort, now: float = 0.0
) -> list[Effect]:
    return role.handle(FromPeer("decode-0", message), now)


def step(role: PrefillRole, now: float = 0.0, token: int = 42) -> list[Effect]:
    plan = role.plan(now)
    assert plan is not None
    return role.step_done(result(plan, token), now)


def result(plan: StepPlan, token: int = 42) -> StepResult:
    return StepResult(tuple(RowResult((token,) if r.sample else ()) for r in plan.rows))


def done(effects: Iterable[Effect]) -> list[Done]:
    return [e.message for e in effects if isinstance(e, ToRouter) and isinstance(e.message, Done)]


def sent(effects: Iterable[Effect], kind: type) -> list[object]:
    return [e.message for e in effects if isinstance(e, ToReceiver) and isinstance(e.message, kind)]


def home(role: PrefillRole) -> None:
    role.check_integrity()
    assert role.is_idle()
    load = role.load(0.0)
    assert load.free_pages == load.total_pages


def test_the_whole_way_of_a_prompt_in_two_chunks() -> None:
    role = make()
    effects = open_(role, ticket(18), 1.0)
    assert sent(effects, Offer) == [Offer(Q, 18, 0.0)]
    plan = role.plan(2.0)
    assert plan is not None and plan.n_tokens == 12 and plan.rows[0].sample is None
    assert peer(role, Grant(Q, 7, 8), 2.5) == []  # nothing is final yet
    effects = role.step_done(result(plan), 3.0)
    assert effects == [ToReceiver(D, Announce(Q, 0, 0, 3, 300)), effects[1]]
    assert isinstance(effects[1], SendPages) and len(effects[1].pages) == 3
    plan = role.plan(3.0)
    assert plan is not None
    row = plan.rows[0]
    assert (row.start, len(row.tokens), row.token_index, len(row.pages)) == (12, 6, 0, 5)
    assert row.sample == SamplingParams(max_tokens=8)
    assert role.handle(SegmentSent("decode-0", Q, 0, 11), 3.5) == []
    effects = role.step_done(result(plan), 4.0)
    assert effects[0] == ToReceiver(D, Announce(Q, 1, 3, 2, 200))  # the partial page goes last
    effects = role.handle(SegmentSent("decode-0", Q, 1, 22), 4.5)
    assert effects == [ToReceiver(D, Commit(Q, (42,), 5, 500, (11, 22)))]
    (end,) = done(peer(role, Sealed(Q), 5.0))
    assert end.outcome is Outcome.OK and end.error is None
    assert [(t.stage, t.worker_id, t.seconds) for t in end.timings] == [
        ("queue", "prefill-0", 1.0),
        ("prefill", "prefill-0", 2.0),
        ("transfer", "prefill-0", 1.0),
    ]
    home(role)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8])
def test_a_prompt_computed_before_its_grant_is_one_bulk_segment(n: int) -> None:
    role = make()
    open_(role, ticket(n))
    assert step(role) == []
    announce, send = peer(role, Grant(Q, 4, 8))
    pages = -(-n // 4)
    assert announce == ToReceiver(D, Announce(Q, 0, 0, pages, pages * 100))
    assert isinstance(send, SendPages)


def test_the_window_holds_back_segments() -> None:
    role = make(max_segment_bytes=100)
    open_(role, ticket(12))
    step(role)
    assert len(sent(peer(role, Grant(Q, 5, 2)), Announce)) == 2
    assert len(sent(peer(role, Window(Q, 1)), Announce)) == 1


@pytest.mark.parametrize(
    ("t", "reason", "words"),
    [
        (ticket(sender=Peer("prefill-0", "old", "p:1")), "WRONG_STATE", "prefill-0 (old)"),
        (ticket(sender=None), "WRONG_STATE", "nobody"),
        (ticket(33), "NEVER_FITS", "33 tokens need 9 pages of 4; prefill-0 has 8"),
        (ticket(93), "CONTEXT_LENGTH_EXCEEDED", "together 101, and this model's context holds 100"),
        (ticket(0), "INVALID_ARGUMENT", "empty"),
        (ticket(remaining_s=0.0), "DEADLINE_EXCEEDED", "deadline"),
        (ticket(order_key=float("nan")), "INVALID_ARGUMENT", "finite"),
        (ticket(n_choices=0), "INVALID_ARGUMENT", "0 choices"),
    ],
)
def test_refusals_name_the_numbers(t: Ticket, reason: str, words: str) -> None:
    role = make()
    effects = open_(role, t)
    (end,) = done(effects)
    assert end.outcome is Outcome.FAILED and end.error is not None
    assert end.error.reason == reason and words in end.error.message
    assert len(effects) == 1
    home(role)


def test_a_full_queue_refuses_with_a_hint() -> None:
    role = make()
    for i in range(3):
        open_(role, ticket(id_=TicketId(f"q{i}")))
    (end,) = done(open_(role, ticket()))
    assert end.error is not None and end.error.reason == "OVERLOADED"
    assert end.error.retry_after_s is not None


def test_attempts_are_fenced() -> None:
    role = make()
    open_(role, ticket(id_=TicketId("q", 2)))
    effects = open_(role, ticket(id_=TicketId("q", 3)))
    assert [d.outcome for d in done(effects)] == [Outcome.CANCELLED]
    assert [a.ticket_id.attempt for a in sent(effects, Abort)] == [2]  # type: ignore[attr-defined]
    (end,) = done(open_(role, ticket(id_=TicketId("q", 1))))
    assert end.error is not None and end.error.reason == "STALE_ATTEMPT"
    assert open_(role, ticket(id_=TicketId("q", 3))) == [Count("events_ignored", "Open")]


def test_a_cancel_in_a_step_ends_when_the_step_has_ended() -> None:
    role = make()
    open_(role, ticket())
    plan = role.plan(0.0)
    assert plan is not None
    effects = role.handle(FromRouter("r", Cancel(Q, "gone")), 0.1)
    assert done(effects) == [] and len(sent(effects, Abort)) == 1
    assert role.load(0.1).free_pages == 5  # the step still writes them
    assert [d.outcome for d in done(role.step_done(result(plan), 0.2))] == [Outcome.CANCELLED]
    home(role)


def test_pages_of_a_cancelled_prompt_wait_for_the_link() -> None:
    role = make()
    open_(role, ticket())
    step(role)
    peer(role, Grant(Q, 5, 8))
    assert len(done(role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0))) == 1
    assert not role.is_idle() and role.load(0.0).free_pages == 5
    assert role.handle(SegmentSent("decode-0", Q, 0, 1), 0.0) == []
    home(role)


@pytest.mark.parametrize("end", ["stale", "broken", "peer"])
def test_a_failed_hand_off_ends_the_leg(end: str) -> None:
    role = make()
    open_(role, ticket())
    step(role)
    peer(role, Grant(Q, 5, 8))
    if end == "stale":
        effects = role.handle(SegmentStale("decode-0", Q, 0), 0.0)
    elif end == "broken":
        effects = role.handle(LinkBroken("decode-0", BROKEN, True), 0.0)
    else:
        effects = role.handle(PeerLost("decode-0", BROKEN, True), 0.0)
        assert [e for e in effects if isinstance(e, BreakLink)]
        assert not role.is_idle()
        role.handle(LinkBroken("decode-0", BROKEN, True), 0.0)
    (last,) = done(effects)
    assert last.outcome is Outcome.FAILED and last.error is not None
    assert last.error.reason == ("DATA_LOSS" if end == "stale" else "UNAVAILABLE")
    assert len(sent(effects, Abort)) == (0 if end == "peer" else 1)  # nobody there to be told
    home(role)


def test_a_broken_link_spares_transfers_that_had_nothing_on_it() -> None:
    role = make()
    open_(role, ticket())
    step(role)
    assert role.handle(LinkBroken("decode-0", BROKEN, True), 0.0) == []
    assert len(peer(role, Grant(Q, 5, 8))) == 2


def test_an_abort_of_the_receiver_is_not_answered() -> None:
    role = make()
    open_(role, ticket())
    effects = peer(role, Abort(Q, ErrorInfo("OVERLOADED", "full")))
    assert [d.outcome for d in done(effects)] == [Outcome.FAILED] and len(effects) == 1
    open_(role, ticket(id_=TicketId("p")))
    effects = peer(role, Abort(TicketId("p"), ErrorInfo("CANCELLED", "gone")))
    assert [d.outcome for d in done(effects)] == [Outcome.CANCELLED]
    home(role)


def test_clocks() -> None:
    role = make()
    open_(role, ticket(id_=TicketId("waits"), remaining_s=100.0))
    open_(role, ticket(id_=TicketId("hurried"), remaining_s=5.0))
    open_(role, ticket(4, id_=TicketId("sent"), remaining_s=100.0))
    step(role), step(role)
    peer(role, Grant(TicketId("sent"), 5, 8), 1.0)
    role.handle(SegmentSent("decode-0", TicketId("sent"), 0, 1), 1.0)
    assert [d.ticket_id.request_id for d in done(role.tick(5.0))] == ["hurried"]
    assert done(role.tick(10.9)) == []
    (end,) = done(role.tick(11.1))  # committed, and nothing was heard of it for a lease
    assert end.ticket_id.request_id == "sent" and end.error is not None
    assert end.error.reason == "UNAVAILABLE"
    assert done(role.tick(99.0)) == []  # without a grant it waits as long as its deadline lets it
    assert [d.error and d.error.reason for d in done(role.tick(100.0))] == ["DEADLINE_EXCEEDED"]
    home(role)


def test_a_link_that_stands_still_is_broken() -> None:
    role = make()
    open_(role, ticket())
    step(role)
    peer(role, Grant(Q, 5, 8), 1.0)
    assert not [e for e in role.tick(14.9) if isinstance(e, BreakLink)]
    assert [e for e in role.tick(15.1) if isinstance(e, BreakLink)]


def test_heartbeats_name_live_transfers_on_a_clock() -> None:
    role = make()
    open_(role, ticket())
    assert sent(role.tick(1.0), TransferHeartbeat) == [TransferHeartbeat((Q,))]
    assert sent(role.tick(1.5), TransferHeartbeat) == []
    role.handle(FromRouter("r", Cancel(Q, "gone")), 1.6)
    assert sent(role.tick(2.0), TransferHeartbeat) == []


def test_a_lost_router_cancels_its_own_tickets_only() -> None:
    role = make()
    open_(role, ticket())
    role.handle(FromRouter("other", Open(ticket(id_=TicketId("p")))), 0.0)
    (end,) = done(role.handle(RouterLost("r"), 0.0))
    assert (end.ticket_id, end.outcome) == (Q, Outcome.CANCELLED)


def test_a_failed_row_fails_alone_and_a_failed_step_fails_its_rows() -> None:
    role = make()
    open_(role, ticket(4))
    open_(role, ticket(4, id_=TicketId("p")))
    assert role.plan(0.0) is not None
    nan = ErrorInfo("INTERNAL", "not finite")
    effects = role.step_done(StepResult((RowResult(error=nan), RowResult((1,)))), 0.0)
    assert [(d.ticket_id, d.error) for d in done(effects)] == [(Q, nan)]
    open_(role, ticket(4, id_=TicketId("z")))
    assert role.plan(0.0) is not None
    assert [d.ticket_id.request_id for d in done(role.step_failed(nan, 0.0))] == ["z"]
    role.check_integrity()


@pytest.mark.parametrize(
    "event",
    [
        FromPeer("decode-0", Grant(Q, 1, 1)),
        FromPeer("decode-0", Window(Q, 1)),
        FromPeer("decode-0", Sealed(Q)),
        FromPeer("decode-0", Abort(Q, BROKEN)),
        SegmentSent("decode-0", Q, 0, 1),
        SegmentStale("decode-0", Q, 0),
        FromRouter("r", Cancel(Q, "")),
    ],
)
def test_events_of_nothing_known_are_counted(event: FromPeer | FromRouter | SegmentSent) -> None:
    role = make()
    (effect,) = role.handle(event, 0.0)
    assert isinstance(effect, Count)


def test_early_sealed_and_a_foreign_peer_are_counted() -> None:
    role = make()
    open_(role, ticket())
    assert isinstance(peer(role, Sealed(Q))[0], Count)
    assert isinstance(role.handle(FromPeer("decode-9", Grant(Q, 5, 8)), 0.0)[0], Count)


def test_misuse_by_the_runtime_raises() -> None:
    role = make()
    with pytest.raises(InternalError):
        role.step_done(StepResult(()), 0.0)
    open_(role, ticket())
    role.plan(0.0)
    with pytest.raises(InternalError):
        role.plan(0.0)

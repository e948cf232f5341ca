"""The decode role, message by message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from protocol.errors import ErrorInfo, InternalError
from protocol.events import (
    BreakLink,
    Count,
    Effect,
    FromPeer,
    FromRouter,
    LinkBroken,
    PeerLost,
    ReceivePages,
    RouterLost,
    SegmentReceived,
    SegmentStale,
    ToRouter,
    ToSender,
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
    Queued,
    Reserved,
    Sealed,
    SenderLost,
    SenderToReceiver,
    Stop,
    TokenItem,
    Tokens,
    TransferHeartbeat,
    Window,
)
from protocol.role import RoleOptions
from protocol.step import StepResult
from protocol.types import FinishReason, Outcome, Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "inc-d", "d:1")
P = Peer("prefill-0", "inc-p", "p:1")
Q = TicketId("q")
EOS = 99
BROKEN = ErrorInfo("UNAVAILABLE", "it broke")


def make(total: int = 12, **changes: int) -> DecodeRole:
    values: dict[str, object] = {
        "page_size": 4,
        "page_bytes": 100,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 4,
        "max_model_len": 100,
        "min_prefill_tokens": 4,
        "eos_token_ids": (EOS,),
        "lease_s": 10,
        "max_waiting": 3,
        "window": 2,
        "max_parked": 2,
        **changes,
    }
    return DecodeRole(ME, Pages(total, 4), RoleOptions(**values))  # type: ignore[arg-type]


def ticket(
    n: int = 10, id_: TicketId = Q, sender: Peer | None = P, max_tokens: int = 6, **changes: object
) -> Ticket:
    params = SamplingParams(max_tokens=max_tokens)
    made = Ticket(id_, sender, ME, tuple(range(n)), n, params)
    return replace(made, **changes)  # type: ignore[arg-type]


def open_(role: DecodeRole, t: Ticket, now: float = 0.0, router: str = "r") -> list[Effect]:
    return role.handle(FromRouter(router, Open(t)), now)


def peer(role: DecodeRole, message: SenderToReceiver, now: float = 0.0) -> list[Effect]:
    return role.handle(FromPeer("prefill-0", message), now)


def said(effects: Iterable[Effect], kind: type) -> list[object]:
    return [
        e.message
        for e in effects
        if isinstance(e, ToRouter | ToSender) and isinstance(e.message, kind)
    ]


def done(effects: Iterable[Effect]) -> list[Done]:
    return [d for d in said(effects, Done) if isinstance(d, Done)]


def items(effects: Iterable[Effect]) -> list[TokenItem]:
    return [item for t in said(effects, Tokens) if isinstance(t, Tokens) for item in t.items]


def step(role: DecodeRole, *tokens: int, now: float = 0.0) -> list[Effect]:
    plan = role.plan(now)
    assert plan is not None
    rows = [row for row in plan.rows if row.sample is not None]
    values = [(t,) for t in tokens] or [(7,)] * len(rows)
    pairs = zip((row.ticket_id for row in rows), values, strict=True)
    return role.step_done(StepResult(dict(pairs)), now)


def grant(role: DecodeRole, t: Ticket, now: float = 0.0) -> list[Effect]:
    open_(role, t, now)
    return peer(role, Offer(t.id, len(t.tokens), 0.0), now)


def hand_over(role: DecodeRole, t: Ticket, token: int = 5, now: float = 0.0) -> list[Effect]:
    """Everything up to the seal, in one segment."""
    grant(role, t, now)
    pages = -(-len(t.tokens) // 4)
    peer(role, Announce(t.id, 0, 0, pages, pages * 100), now)
    peer(role, Commit(t.id, (token,), pages, pages * 100, (11,)), now)
    return role.handle(SegmentReceived("prefill-0", t.id, 0, 11), now)


def home(role: DecodeRole) -> None:
    role.check_integrity()
    assert role.is_idle()
    load = role.load(0.0)
    assert load.free_pages == load.total_pages


def test_the_whole_way_of_a_remote_ticket() -> None:
    role = make()
    assert open_(role, ticket(10), 1.0) == [ToRouter("r", Reserved(Q, 4))]
    effects = peer(role, Offer(Q, 10, 0.5), 1.5)
    assert effects == [ToSender("prefill-0", Grant(Q, 4, 2))]
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
    assert items(role.step_done(StepResult({Q: (6,)}), 3.1)) == [TokenItem(Q, 1, (6,))]
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
    role.step_done(StepResult({Q: (6,)}), 0.0)
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
        assert "0 of 4 pages are free, 1 of 4 sequences are taken" in queued.reason
    (end,) = done(open_(role, ticket()))
    assert end.error is not None and end.error.reason == "OVERLOADED"
    assert end.error.retry_after_s is not None
    effects = role.handle(FromRouter("r", Cancel(TicketId("holds"), "gone")), 1.0)
    assert said(effects, Reserved) == [Reserved(TicketId("w0"), 4)]


def test_max_num_seqs_caps_places() -> None:
    role = make(100, max_num_seqs=2)
    for i in range(2):
        assert said(open_(role, ticket(id_=TicketId(f"a{i}"))), Reserved)
    assert said(open_(role, ticket()), Queued)


def test_a_big_request_that_was_passed_over_gets_the_next_pages() -> None:
    role = make(12, max_waiting=100)
    open_(role, ticket(20, TicketId("holds"), max_tokens=6))  # 7 of 12 pages
    open_(role, ticket(30, TicketId("big")))  # needs 9
    passed = 0
    for i in range(30):
        small = ticket(4, TicketId(f"s{i}"), max_tokens=4)
        if said(open_(role, small), Reserved):
            passed += 1
            role.handle(FromRouter("r", Cancel(small.id, "")), 0.0)
    assert passed == 8
    effects = role.handle(FromRouter("r", Cancel(TicketId("holds"), "")), 0.0)
    reserved = said(effects, Reserved)
    assert reserved and reserved[0] == Reserved(TicketId("big"), 9)


def test_an_early_offer_is_parked_until_its_ticket_comes() -> None:
    role = make()
    assert peer(role, Offer(Q, 10, 0.0)) == []
    assert not role.is_idle()
    effects = open_(role, ticket())
    assert [type(e.message) for e in effects if isinstance(e, ToRouter | ToSender)] == [
        Reserved,
        Grant,
    ]


def test_parked_offers_are_bounded_and_end_on_a_clock() -> None:
    role = make()
    for i in range(2):
        peer(role, Offer(TicketId(f"p{i}"), 10, 0.0), 1.0)
    (abort,) = said(peer(role, Offer(Q, 10, 0.0), 1.0), Abort)
    assert isinstance(abort, Abort) and abort.error.reason == "OVERLOADED"
    assert said(role.tick(10.9), Abort) == []
    assert len(said(role.tick(11.1), Abort)) == 2
    home(role)


def test_an_unused_credit_lapses_and_is_taken_again_by_an_announcement() -> None:
    role = make(4)
    open_(role, ticket())
    peer(role, Offer(Q, 10, 5.0))
    open_(role, ticket(id_=TicketId("next"), sender=None))
    assert said(role.tick(14.9), Queued) == []
    effects = role.tick(15.1)
    (queued,) = said(effects, Queued)
    assert isinstance(queued, Queued) and "announced nothing" in queued.reason
    assert said(effects, Reserved) == [Reserved(TicketId("next"), 4)]
    role.handle(FromRouter("r", Cancel(TicketId("next"), "")), 15.2)
    effects = peer(role, Announce(Q, 0, 0, 3, 300), 15.3)
    assert said(effects, Reserved) == [Reserved(Q, 4)]
    (receive,) = [e for e in effects if isinstance(e, ReceivePages)]
    assert receive.pages is not None
    peer(role, Commit(Q, (5,), 3, 300, (11,)), 15.4)
    assert items(role.handle(SegmentReceived("prefill-0", Q, 0, 11), 15.5))


def test_a_lapsed_credit_that_is_gone_ends_the_ticket_but_not_the_order_of_the_link() -> None:
    role = make(4)
    grant(role, ticket())
    open_(role, ticket(id_=TicketId("next"), sender=None))
    role.tick(10.1)
    effects = peer(role, Announce(Q, 0, 0, 3, 300), 10.2)
    (receive,) = [e for e in effects if isinstance(e, ReceivePages)]
    assert receive.pages is None and receive.n_bytes == 300
    (end,) = done(effects)
    assert end.error is not None and end.error.reason == "OVERLOADED"
    assert len(said(effects, Abort)) == 1
    role.handle(SegmentReceived("prefill-0", Q, 0, 1), 10.3)
    role.handle(FromRouter("r", Cancel(TicketId("next"), "")), 10.4)
    home(role)


def test_a_credit_without_an_offer_lapses_and_the_offer_asks_again() -> None:
    role = make(4)
    open_(role, ticket(remaining_s=100.0))
    role.tick(10.1)
    assert role.load(10.1).free_pages == 4
    effects = peer(role, Offer(Q, 10, 0.0), 11.0)
    assert said(effects, Reserved) and said(effects, Grant)


@pytest.mark.parametrize("known", ["unknown", "cancelled"])
def test_what_nobody_wants_goes_into_a_sink(known: str) -> None:
    role = make()
    if known == "cancelled":
        grant(role, ticket())
        role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0)
    receives = [e for e in peer(role, Announce(Q, 0, 0, 3, 300)) if isinstance(e, ReceivePages)]
    assert receives == [ReceivePages("prefill-0", Q, 0, 300, None)]
    assert not role.is_idle()
    assert role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0) == []
    home(role)


def test_pages_of_a_cancelled_ticket_wait_for_the_link() -> None:
    role = make()
    grant(role, ticket())
    peer(role, Announce(Q, 0, 0, 3, 300))
    effects = role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0)
    assert len(done(effects)) == 1 and len(said(effects, Abort)) == 1
    assert role.load(0.0).free_pages == 8
    role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)
    home(role)


@pytest.mark.parametrize(
    "commit",
    [
        Commit(Q, (5,), 3, 300, (12,)),
        Commit(Q, (5,), 2, 200, (11,)),
        Commit(Q, (), 3, 300, (11,)),
    ],
)
def test_a_commit_that_does_not_agree_never_becomes_tokens(commit: Commit) -> None:
    role = make()
    grant(role, ticket())
    peer(role, Announce(Q, 0, 0, 3, 300))
    role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)
    effects = peer(role, commit)
    assert items(effects) == [] and said(effects, Sealed) == []
    (lost,) = said(effects, SenderLost)
    assert isinstance(lost, SenderLost) and lost.error.reason == "DATA_LOSS"
    assert [d.error for d in done(effects)] == [lost.error]
    assert len(said(effects, Abort)) == 1
    home(role)


@pytest.mark.parametrize("cause", ["peer", "link", "stale", "abort", "commit early", "hole"])
def test_a_lost_sender_is_said_before_the_leg_ends(cause: str) -> None:
    role = make()
    grant(role, ticket())
    peer(role, Announce(Q, 0, 0, 2, 200))
    event = {
        "peer": PeerLost("prefill-0", BROKEN, False),
        "link": LinkBroken("prefill-0", BROKEN, False),
        "stale": SegmentStale("prefill-0", Q, 0),
        "abort": FromPeer("prefill-0", Abort(Q, BROKEN)),
        "commit early": FromPeer("prefill-0", Commit(Q, (5,), 2, 200, (11,))),
        "hole": FromPeer("prefill-0", Announce(Q, 1, 3, 1, 100)),
    }[cause]
    effects = role.handle(event, 0.0)
    effects += role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)
    if cause == "hole":
        effects += role.handle(SegmentReceived("prefill-0", Q, 1, 11), 0.0)
    told = [type(e.message) for e in effects if isinstance(e, ToRouter)]
    assert told == [SenderLost, Done]
    assert len(said(effects, Abort)) == (0 if cause in ("peer", "abort") else 1)
    assert any(isinstance(e, BreakLink) for e in effects) is (cause == "peer")
    home(role)


def test_a_peer_that_is_lost_does_not_end_what_is_sealed_or_not_offered_yet() -> None:
    role = make(20)
    hand_over(role, ticket())
    open_(role, ticket(id_=TicketId("later")))
    assert done(role.handle(PeerLost("prefill-0", BROKEN, False), 0.0)) == []
    assert items(step(role, 6)) == [TokenItem(Q, 1, (6,))]
    assert said(peer(role, Offer(TicketId("later"), 10, 0.0)), Grant)


def test_silence_in_the_middle_ends_on_a_clock_unless_heartbeats_name_the_ticket() -> None:
    role = make()
    grant(role, ticket())
    peer(role, Announce(Q, 0, 0, 1, 100), 1.0)
    role.handle(SegmentReceived("prefill-0", Q, 0, 11), 1.0)
    peer(role, TransferHeartbeat((Q,)), 8.0)
    assert done(role.tick(17.9)) == []
    effects = role.tick(18.1)
    assert said(effects, SenderLost) and len(said(effects, Abort)) == 1
    home(role)


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
    effects = role.step_done(StepResult({Q: (6,)}), 0.0)
    assert items(effects) == [] and [d.outcome for d in done(effects)] == [Outcome.OK]
    assert isinstance(role.handle(FromRouter("r", Stop(Q, 1)), 0.0)[0], Count)
    home(role)


def test_a_cancel_in_a_step_keeps_the_pages_until_the_step_has_ended() -> None:
    role = make()
    hand_over(role, ticket())
    assert role.plan(0.0) is not None
    assert role.handle(FromRouter("r", Cancel(Q, "gone")), 0.0) == []
    assert role.load(0.0).free_pages == 8
    assert [d.outcome for d in done(role.step_done(StepResult({Q: (6,)}), 0.0))] == [
        Outcome.CANCELLED
    ]
    home(role)


def test_a_failed_row_fails_alone() -> None:
    role = make(20)
    hand_over(role, ticket())
    hand_over(role, ticket(id_=TicketId("p")))
    assert role.plan(0.0) is not None
    nan = ErrorInfo("INTERNAL", "not finite")
    effects = role.step_done(StepResult({TicketId("p"): (1,)}, {Q: nan}), 0.0)
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


@pytest.mark.parametrize(
    "message",
    [Commit(Q, (1,), 1, 1, ()), Abort(Q, BROKEN), Grant(Q, 1, 1), Sealed(Q)],
)
def test_messages_about_nothing_known_are_counted(message: Commit | Abort | Grant | Sealed) -> None:
    role = make()
    (effect,) = role.handle(FromPeer("prefill-0", message), 0.0)
    assert isinstance(effect, Count)


def test_duplicates_are_counted() -> None:
    role = make()
    grant(role, ticket())
    assert isinstance(peer(role, Offer(Q, 10, 0.0))[0], Count)
    assert isinstance(open_(role, ticket())[0], Count)
    peer(role, Announce(Q, 0, 0, 3, 300))
    commit = Commit(Q, (5,), 3, 300, (11,))
    peer(role, commit)
    assert isinstance(peer(role, commit)[0], Count)
    assert items(role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0))
    assert isinstance(role.handle(SegmentReceived("prefill-0", Q, 0, 11), 0.0)[0], Count)
    assert isinstance(peer(role, Abort(Q, BROKEN))[0], Count)  # sealed: too late


def test_an_offer_of_another_length_is_refused_by_name() -> None:
    role = make()
    open_(role, ticket())
    effects = peer(role, Offer(Q, 11, 0.0))
    (end,) = done(effects)
    assert end.error is not None and end.error.reason == "PEER_MISMATCH"
    assert "11 tokens" in end.error.message and "10" in end.error.message
    assert said(effects, Grant) == [] and len(said(effects, Abort)) == 1
    home(role)


def test_everyone_who_is_passed_over_has_a_reason() -> None:
    role = make(12, max_num_seqs=3, max_waiting=10)
    hand_over(role, ticket())
    grant(role, ticket(id_=TicketId("coming")))
    open_(role, ticket(id_=TicketId("not offered")))
    open_(role, ticket(id_=TicketId("no place")))
    plan = role.plan(0.0)
    assert plan is not None and list(plan.advance) == [Q]
    reasons = {t.request_id: why for t, why in plan.reasons.items()}
    assert reasons["coming"] == "waits for its KV from prefill-0"
    assert reasons["not offered"] == "waits for the offer of prefill-0"
    assert reasons["no place"].startswith("waits for a place: 0 of 12 pages are free")


def test_misuse_by_the_runtime_raises() -> None:
    role = make()
    with pytest.raises(InternalError):
        role.step_done(StepResult({}), 0.0)
    hand_over(role, ticket())
    role.plan(0.0)
    with pytest.raises(InternalError):
        role.plan(0.0)

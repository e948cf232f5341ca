"""The decode role as the receiving end of hand-offs, message by message."""

from __future__ import annotations

import pytest
from unit.decode_worker.decode_bench import (
    BROKEN,
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

from protocol.events import (
    BreakLink,
    Count,
    FromPeer,
    FromRouter,
    LinkBroken,
    PeerLost,
    ReceivePages,
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
    Queued,
    Reserved,
    Sealed,
    SenderLost,
    TokenItem,
    TransferHeartbeat,
)
from protocol.types import TicketId


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
    assert said(effects, Reserved) == [Reserved(TicketId("next"), 3)]
    role.handle(FromRouter("r", Cancel(TicketId("next"), "")), 15.2)
    effects = peer(role, Announce(Q, 0, 0, 3, 300), 15.3)
    assert said(effects, Reserved) == [Reserved(Q, 3)]
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
    assert role.load(0.0).free_pages == 9
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

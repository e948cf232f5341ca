"""Links of both transports within one process: order, bytes, checksums, stale pages, endings."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import xxhash
from link_rig import LARGE, SMALL, TICKET, Side, link_name, open_both, page_sets

from kv_transfer.rendezvous import RendezvousMap
from kv_transfer.transport import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.p2p import P2pTransport
from protocol.errors import InternalError, WrongState
from protocol.events import (
    LinkBroken,
    ReceivePages,
    SegmentReceived,
    SegmentSent,
    SegmentStale,
    SendPages,
)
from protocol.types import KvGeometry

PAGES = 96


@pytest.fixture(params=["loopback", "p2p"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return LoopbackTransport() if request.param == "loopback" else P2pTransport()


@pytest.fixture
def rendezvous() -> RendezvousMap:
    return RendezvousMap()


class Pair:
    def __init__(self, transport: Transport, rendezvous: RendezvousMap) -> None:
        self.transport = transport
        self.rendezvous = rendezvous
        self.sides: list[Side] = []

    def make(
        self, geometry: KvGeometry = SMALL, op_timeout_s: float = 10.0, connect: bool = True
    ) -> tuple[Side, Side]:
        sender = Side(self.transport, geometry, PAGES, op_timeout_s)
        receiver = Side(self.transport, geometry, PAGES, op_timeout_s)
        sender.fill(1)
        self.sides += [sender, receiver]
        if connect:
            open_both(sender, receiver, self.rendezvous)
        return sender, receiver


@pytest.fixture
def pair(transport: Transport, rendezvous: RendezvousMap) -> Iterator[Pair]:
    pair = Pair(transport, rendezvous)
    yield pair
    for side in pair.sides:
        assert side.links.close_all("the test is over", 10.0)
        assert side.links.threads() == 0


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["staged", "direct"])
def test_random_page_sets_arrive_whole_and_in_order(pair: Pair, geometry: KvGeometry) -> None:
    sender, receiver = pair.make(geometry)
    sets = page_sets(seed=7, segments=12, pages=PAGES, most=8)
    for segment, (sources, targets) in enumerate(sets):
        sender.send(segment, sources)
        receiver.receive(segment, targets)
    for segment, (sources, targets) in enumerate(sets):
        wire = sender.pool.rows[sources].numpy().tobytes()
        checksum = xxhash.xxh3_64_intdigest(wire)
        assert sender.next() == SegmentSent("receiver", TICKET, segment, checksum)
        assert receiver.next() == SegmentReceived("sender", TICKET, segment, checksum)
        assert torch.equal(receiver.pool.rows[targets], sender.pool.rows[sources])
    moved = {page for _, targets in sets for page in targets}
    for page in set(range(PAGES)) - moved:
        assert not receiver.pool.row(page).any(), f"page {page} was written, which nobody named"


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["staged", "direct"])
def test_a_sink_keeps_the_order_and_writes_no_page(pair: Pair, geometry: KvGeometry) -> None:
    sender, receiver = pair.make(geometry)
    draw = random.Random(3)
    before = receiver.pool.rows.clone()
    last_targets: list[int] = []
    for segment in range(10):
        sources = draw.sample(range(PAGES), 9)
        sink = segment < 9
        last_targets = sources[::-1]
        sender.send(segment, sources)
        receiver.receive(segment, last_targets, sink=sink)
    for segment in range(10):
        sent, received = sender.next(), receiver.next()
        assert isinstance(sent, SegmentSent) and isinstance(received, SegmentReceived)
        assert sent.segment == received.segment == segment
        assert sent.checksum == received.checksum
    assert torch.equal(receiver.pool.rows[last_targets], sender.pool.rows[sources])
    untouched = sorted(set(range(PAGES)) - set(last_targets))
    assert torch.equal(receiver.pool.rows[untouched], before[untouched])


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["staged", "direct"])
def test_a_stale_page_is_not_sent_and_the_wire_stays_in_order(
    pair: Pair, geometry: KvGeometry
) -> None:
    sender, receiver = pair.make(geometry)
    stale = SendPages("receiver", TICKET, 0, sender.refs([1, 2, 3]))
    sender.generations[2] += 1  # freed, and perhaps somebody else's by now
    sender.links.post(stale)
    receiver.receive(0, [4, 5, 6])
    sender.send(1, [7, 8])
    receiver.receive(1, [9, 10])
    assert sender.next() == SegmentStale("receiver", TICKET, 0)
    received = receiver.next()
    assert isinstance(received, SegmentReceived)
    # What went over the wire cannot pass for the pages that were meant.
    assert received.checksum != xxhash.xxh3_64_intdigest(
        sender.pool.rows[[1, 2, 3]].numpy().tobytes()
    )
    assert not receiver.pool.row(5).any()
    assert isinstance(sender.next(), SegmentSent)
    assert isinstance(receiver.next(), SegmentReceived)
    assert torch.equal(receiver.pool.rows[[9, 10]], sender.pool.rows[[7, 8]])


def test_a_page_freed_while_it_is_sent_makes_its_segment_stale(pair: Pair) -> None:
    sender, receiver = pair.make(LARGE, connect=False)
    looked_at: list[int] = []

    def freed_after_the_first_look(page: int) -> int:
        looked_at.append(page)
        return 1 if looked_at.count(page) > 1 and page == 3 else 0

    sender.links._generation_of = freed_after_the_first_look
    open_both(sender, receiver, pair.rendezvous)
    sender.send(0, [2, 3])
    receiver.receive(0, [2, 3])
    assert sender.next() == SegmentStale("receiver", TICKET, 0)
    assert isinstance(receiver.next(), SegmentReceived)


def test_a_receive_never_writes_a_page_that_changed_hands(pair: Pair) -> None:
    sender, receiver = pair.make()
    old = receiver.refs([4, 5])
    receiver.generations[5] += 1
    n_bytes = 2 * SMALL.page_bytes
    receiver.links.post(ReceivePages("sender", TICKET, 0, n_bytes, old))
    sender.send(0, [1, 2])
    assert receiver.next() == SegmentStale("sender", TICKET, 0)
    assert not receiver.pool.rows.any()
    assert isinstance(sender.next(), SegmentSent)


def test_an_overdue_operation_breaks_the_link_once(pair: Pair) -> None:
    sender, receiver = pair.make(op_timeout_s=0.5)
    sender.send(0, [1])
    receiver.receive(0, [1])
    assert isinstance(sender.next(), SegmentSent)
    started = time.monotonic()
    for segment in range(1, 5):
        sender.send(segment, [segment])  # nobody receives
    broken = sender.broken(8.0)
    assert 0.4 < time.monotonic() - started < 6.0
    assert broken == LinkBroken("receiver", broken.error, True)
    assert broken.error.reason == "UNAVAILABLE"
    assert "in time" in broken.error.message or "progress" in broken.error.message
    assert isinstance(receiver.next(), SegmentReceived)
    receiver.receive(1, [2])  # the other side learns of it with its next operation
    assert "sender" in receiver.broken(8.0).worker_id
    assert sender.events.empty() and receiver.events.empty()


def test_close_is_prompt_while_an_operation_blocks(pair: Pair) -> None:
    sender, receiver = pair.make()
    sender.send(0, [1])
    receiver.receive(0, [1])
    assert isinstance(receiver.next(), SegmentReceived)
    receiver.receive(1, [2, 3])  # blocks: nothing is sent
    started = time.monotonic()
    assert receiver.links.close("sender", outgoing=False, cause="an overdue lease")
    broken = receiver.broken(8.0)
    assert time.monotonic() - started < 4.0
    assert "an overdue lease" in broken.error.message
    receiver.links.close("sender", outgoing=False, cause="again")
    assert receiver.links.close_all("again", 5.0)
    assert receiver.events.empty()
    assert not receiver.pool.rows[2:4].any()


def test_close_while_connecting(pair: Pair) -> None:
    sender, _ = pair.make(connect=False)
    name = link_name()
    sender.links.open(name, outgoing=True, rendezvous=pair.rendezvous.open(name.key))
    sender.send(0, [1])
    started = time.monotonic()
    sender.links.close("receiver", outgoing=True, cause="not needed any more")
    assert "not needed any more" in sender.broken(8.0).error.message
    assert time.monotonic() - started < 4.0


@pytest.mark.parametrize("attempt", range(4))
def test_close_while_the_other_end_has_left_its_address_and_gone(
    rendezvous: RendezvousMap, attempt: int
) -> None:
    """gloo lets one of the two dial, which one is chance: in half of the cases this end waits."""
    asked, gone = threading.Event(), threading.Event()
    local = rendezvous.open(link_name(attempt).key)

    class LeavesWithoutDialling:
        set, check, delete = local.set, local.check, local.delete

        def get(self, key: str, timeout_s: float) -> bytes | None:
            if key.endswith("/0"):  # the sender's address
                asked.set()
                gone.wait(20)
                raise WrongState("gone")
            return local.get(key, timeout_s)

    sender, receiver = Side(P2pTransport(), SMALL, 4), Side(P2pTransport(), SMALL, 4)
    name = link_name(attempt)
    receiver.links.open(name, outgoing=False, rendezvous=LeavesWithoutDialling())
    sender.links.open(name, outgoing=True, rendezvous=local)
    assert asked.wait(10)
    started = time.monotonic()
    for side in (sender, receiver):
        assert side.links.close_all("leaving", 5.0)
        side.broken()
    assert time.monotonic() - started < 4.0
    gone.set()


def test_a_peer_that_never_connects_breaks_the_link(pair: Pair) -> None:
    sender, _ = pair.make(connect=False, op_timeout_s=0.4)
    name = link_name()
    sender.links.open(name, outgoing=True, rendezvous=pair.rendezvous.open(name.key))
    sender.send(0, [1])
    sender.broken(8.0)
    assert sender.events.empty()


def test_both_ends_see_it_when_one_closes(pair: Pair) -> None:
    sender, receiver = pair.make()
    sender.send(0, [1])
    receiver.receive(0, [1])
    assert isinstance(receiver.next(), SegmentReceived)
    assert isinstance(sender.next(), SegmentSent)
    receiver.receive(1, [2])
    sender.links.close("receiver", outgoing=True, cause="leaving")
    assert "leaving" in sender.broken().error.message
    assert "other end" in receiver.broken(9.0).error.message


def test_unequal_announcements_break_the_link_and_not_the_pages(pair: Pair) -> None:
    sender, receiver = pair.make()
    n_bytes = SMALL.page_bytes * 2 + 1
    receiver.links.post(ReceivePages("sender", TICKET, 0, n_bytes, receiver.refs([1, 2])))
    sender.send(0, [1, 2])
    assert "1025 bytes" in receiver.broken().error.message
    assert not receiver.pool.rows.any()


def test_an_effect_without_a_link_is_answered(pair: Pair) -> None:
    sender, receiver = pair.make(connect=False)
    sender.send(0, [1])
    assert "not connected" in sender.broken().error.message
    receiver.receive(0, [1])
    assert not receiver.broken().outgoing
    open_both(sender, receiver, pair.rendezvous)
    sender.send(1, [1])
    receiver.receive(1, [1])
    assert isinstance(sender.next(), SegmentSent)
    assert isinstance(receiver.next(), SegmentReceived)


def test_a_second_link_waits_for_the_end_of_the_first(
    transport: Transport, rendezvous: RendezvousMap
) -> None:
    in_handler, go_on = threading.Event(), threading.Event()
    side = Side(transport, SMALL, 4)
    links = side.links

    def hold(event: object) -> None:
        in_handler.set()
        assert go_on.wait(10)
        links.forget("receiver", outgoing=True)
        links.open(link_name(1), outgoing=True, rendezvous=rendezvous.open(link_name(1).key))
        side.events.put(event)  # type: ignore[arg-type]

    links._on_event = hold
    local = rendezvous.open(link_name().key)
    links.open(link_name(), outgoing=True, rendezvous=local)
    with pytest.raises(WrongState):
        links.open(link_name(1), outgoing=True, rendezvous=local)
    links.close("receiver", outgoing=True, cause="first")
    assert in_handler.wait(10)
    with pytest.raises(WrongState):
        links.open(link_name(1), outgoing=True, rendezvous=local)
    go_on.set()
    side.broken()
    assert links.get("receiver", outgoing=True).name.epoch == 1
    links._on_event = side.events.put
    assert links.close_all("over", 10.0)
    side.broken()


def test_wrong_direction_is_refused(pair: Pair) -> None:
    sender, receiver = pair.make()
    outgoing = sender.links.get("receiver", outgoing=True)
    incoming = receiver.links.get("sender", outgoing=False)
    assert outgoing is not None and incoming is not None
    with pytest.raises(InternalError):
        outgoing.post_receive(ReceivePages("receiver", TICKET, 0, 512, None))
    with pytest.raises(InternalError):
        incoming.post_send(SendPages("sender", TICKET, 0, ()))


def test_posting_from_many_threads_while_the_link_is_closed(pair: Pair) -> None:
    sender, receiver = pair.make()
    carried, stop = threading.Event(), threading.Event()

    def post(first: int) -> None:
        segment = first
        while not stop.is_set():
            with posting:  # what the runtime's lock does: one order of sends and receives
                sender.send(segment, [segment % PAGES])
                receiver.receive(segment, [segment % PAGES])
            segment += 4
            if segment > 200:
                carried.set()

    posting = threading.Lock()
    threads = [threading.Thread(target=post, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    assert carried.wait(20)
    incoming = receiver.links.get("sender", outgoing=False)
    assert incoming is not None
    incoming.close("amid everything")
    seen: list[int] = []
    while not isinstance(event := receiver.next(), LinkBroken):
        assert isinstance(event, SegmentReceived)
        seen.append(event.segment)
    frozen = receiver.pool.rows.clone()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(seen) == len(set(seen)), "a segment was reported twice"
    assert torch.equal(frozen, receiver.pool.rows), "a page was written after the link's end"
    while not isinstance(sender.next(), LinkBroken):
        pass
    for side in (sender, receiver):
        assert side.links.close_all("over", 10)
        later = [side.events.get_nowait() for _ in range(side.events.qsize())]
        assert all(isinstance(event, LinkBroken) for event in later)  # "not connected" ones

"""Streams and links of the small world, with the promises of ``protocol.events``.

A stream keeps its order; a link carries bytes in the order of its sends and matches them with
receives one by one; stream and link of a pair share one life. What is checked here: the two ends
of a link name the same segment, and no page changes its owner while the link touches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.errors import ErrorInfo
from protocol.events import (
    Event,
    FromPeer,
    LinkBroken,
    PeerLost,
    ReceivePages,
    SegmentReceived,
    SegmentSent,
    SendPages,
)
from protocol.messages import ReceiverToSender
from protocol.types import TicketId

if TYPE_CHECKING:
    from sim.handoff_world import World

BROKEN = ErrorInfo("UNAVAILABLE", "the link broke")


@dataclass(eq=False)
class Pair:
    """Stream and link from one prefill worker to one decode worker."""

    sends: deque[SendPages] = field(default_factory=deque)
    receives: deque[ReceivePages] = field(default_factory=deque)
    pipe: deque[tuple[TicketId, int, list[list[object]], int]] = field(default_factory=deque)
    up: bool = True
    epoch: int = 0
    told: set[str] = field(default_factory=set)  # workers that know that it is down


class Network:
    """All pairs of one world."""

    def __init__(self, world: World, pairs: Iterable[tuple[str, str]]) -> None:
        self.world = world
        self.pairs = {pair: Pair() for pair in pairs}

    def to_sender(self, receiver: str, sender: str, message: ReceiverToSender) -> None:
        """Say something on the stream that ``sender`` opened; dropped when it is down."""
        pair = self.pairs[sender, receiver]
        if pair.up:
            self._stream(pair, receiver, sender, FromPeer(receiver, message))

    def post_send(self, sender: str, op: SendPages) -> None:
        """Queue a segment on the link."""
        pair = self.pairs[sender, op.worker_id]
        pair.sends.append(op)
        self._pump(sender, op.worker_id, pair)
        self._answer_dead(pair, sender, op.worker_id, True)

    def post_receive(self, receiver: str, op: ReceivePages) -> None:
        """Queue a receive on the link."""
        pair = self.pairs[op.worker_id, receiver]
        pair.receives.append(op)
        self._pump(op.worker_id, receiver, pair)
        self._answer_dead(pair, receiver, op.worker_id, False)

    def _stream(self, pair: Pair, a: str, b: str, event: Event) -> None:
        epoch = pair.epoch

        def arrive() -> None:
            if pair.epoch == epoch and pair.up:
                self.world.submit(self.world.workers[b], event)

        self.world.in_order(a, b, arrive)

    def to_receiver(self, sender: str, receiver: str, message: object) -> None:
        pair = self.pairs[sender, receiver]
        if not pair.up:
            if sender not in pair.told:
                return  # it will hear of it
            if self.world.random.random() < self.world.chances.dial_fails:
                lost = PeerLost(receiver, BROKEN, outgoing=True)
                self.world.after(
                    self.world.delay(), lambda: self.world.submit(self.world.workers[sender], lost)
                )
                return
            self._tell(sender, receiver, pair, receiver)  # the new stream ends the old one first
            assert not pair.sends and not pair.receives
            pair.pipe.clear()
            pair.up, pair.told = True, set()
        self._stream(pair, sender, receiver, FromPeer(sender, message))  # type: ignore[arg-type]

    def break_pair(self, sender: str, receiver: str) -> None:
        """Cut stream and link; each side hears of it some time later."""
        pair = self.pairs[sender, receiver]
        if not pair.up:
            return
        self.world.counts["breaks"] += 1
        pair.up, pair.told = False, set()
        pair.epoch += 1
        epoch = pair.epoch
        for side in (sender, receiver):

            def tell(side: str = side) -> None:
                if pair.epoch == epoch and not pair.up:
                    self._tell(sender, receiver, pair, side)

            self.world.after(self.world.delay(), tell)

    def _tell(self, sender: str, receiver: str, pair: Pair, side: str) -> None:
        if side in pair.told:
            return
        outgoing = side == sender
        other = receiver if outgoing else sender
        (pair.sends if outgoing else pair.receives).clear()
        events: list[Event] = [
            LinkBroken(other, BROKEN, outgoing),
            PeerLost(other, BROKEN, outgoing),
        ]
        self.world.random.shuffle(events)
        for event in events:
            self.world.submit(self.world.workers[side], event)
        pair.told.add(side)

    def _answer_dead(self, pair: Pair, name: str, other: str, outgoing: bool) -> None:
        """An operation for which there is no link is answered by ``LinkBroken``."""
        if pair.up or name not in pair.told:
            return

        def answer_() -> None:
            (pair.sends if outgoing else pair.receives).clear()
            self.world.submit(self.world.workers[name], LinkBroken(other, BROKEN, outgoing))

        self.world.after(0.0, answer_)

    def _pump(self, sender: str, receiver: str, pair: Pair) -> None:
        epoch = pair.epoch

        def move() -> None:
            if pair.epoch != epoch or not pair.up:
                return
            if pair.sends and (not pair.pipe or self.world.random.random() < 0.7):
                self._send_one(sender, receiver, pair)
            elif pair.receives and pair.pipe:
                self._receive_one(sender, receiver, pair)
            if pair.up and (pair.sends or (pair.receives and pair.pipe)):
                self.world.after(self._link_delay(), move)

        self.world.after(self._link_delay(), move)

    def _send_one(self, sender: str, receiver: str, pair: Pair) -> None:
        if self.world.random.random() < self.world.chances.break_link:
            self.break_pair(sender, receiver)
            return
        worker, op = self.world.workers[sender], pair.sends.popleft()
        assert worker.pages.are_current(op.pages), "a page was freed while it was sent"
        content = [list(worker.device.memory[ref.page]) for ref in op.pages]
        checksum = hash(repr(content))
        if self.world.random.random() < self.world.chances.corrupt:
            content[0][0] = "corrupt"
        pair.pipe.append((op.ticket_id, op.segment, content, len(content) * 100))
        self.world.submit(worker, SegmentSent(receiver, op.ticket_id, op.segment, checksum))

    def _receive_one(self, sender: str, receiver: str, pair: Pair) -> None:
        worker, op = self.world.workers[receiver], pair.receives.popleft()
        ticket_id, segment, content, n_bytes = pair.pipe.popleft()
        assert (op.ticket_id, op.segment, op.n_bytes) == (ticket_id, segment, n_bytes)
        if op.pages is not None:
            assert worker.pages.are_current(op.pages), "a page was freed while it was received into"
            for ref, cells in zip(op.pages, content, strict=True):
                worker.device.memory[ref.page] = list(cells)
        event = SegmentReceived(sender, ticket_id, segment, hash(repr(content)))
        self.world.submit(worker, event)

    def _link_delay(self) -> float:
        """Until a link has moved a segment."""
        return (
            self.world.delay()
            if self.world.random.random() < self.world.chances.stall
            else self.world.delay() / 4
        )

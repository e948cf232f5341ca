"""What a clock ends on a prefill worker, whatever else happens.

This file owns deadlines, silent receivers, overdue link operations and the heartbeat to
receivers. A clock never frees pages by itself: it starts an ending, and
``prefill_worker.tickets`` does the rest.

Life: ``tick`` at least every 100 ms.
"""

from __future__ import annotations

from prefill_worker.handoff import HandOff
from prefill_worker.leg import Leg
from prefill_worker.tickets import Tickets
from protocol.errors import DeadlineExceeded, Unavailable
from protocol.events import BreakLink, Count, Effect, ToReceiver
from protocol.messages import TransferHeartbeat
from protocol.role import RoleOptions
from protocol.types import Outcome, Peer, TicketId


class Clocks:
    """Everything on this worker that ends by time."""

    def __init__(self, tickets: Tickets, hand_off: HandOff, options: RoleOptions) -> None:
        self._tickets = tickets
        self._hand_off = hand_off
        self._options = options
        self._beat_at = 0.0

    def tick(self, now: float) -> list[Effect]:
        """End what is due now."""
        effects: list[Effect] = []
        for leg in self._tickets:
            effects += self._look_at(leg, now)
        bound = self._options.lease_s + self._options.link_op_s
        for worker_id in self._hand_off.ops.overdue(now, bound):
            effects.append(BreakLink(worker_id, True, f"no segment left it for {bound} s"))
        if now - self._beat_at >= self._options.heartbeat_s:
            self._beat_at = now
            effects += self._heartbeats()
        return effects

    def _look_at(self, leg: Leg, now: float) -> list[Effect]:
        if now >= leg.deadline:
            late = DeadlineExceeded(f"deadline passed after {now - leg.opened_at:.1f} s").info()
            return self._tickets.end(leg, Outcome.FAILED, late, now)
        silence = now - leg.moved_at
        if leg.transfer.waits_for_receiver and silence > self._options.lease_s:
            silent = Unavailable(
                f"{leg.ticket.receiver.worker_id} said nothing about the hand-off for "
                f"{silence:.1f} s"
            ).info()
            ended = self._tickets.end(leg, Outcome.FAILED, silent, now)
            return [Count("leases_ended", "silence"), *ended]
        if leg.transfer.can_announce:  # pages from the cache need not wait for the step
            return self._hand_off.go_on(leg, now)
        return []

    def _heartbeats(self) -> list[Effect]:
        live: dict[Peer, list[TicketId]] = {}
        for leg in self._tickets:
            live.setdefault(leg.ticket.receiver, []).append(leg.ticket.id)
        return [ToReceiver(p, TransferHeartbeat(tuple(ids))) for p, ids in live.items()]

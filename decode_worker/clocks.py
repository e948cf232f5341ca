"""What a clock ends on a decode worker, whatever else happens.

This file owns deadlines, silent senders, unused credits, early offers without a ticket, overdue
link operations and the heartbeat to senders. A clock never frees pages by itself: it starts an
ending, and ``decode_worker.tickets`` does the rest.

Life: ``tick`` at least every 100 ms.
"""

from __future__ import annotations

from decode_worker.intake import Intake
from decode_worker.leg import Leg
from decode_worker.tickets import Tickets
from kv_transfer.link_ops import LinkOps
from protocol.errors import DeadlineExceeded, Unavailable
from protocol.events import BreakLink, Count, Effect, ToSender
from protocol.lifecycle import ReceiveState
from protocol.messages import Abort, TransferHeartbeat
from protocol.role import RoleOptions
from protocol.types import Outcome, TicketId

MID_TRANSFER = (ReceiveState.RECEIVING, ReceiveState.COMMITTED)


class Clocks:
    """Everything on this worker that ends by time."""

    def __init__(
        self, tickets: Tickets, intake: Intake, ops: LinkOps, options: RoleOptions
    ) -> None:
        self._tickets = tickets
        self._intake = intake
        self._ops = ops
        self._options = options
        self._beat_at = 0.0

    def tick(self, now: float) -> list[Effect]:
        """End what is due now."""
        effects: list[Effect] = []
        for leg in self._tickets:
            if leg.outcome is None:
                effects += self._look_at(leg, now)
        for leg in self._intake.lapse(now):
            effects += [Count("leases_ended", "credit"), self._intake.queued(leg)]
        for worker_id, ticket_id in self._intake.stale_offers(now):
            unopened = Unavailable(f"no router opened {ticket_id} here within the lease").info()
            effects += [
                Count("leases_ended", "offer"),
                ToSender(worker_id, Abort(ticket_id, unopened)),
            ]
        bound = self._options.lease_s + self._options.link_op_s
        for worker_id in self._ops.overdue(now, bound):
            effects.append(BreakLink(worker_id, False, f"no segment came for {bound} s"))
        if now - self._beat_at >= self._options.heartbeat_s:
            self._beat_at = now
            effects += self._heartbeats()
        self._intake.look_again()
        return effects

    def _look_at(self, leg: Leg, now: float) -> list[Effect]:
        if now >= leg.deadline:
            over = DeadlineExceeded(f"deadline passed after {now - leg.opened_at:.1f} s").info()
            return self._tickets.end(leg, Outcome.FAILED, over, now)
        if leg.transfer is None or leg.transfer.state not in MID_TRANSFER:
            return []
        silent = now - leg.transfer.heard_at
        if silent <= self._options.lease_s:
            return []
        lost = Unavailable(
            f"{leg.transfer.worker_id} said nothing about the hand-off for {silent:.1f} s"
        ).info()
        return [Count("leases_ended", "silence"), *self._tickets.lose(leg, lost, now)]

    def _heartbeats(self) -> list[Effect]:
        live: dict[str, list[TicketId]] = {}
        for leg in self._tickets:
            if leg.outcome is None and leg.transfer and leg.transfer.live:
                live.setdefault(leg.transfer.worker_id, []).append(leg.ticket.id)
        return [ToSender(w, TransferHeartbeat(tuple(ids))) for w, ids in live.items()]

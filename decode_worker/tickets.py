"""The tickets of one decode worker, and how each of them ends.

This file owns the table of legs and the only way out of it. It must say Done exactly once per
ticket, and must never free pages that a link or the running step may still touch.

Life of an ending: ``end`` fixes the outcome, takes the leg out of queue, places and schedule and
tells a sender that still works on it -> Done, at once or (``finish``) when the step that holds
the leg has ended -> drained: ``release_if_quiet`` after every end of a link operation. A ticket of
several choices ends with the last of them (``end_choice``).
"""

from __future__ import annotations

from collections.abc import Iterator

from decode_worker.intake import Intake
from decode_worker.leg import Leg
from decode_worker.memory import Memory
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import On, Sequence, State
from kv_transfer.attempts import Attempts
from kv_transfer.link_ops import LinkOps
from protocol.errors import Cancelled, ErrorInfo, InternalError
from protocol.events import Count, Effect, ToRouter, ToSender
from protocol.lifecycle import ReceiveEvent
from protocol.messages import Abort, Done, SenderLost
from protocol.types import Outcome, TicketId


class Tickets:
    """All legs of one worker."""

    def __init__(
        self,
        worker_id: str,
        memory: Memory,
        scheduler: DecodeScheduler,
        intake: Intake,
        ops: LinkOps,
        remembered: int,
    ) -> None:
        self._worker_id = worker_id
        self._memory = memory
        self._scheduler = scheduler
        self._intake = intake
        self._ops = ops
        self._legs: dict[TicketId, Leg] = {}
        self._draining: dict[TicketId, Leg] = {}
        self.attempts = Attempts(remembered)

    def __iter__(self) -> Iterator[Leg]:
        """All legs that have not said Done; safe against endings on the way."""
        return iter(list(self._legs.values()))

    def __len__(self) -> int:
        return len(self._legs) + len(self._draining)

    def add(self, leg: Leg) -> None:
        """A leg begins."""
        self.attempts.begin(leg.ticket.id)
        self._legs[leg.ticket.id] = leg

    def get(self, ticket_id: TicketId) -> Leg | None:
        """The leg, also one whose outcome is fixed and whose step is still running."""
        return self._legs.get(ticket_id)

    def live(self, ticket_id: TicketId) -> Leg | None:
        """The leg, if its outcome is open."""
        leg = self._legs.get(ticket_id)
        return leg if leg is not None and leg.outcome is None else None

    def lose(self, leg: Leg, error: ErrorInfo, now: float) -> list[Effect]:
        """The sender's side failed: say so before the leg ends."""
        lost = ToRouter(leg.router_id, SenderLost(leg.ticket.id, error))
        return [lost, Count("transfers", "failed"), *self.end(leg, Outcome.FAILED, error, now)]

    def end(self, leg: Leg, outcome: Outcome, error: ErrorInfo | None, now: float) -> list[Effect]:
        """Decide how a ticket ends; say so now, or when the step that holds it has ended."""
        if leg.outcome is not None:
            return []
        leg.outcome, leg.error = outcome, error
        for seq in leg.sequences:
            if seq.state is not State.OVER:
                self._leave(seq)
        self._intake.give_up(leg)
        effects: list[Effect] = []
        transfer = leg.transfer
        if transfer is not None and not transfer.over:
            transfer.follow(ReceiveEvent.ABORT)
            if transfer.offer is not None:
                abort = Abort(leg.ticket.id, error or Cancelled("over").info())
                effects.append(ToSender(transfer.worker_id, abort))
        if not leg.in_step:
            effects += self.finish(leg, now)
        return effects

    def end_choice(self, seq: Sequence, now: float) -> list[Effect]:
        """One choice has ended well; with the last one its ticket does."""
        if seq.state is State.OVER or seq.leg.outcome is not None:
            return []
        self._leave(seq)
        if not seq.in_step:
            self._memory.free(seq)
        return self.end(seq.leg, Outcome.OK, None, now) if seq.leg.all_over else []

    def parted(self, leg: Leg, first: Sequence) -> None:
        """A leg's further choices have their first tokens: they get seats, and pages soon."""
        if len(leg.sequences) > 1:
            for seq in leg.sequences:
                if seq.state is State.FORKING:
                    self._memory.seat(seq)
                else:
                    self._memory.freed = True  # the seat of a choice that ended at once
            self._scheduler.part(first)

    def _leave(self, seq: Sequence) -> None:
        self._scheduler.leave(seq)
        self._memory.stand_up(seq)
        seq.follow(On.END)

    def finish(self, leg: Leg, now: float) -> list[Effect]:
        """Say Done, and let the pages go as soon as nothing touches them."""
        ticket_id = leg.ticket.id
        if leg.outcome is None:
            raise InternalError(f"{ticket_id} is finished without an outcome")
        del self._legs[ticket_id]
        self._draining[ticket_id] = leg
        self.attempts.finish(ticket_id)
        self.release_if_quiet(ticket_id)
        error = leg.error if leg.outcome is Outcome.FAILED else None
        done = Done(ticket_id, leg.outcome, leg.timings(self._worker_id, now), error)
        return [ToRouter(leg.router_id, done)]

    def release_if_quiet(self, ticket_id: TicketId) -> None:
        """Free the pages of a finished leg once no link operation touches them."""
        leg = self._draining.get(ticket_id)
        if leg is None or self._ops.touching(ticket_id):
            return
        for seq in leg.sequences:
            self._memory.free(seq)
        del self._draining[ticket_id]

    def check_integrity(self) -> None:
        """Pages add up, and every reservation belongs to a ticket that is known here."""
        legs = [*self._legs.values(), *self._draining.values()]
        self._memory.check_integrity(seq for leg in legs for seq in leg.sequences)

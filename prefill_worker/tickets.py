"""The tickets of one prefill worker, and how each of them ends.

This file owns the table of legs and the only way out of it. It must say Done exactly once per
ticket, and must never free pages that a link or the running step may still touch.

Life of an ending: ``end`` fixes the outcome, takes the prompt out of the schedule and tells a
receiver that still waits for it -> Done, at once or (``finish``) when the step that computes it
has ended -> drained: ``release_if_quiet`` after every end of a link operation.
"""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer.attempts import Attempts
from kv_transfer.link_ops import LinkOps
from kv_transfer.pages import Pages
from prefill_worker.leg import Leg
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import Cancelled, ErrorInfo, InternalError
from protocol.events import Effect, ToReceiver, ToRouter
from protocol.messages import Abort, Done
from protocol.types import Outcome, TicketId


class Tickets:
    """All legs of one worker."""

    def __init__(
        self,
        worker_id: str,
        pages: Pages,
        scheduler: PrefillScheduler,
        ops: LinkOps,
        remembered: int,
    ) -> None:
        self._worker_id = worker_id
        self._pages = pages
        self._scheduler = scheduler
        self._ops = ops
        self._legs: dict[TicketId, Leg] = {}
        self._draining: dict[TicketId, Leg] = {}
        self.attempts = Attempts(remembered)

    def __iter__(self) -> Iterator[Leg]:
        """All legs whose outcome is open; safe against endings on the way."""
        return iter([leg for leg in self._legs.values() if leg.outcome is None])

    def __len__(self) -> int:
        return len(self._legs) + len(self._draining)

    def add(self, leg: Leg) -> None:
        """A leg begins."""
        self.attempts.begin(leg.ticket.id)
        self._legs[leg.ticket.id] = leg

    def known(self, ticket_id: TicketId) -> Leg:
        """A leg that has not said Done, also one whose outcome is fixed."""
        return self._legs[ticket_id]

    def live(self, ticket_id: TicketId) -> Leg | None:
        """The leg, if its outcome is open."""
        leg = self._legs.get(ticket_id)
        return leg if leg is not None and leg.outcome is None else None

    def end(self, leg: Leg, outcome: Outcome, error: ErrorInfo | None, now: float) -> list[Effect]:
        """Decide how a ticket ends; say so now, or when the step that computes it has ended."""
        if leg.outcome is not None:
            return []
        leg.outcome, leg.error = outcome, error
        leg.moved_at = now
        self._scheduler.forget(leg.prompt)
        effects: list[Effect] = []
        if not leg.transfer.over:
            leg.transfer.abort()
            abort = Abort(leg.ticket.id, error or Cancelled("over").info())
            effects.append(ToReceiver(leg.ticket.receiver, abort))
        if not leg.in_step:
            effects += self.finish(leg)
        return effects

    def finish(self, leg: Leg) -> list[Effect]:
        """Say Done, and let the pages go as soon as nothing touches them."""
        ticket_id = leg.ticket.id
        if leg.outcome is None:
            raise InternalError(f"{ticket_id} is finished without an outcome")
        del self._legs[ticket_id]
        self._draining[ticket_id] = leg
        self.attempts.finish(ticket_id)
        self.release_if_quiet(ticket_id)
        error = leg.error if leg.outcome is Outcome.FAILED else None
        done = Done(ticket_id, leg.outcome, leg.timings(self._worker_id), error)
        return [ToRouter(leg.router_id, done)]

    def release_if_quiet(self, ticket_id: TicketId) -> None:
        """Free the pages of a finished leg once no link operation reads them."""
        leg = self._draining.get(ticket_id)
        if leg is None or self._ops.touching(ticket_id):
            return
        if leg.prompt.reservation is not None:
            self._pages.release(leg.prompt.reservation)
            leg.prompt.reservation = None
        del self._draining[ticket_id]

    def check_integrity(self) -> None:
        """Pages add up, and every reservation belongs to a ticket that is known here."""
        self._pages.check_integrity()
        legs = [*self._legs.values(), *self._draining.values()]
        held = sum(leg.prompt.reservation.pages for leg in legs if leg.prompt.reservation)
        account = self._pages.references + self._pages.credited
        if held != account:
            raise InternalError(f"prefill: tickets hold {held} pages, {account} are in use")

"""Who gets a place on a decode worker: the queue for pages, credits, and early offers.

This file owns the waiting queue, the credits and the offers that came before their tickets. A
place is a share of ``max_num_seqs`` and all pages that a ticket can ever need. It must never give
a place that is not there, and never wait for another request's arrival to end a lease.

Life of a place:
 1. ``wait``: the ticket queues, by priority, order key and age (``protocol.step.UrgencyQueue``).
    One that was passed over often enough gets the next pages: nobody else takes any before it.
 2. ``admit``: it gets its credit. With the sender's offer there, it is granted.
 3. Nothing announced for a lease after the predicted start: the credit ``lapse``s. The ticket
    stays; its offer, or its first announcement, asks again.
 4. ``give_up``: its place is free again (its pages go when nothing touches them).
"""

from __future__ import annotations

from decode_worker.leg import Leg
from kv_transfer.pages import Pages
from protocol.events import Effect, ToRouter, ToSender
from protocol.lifecycle import ReceiveEvent, ReceiveState
from protocol.messages import Grant, Offer, Queued, Reserved
from protocol.role import RoleOptions
from protocol.step import UrgencyQueue
from protocol.types import TicketId

LOOK_AHEAD = 16  # tickets tried past the first that finds no room


class Intake:
    """Places of one decode worker, and those who wait for them."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self._queue = UrgencyQueue()
        self._waiting: dict[TicketId, Leg] = {}  # queued, without a place
        self._placed: dict[TicketId, Leg] = {}
        self._lapsed: dict[TicketId, Leg] = {}
        self._parked: dict[str, dict[TicketId, tuple[Offer, float]]] = {}
        self._changed = False  # since the last ``admit``: nothing else can make room

    @property
    def n_waiting(self) -> int:
        """Tickets without a place."""
        return len(self._waiting) + len(self._lapsed)

    @property
    def n_parked(self) -> int:
        """Offers whose tickets have not come."""
        return sum(len(offers) for offers in self._parked.values())

    # --- the queue ----------------------------------------------------------------------------

    def wait(self, leg: Leg) -> None:
        """Let a ticket queue for a place."""
        self._queue.add(leg.ticket)
        self._waiting[leg.ticket.id] = leg
        self._changed = True

    def admit(self, now: float) -> tuple[list[Leg], list[Effect]]:
        """Give places while there are any: the legs placed now, and what is said of them."""
        placed: list[Leg] = []
        effects: list[Effect] = []
        while self._changed and (leg := self._next()) is not None:
            ticket_id = leg.ticket.id
            self._queue.served((ticket_id,))
            self._queue.remove(ticket_id)
            del self._waiting[ticket_id]
            effects += self._place(leg, now)
            placed.append(leg)
        self._changed = False
        return placed, effects

    def room_changed(self) -> None:
        """Pages came back: the next ``admit`` has something to decide."""
        self._changed = True

    def queued(self, leg: Leg) -> ToRouter:
        """What the router of a ticket without a place is told."""
        if leg.ticket.id in self._lapsed:
            message = Queued(leg.ticket.id, len(self._waiting), leg.waits_for)
            return ToRouter(leg.router_id, message)
        ahead = self._queue.ahead_of(leg.ticket.id)
        need = self._pages.pages_for(leg.ticket.n_tokens_reserved)
        reason = f"needs {need} pages and a place: {self._state()}"
        return ToRouter(leg.router_id, Queued(leg.ticket.id, ahead, reason))

    def waits(self, leg: Leg) -> bool:
        """This ticket has no place."""
        return leg.ticket.id in self._waiting or leg.ticket.id in self._lapsed

    def give_up(self, leg: Leg) -> None:
        """This ticket needs no place any more."""
        ticket_id = leg.ticket.id
        self._queue.remove(ticket_id)
        for held in (self._waiting, self._placed, self._lapsed):
            held.pop(ticket_id, None)
        self._changed = True

    def reasons(self) -> dict[TicketId, str]:
        """Why those who are not computed are not, for the step's plan."""
        reasons = self._queue.reasons(f"waits for a place: {self._state()}")
        for legs in (self._placed, self._lapsed):
            for ticket_id, leg in legs.items():
                if leg.waits_for:
                    reasons[ticket_id] = leg.waits_for
        return reasons

    # --- offers and grants --------------------------------------------------------------------

    def park(self, worker_id: str, offer: Offer, now: float) -> bool:
        """Keep an offer whose ticket has not come. False: this peer has too many."""
        offers = self._parked.setdefault(worker_id, {})
        if len(offers) >= self._options.max_parked:
            return False
        offers[offer.ticket_id] = (offer, now)
        return True

    def unpark(self, worker_id: str, ticket_id: TicketId) -> tuple[Offer, float] | None:
        """Take a parked offer out, with the instant it came, if there is one."""
        offers = self._parked.get(worker_id, {})
        found = offers.pop(ticket_id, None)
        if not offers:
            self._parked.pop(worker_id, None)
        return found

    def drop_parked(self, worker_id: str) -> int:
        """Forget the offers of a peer that is gone; how many there were."""
        return len(self._parked.pop(worker_id, {}))

    def stale_offers(self, now: float) -> list[tuple[str, TicketId]]:
        """Take out the parked offers whose lease has ended."""
        stale = [
            (worker_id, ticket_id)
            for worker_id, offers in self._parked.items()
            for ticket_id, (_, came_at) in offers.items()
            if now - came_at > self._options.lease_s
        ]
        for worker_id, ticket_id in stale:
            self.unpark(worker_id, ticket_id)
        return stale

    def offered(self, leg: Leg, offer: Offer, came_at: float, now: float) -> list[Effect]:
        """The sender's offer met its ticket: grant it if it has its place, else it waits on."""
        transfer = leg.transfer
        if transfer is None:
            return []
        transfer.offer = offer
        transfer.heard_at = now
        transfer.starts_at = came_at + offer.predicted_start_s
        if transfer.state is ReceiveState.RESERVED:
            return self._grant(leg)
        if transfer.state is ReceiveState.LAPSED:
            transfer.follow(ReceiveEvent.REQUEUE)
            del self._lapsed[leg.ticket.id]
            self.wait(leg)
        return []

    def lapse(self, now: float) -> list[Leg]:
        """Take back credits that nothing was announced for in time; those legs wait on."""
        lapsed = [leg for leg in self._placed.values() if self._unused(leg, now)]
        for leg in lapsed:
            if leg.transfer is None or leg.reservation is None:
                continue
            self._pages.release(leg.reservation)
            leg.reservation = leg.reserved_at = None
            leg.transfer.follow(ReceiveEvent.LAPSE)
            leg.waits_for = (
                f"{leg.transfer.worker_id} announced nothing for {self._options.lease_s} s after "
                f"its predicted start; the credit is back in the pool"
            )
            del self._placed[leg.ticket.id]
            self._lapsed[leg.ticket.id] = leg
            self._changed = True
        return lapsed

    def retake(self, leg: Leg, now: float) -> list[Effect] | None:
        """A lapsed ticket is announced after all: give it a place again. None: no room."""
        if leg.transfer is None or not self._seat_free() or not self._fits(leg):
            return None
        del self._lapsed[leg.ticket.id]
        effects = self._reserve(leg, now)
        leg.transfer.follow(ReceiveEvent.GRANT)
        return effects

    # --- places -------------------------------------------------------------------------------

    def _place(self, leg: Leg, now: float) -> list[Effect]:
        effects = self._reserve(leg, now)
        if leg.transfer is not None:
            leg.transfer.follow(ReceiveEvent.CREDIT)
            leg.transfer.heard_at = now
            leg.waits_for = f"waits for the offer of {leg.transfer.worker_id}"
            if leg.transfer.offer is not None:
                effects += self._grant(leg)
        return effects

    def _reserve(self, leg: Leg, now: float) -> list[Effect]:
        need = self._pages.pages_for(leg.ticket.n_tokens_reserved)
        leg.reservation = self._pages.reserve(leg.ticket.id, need)
        leg.reserved_at = now
        self._placed[leg.ticket.id] = leg
        return [ToRouter(leg.router_id, Reserved(leg.ticket.id, need))]

    def _grant(self, leg: Leg) -> list[Effect]:
        transfer = leg.transfer
        if transfer is None or leg.reservation is None:
            return []
        transfer.follow(ReceiveEvent.GRANT)
        leg.waits_for = f"waits for its KV from {transfer.worker_id}"
        grant = Grant(leg.ticket.id, leg.reservation.pages, self._options.window)
        return [ToSender(transfer.worker_id, grant)]

    def _unused(self, leg: Leg, now: float) -> bool:
        transfer = leg.transfer
        if transfer is None or leg.outcome is not None:
            return False
        if transfer.state not in (ReceiveState.RESERVED, ReceiveState.GRANTED):
            return False
        since = max(leg.reserved_at or 0.0, transfer.starts_at)
        return now - since > self._options.lease_s

    def _seat_free(self) -> bool:
        return len(self._placed) < self._options.max_num_seqs

    def _fits(self, leg: Leg) -> bool:
        return self._pages.pages_for(leg.ticket.n_tokens_reserved) <= self._pages.available

    def _state(self) -> str:
        return (
            f"{self._pages.available} of {self._pages.total} pages are free, "
            f"{len(self._placed)} of {self._options.max_num_seqs} sequences are taken"
        )

    def _next(self) -> Leg | None:
        """The most urgent waiting ticket that fits; none beside one that waited too long."""
        if not self._waiting or not self._seat_free():
            return None
        aged = self._queue.aged
        for ticket_id in self._queue.in_order()[: LOOK_AHEAD + 1]:
            if self._fits(self._waiting[ticket_id]):
                return self._waiting[ticket_id]
            if ticket_id == aged:
                return None  # the next free pages are its
        return None

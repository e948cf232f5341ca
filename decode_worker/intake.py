"""Who gets a place on a decode worker: the queue for pages, credits, and early offers.

This file owns the waiting queue, the credits and the offers that came before their tickets. A
place is a seat for every choice and the pages of the prompt, with room beside them for what
placed sequences will want next (``decode_worker.memory``). It must never give a place that is not
there, and never wait for another request's arrival to end a lease.

Life of a place:
 1. ``wait``: the ticket queues, by priority, order key and age (``protocol.step.UrgencyQueue``).
    One that was passed over often enough gets the next pages: nobody else takes any before it.
    Sequences that were preempted come first (``decode_worker.preemption``).
 2. ``admit``: it gets its credit. With the sender's offer there, it is granted.
 3. Nothing announced for a lease after the predicted start: the credit ``lapse``s. The ticket
    stays; its offer, or its first announcement, asks again. A credit without an offer is
    ``revoke``d when a running sequence needs the pages; the ticket keeps its old place.
 4. ``give_up``: its place is free again (its pages go when nothing touches them).
"""

from __future__ import annotations

from decode_worker.leg import Leg
from decode_worker.memory import Memory
from decode_worker.preemption import Preemption
from decode_worker.sequence import On
from protocol.events import Effect, ToRouter, ToSender
from protocol.lifecycle import ReceiveEvent, ReceiveState
from protocol.messages import Grant, Offer, Queued, Reserved
from protocol.role import RoleOptions
from protocol.step import UrgencyQueue
from protocol.types import TicketId

LOOK_AHEAD = 16  # tickets tried past the first that finds no room


class Intake:
    """Places of one decode worker, and those who wait for them."""

    def __init__(self, memory: Memory, preemption: Preemption, options: RoleOptions) -> None:
        self._memory = memory
        self._preemption = preemption
        self._options = options
        self._queue = UrgencyQueue()
        self._waiting: dict[TicketId, Leg] = {}  # queued, without a place
        self._expected: dict[TicketId, Leg] = {}  # placed; their KV is not here yet
        self._lapsed: dict[TicketId, Leg] = {}
        self._parked: dict[str, dict[TicketId, tuple[Offer, float]]] = {}
        self._changed = False  # somebody came since the last ``admit``

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
        self._queue.add(leg.ticket, leg.first.serial)
        self._waiting[leg.ticket.id] = leg
        self._changed = True

    def admit(self, now: float) -> tuple[list[Leg], list[Effect]]:
        """Give places while there are any: the legs placed now, and what is said of them."""
        placed: list[Leg] = []
        effects: list[Effect] = []
        if not (self._changed or self._memory.freed):
            return placed, effects
        self._changed = self._memory.freed = False
        promised = self._memory.promised()
        while (leg := self._next(promised)) is not None:
            ticket_id = leg.ticket.id
            self._queue.served((ticket_id,))
            self._queue.remove(ticket_id)
            del self._waiting[ticket_id]
            self._preemption.passed_over()
            effects += self._place(leg, now)
            placed.append(leg)
            promised = self._memory.promised()
        return placed, effects

    def look_again(self) -> None:
        """Sequences come nearer to their ends: what is promised shrinks with time."""
        self._changed = True

    def queued(self, leg: Leg) -> ToRouter:
        """What the router of a ticket without a place is told."""
        if leg.ticket.id in self._lapsed:
            message = Queued(leg.ticket.id, len(self._waiting), leg.waits_for)
            return ToRouter(leg.router_id, message)
        ahead = self._queue.ahead_of(leg.ticket.id)
        reason = f"needs {self._memory.need(leg.first)} pages and a place: {self._memory}"
        return ToRouter(leg.router_id, Queued(leg.ticket.id, ahead, reason))

    def waits(self, leg: Leg) -> bool:
        """This ticket has no place."""
        return leg.ticket.id in self._waiting or leg.ticket.id in self._lapsed

    def give_up(self, leg: Leg) -> None:
        """This ticket needs no place any more."""
        ticket_id = leg.ticket.id
        self._queue.remove(ticket_id)
        for held in (self._waiting, self._expected, self._lapsed):
            held.pop(ticket_id, None)
        self._changed = True

    def arrived(self, leg: Leg) -> None:
        """All its KV is here: nothing is expected any more."""
        self._expected.pop(leg.ticket.id, None)

    def reasons(self) -> dict[TicketId, str]:
        """Why those who are not computed are not, for the step's plan."""
        away = len(self._preemption)
        first = f"; {away} preempted ones come first" if away else ""
        reasons = self._queue.reasons(f"waits for a place: {self._memory}{first}")
        for legs in (self._expected, self._lapsed):
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
        lapsed = [leg for leg in self._expected.values() if self._unused(leg, now)]
        for leg in lapsed:
            if leg.transfer is None:
                continue
            self._take_credit(leg)
            leg.waits_for = (
                f"{leg.transfer.worker_id} announced nothing for {self._options.lease_s} s after "
                f"its predicted start; the credit is back in the pool"
            )
            self._lapsed[leg.ticket.id] = leg
        return lapsed

    def revoke(self) -> bool:
        """Take the youngest credit without an offer back, for a running sequence."""
        unoffered = [
            leg
            for leg in self._expected.values()
            if leg.transfer is not None and leg.transfer.state is ReceiveState.RESERVED
        ]
        if not unoffered:
            return False
        leg = max(unoffered, key=lambda leg: leg.first.rank)
        self._take_credit(leg)
        if leg.transfer is not None:
            leg.transfer.follow(ReceiveEvent.REQUEUE)
        self.wait(leg)
        return True

    def retake(self, leg: Leg, now: float) -> list[Effect] | None:
        """A lapsed ticket is announced after all: give it a place again. None: no room."""
        seq, transfer = leg.first, leg.transfer
        if transfer is None or not self._memory.seat_free(len(seq.choices)):
            return None
        if not self._memory.fits(seq, self._memory.promised(), transfer.held_pages):
            return None
        del self._lapsed[leg.ticket.id]
        effects = self._reserve(leg, now, transfer.held_pages)
        transfer.follow(ReceiveEvent.GRANT)
        return effects

    # --- places -------------------------------------------------------------------------------

    def _place(self, leg: Leg, now: float) -> list[Effect]:
        effects = self._reserve(leg, now, None)
        if leg.transfer is not None:
            leg.transfer.follow(ReceiveEvent.CREDIT)
            leg.transfer.heard_at = now
            leg.waits_for = f"waits for the offer of {leg.transfer.worker_id}"
            if leg.transfer.offer is not None:
                effects += self._grant(leg)
        return effects

    def _reserve(self, leg: Leg, now: float, held: int | None) -> list[Effect]:
        seq, local = leg.first, leg.transfer is None
        n_found = self._memory.place(seq, On.PROMPT if local else On.ARRIVE, held)
        if leg.transfer is None:
            found = n_found * self._memory.page_size
            leg.cached_tokens = min(found, leg.ticket.n_prompt)
        else:
            leg.transfer.held(n_found)
            self._expected[leg.ticket.id] = leg
        leg.reserved_at = now
        return [ToRouter(leg.router_id, Reserved(leg.ticket.id, self._memory.need(seq)))]

    def _grant(self, leg: Leg) -> list[Effect]:
        transfer, reservation = leg.transfer, leg.first.reservation
        if transfer is None or reservation is None:
            return []
        transfer.follow(ReceiveEvent.GRANT)
        leg.waits_for = f"waits for its KV from {transfer.worker_id}"
        prefix_tokens = transfer.held_pages * self._memory.page_size
        grant = Grant(leg.ticket.id, reservation.credit, self._options.window, prefix_tokens)
        return [ToSender(transfer.worker_id, grant)]

    def _take_credit(self, leg: Leg) -> None:
        """A ticket that nothing came for loses its place."""
        if leg.transfer is None:
            return
        self._memory.free(leg.first)
        leg.first.follow(On.LAPSE)
        leg.reserved_at = None
        leg.transfer.follow(ReceiveEvent.LAPSE)
        del self._expected[leg.ticket.id]

    def _unused(self, leg: Leg, now: float) -> bool:
        transfer = leg.transfer
        if transfer is None or leg.outcome is not None:
            return False
        if transfer.state not in (ReceiveState.RESERVED, ReceiveState.GRANTED):
            return False
        since = max(leg.reserved_at or 0.0, transfer.starts_at)
        return now - since > self._options.lease_s

    def _next(self, promised: int) -> Leg | None:
        """The most urgent waiting ticket that fits; none beside one that waited too long."""
        if not self._waiting or not self._memory.seat_free(1):
            return None
        aged = self._queue.aged
        for ticket_id in self._queue.in_order()[: LOOK_AHEAD + 1]:
            leg = self._waiting[ticket_id]
            seq = leg.first
            if (
                not self._preemption.bars(leg.ticket.priority)
                and self._memory.seat_free(len(seq.choices))
                and self._memory.fits(seq, promised)
            ):
                return leg
            if ticket_id == aged:
                return None  # the next free pages are its
        return None

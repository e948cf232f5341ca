"""Requests under way: what their legs decide is carried out here.

This file owns the dispatched requests of a router. It turns session messages, timers and what
the text layer says into events of ``router.legs`` and carries the effects out in order: messages
to workers, pieces and ends to clients, entries of the ledger. It must never decide by itself how
a request goes on. An event is dealt with to its end before the next one; nothing here blocks.

Life of a flight here: ``take_off`` -> events -> the client's end -> both legs over (at most
``lease_s`` later: then the ledger lets go of what a leg that never said Done held) -> forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from protocol.config import TandemConfig
from protocol.errors import TandemError, Unavailable
from protocol.messages import (
    Cancel,
    Done,
    Open,
    Queued,
    Reserved,
    SenderLost,
    Stop,
    Tokens,
    WorkerToRouter,
)
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    Peer,
    Request,
    Ticket,
    TicketId,
    Usage,
    WorkerInfo,
)
from router import leg_events as on
from router import legs as leg_rules
from router.failures import Failures
from router.flight import Flight
from router.ledger import Ledger
from router.leg_events import Side
from router.leg_state import LegState
from router.meter import Meter
from router.policy import Route
from router.session import WorkerSessions

SETTLE_S = 0.005  # how long the end of an answer waits for the timings of its legs

log = logging.getLogger(__name__)


class InFlight:
    """The dispatched requests of one router; called on its event loop."""

    def __init__(
        self,
        config: TandemConfig,
        ledger: Ledger,
        sessions: WorkerSessions,
        meter: Meter,
        failures: Failures,
        clock: Callable[[], float],
        room_made: Callable[[], None],
    ) -> None:
        """``room_made`` is called whenever a leg is over; it must not dispatch at once."""
        self._config = config
        self._ledger = ledger
        self._sessions = sessions
        self._meter = meter
        self._failures = failures
        self._clock = clock
        self._room_made = room_made
        self._flights: dict[TicketId, Flight] = {}  # legs not both over
        self.n_running = 0  # requests whose client has not had its end

    def ticket_ids(self) -> set[TicketId]:
        """Everything of which a leg may still run somewhere."""
        return set(self._flights)

    def take_off(self, flight: Flight, ticket: Ticket, route: Route) -> None:
        """Open both legs, or fail the request if one cannot be reached."""
        flight.route, flight.dispatched_at = route, self._clock()
        self._meter.dispatched(flight, flight.dispatched_at)
        self._flights[ticket.id] = flight
        self.n_running += 1
        unreachable = {}
        for side, peer in _peers(ticket):
            computes = side is Side.SENDER or ticket.sender is None
            self._ledger.dispatch(
                ticket.id,
                peer.worker_id,
                pages=route.pages if side is Side.RECEIVER else 0,
                prompt_tokens=ticket.n_prompt if computes else 0,
                seats=ticket.n_choices if side is Side.RECEIVER else 1,
            )
            if not self._sessions.is_up(peer.worker_id, peer.incarnation):
                unreachable[side] = Unavailable(f"no session with {peer.worker_id}").info()
        flight.legs, effects = leg_rules.begin(ticket, unreachable)
        self._carry_out(flight, effects)

    def worker_lost(self, worker_id: str, error: TandemError) -> None:
        """Every leg on this worker is over."""
        lost = Unavailable(f"lost worker {worker_id}: {error.message}").info()
        for flight in list(self._flights.values()):
            side = flight.side_of(worker_id)
            if side is not None and flight.legs and flight.legs.leg(side) is not LegState.OVER:
                self.feed(flight, on.WorkerLost(side, lost))

    def forget_all(self) -> None:
        """The router ends: wait for no leg any longer."""
        for flight in list(self._flights.values()):
            self.feed(flight, on.LingerOver())

    def message(self, info: WorkerInfo, message: WorkerToRouter) -> None:
        """Anything that a worker says."""
        match message:
            case Tokens(items=items):
                for item in items:
                    self._event(info, item.ticket_id, on.TokensArrived(item))
            case Queued(ticket_id=ticket_id):
                self._event(info, ticket_id, on.ReceiverQueued())
            case Reserved(ticket_id=ticket_id):
                self._event(info, ticket_id, on.ReceiverReserved())
            case SenderLost(ticket_id=ticket_id, error=error):
                self._event(info, ticket_id, on.SenderWasLost(error))
            case Done(ticket_id=ticket_id):
                self._leg_done(info, message)

    def _event(self, info: WorkerInfo, ticket_id: TicketId, event: on.Event) -> None:
        """An event that only the receiver of a ticket may cause."""
        flight = self._flights.get(ticket_id)
        if flight is None or flight.side_of(info.worker_id) is not Side.RECEIVER:
            self._meter.ignored("messages_of_unknown_tickets")
            return
        self.feed(flight, event)

    def _leg_done(self, info: WorkerInfo, done: Done) -> None:
        flight = self._flights.get(done.ticket_id)
        side = None if flight is None else flight.side_of(info.worker_id)
        if flight is None or side is None:
            self._meter.ignored("messages_of_unknown_tickets")
            return
        self._ledger.learn(done.timings, len(flight.request.prompt))
        self.feed(flight, on.LegDone(side, done.outcome, done.timings, done.error))

    def feed(self, flight: Flight, event: on.Event) -> None:
        """One event of a dispatched request. A bug in here fails that request only."""
        assert flight.legs is not None
        try:
            flight.legs, effects = leg_rules.advance(flight.legs, event)
            self._carry_out(flight, effects)
        except Exception as error:
            if isinstance(event, on.Broken):
                raise
            cause = self._failures.known(error)
            log.exception(
                "request %s hit a bug of the router: %s", flight.request.request_id, cause.message
            )
            self.feed(flight, on.Broken(cause.info()))
            self.end(flight, cause)  # also where the legs had taken it for ended

    def _carry_out(self, flight: Flight, effects: list[on.Effect]) -> None:
        for effect in effects:
            self._do(flight, effect)
        self._settle_accounts(flight)

    def _do(self, flight: Flight, effect: on.Effect) -> None:
        assert flight.legs is not None
        ticket = flight.legs.ticket
        match effect:
            case on.OpenLeg(side=side):
                self._send(flight, side, Open(ticket))
            case on.CancelLeg(side=side, cause=cause):
                self._send(flight, side, Cancel(ticket.id, cause))
            case on.StopReceiver(index=index, choice=choice):
                self._send(flight, Side.RECEIVER, Stop(ticket.id, index, choice))
            case on.Release(side=side):
                peer = ticket.receiver if side is Side.RECEIVER else ticket.sender
                if peer is not None:
                    self._ledger.release(ticket.id, peer.worker_id)
                self._room_made()
            case on.Settle():
                flight.start_timer("settle", SETTLE_S, self._settle_due)
            case on.Count(name=name):
                self._meter.ignored(name)
            case on.Finish():
                self.end(flight, self._complete(flight, effect))
            case on.Fail(error=error):
                self.end(flight, error.to_error())
            case on.Deliver():
                self._deliver(flight, effect)

    def _send(self, flight: Flight, side: Side, message: Open | Cancel | Stop) -> None:
        assert flight.legs is not None
        peer = flight.legs.ticket.receiver if side is Side.RECEIVER else flight.legs.ticket.sender
        if peer is not None:
            self._sessions.send(peer.worker_id, peer.incarnation, message)

    def _deliver(self, flight: Flight, effect: on.Deliver) -> None:
        """Tokens become text and go into the buffer; what the text says becomes an event."""
        token_ids, logprobs, text, matched = effect.token_ids, effect.logprobs, "", None
        if flight.texts:
            texts = flight.texts[effect.choice]
            piece = texts.push(_shown(flight.request, effect))
            text, matched = piece.text, piece.stop_matched
            if piece.stop_token_index is not None:
                kept = piece.stop_token_index + 1 - effect.index
                token_ids, logprobs = token_ids[:kept], logprobs[:kept]
            elif effect.last:
                text += texts.finish()
        if token_ids:
            self._note_tokens(flight, effect.choice, len(token_ids))
        finish = FinishReason.STOP if matched is not None else effect.finish
        if flight.request.n_choices == 1:
            finish = None  # its end is the answer's
        if token_ids or text or finish:
            flight.answer.push(
                Delta(
                    effect.index,
                    token_ids,
                    text,
                    effect.choice,
                    logprobs,
                    effect.prompt_logprobs,
                    finish,
                    matched if finish else None,
                )
            )
        if matched is not None:
            end = effect.index + len(token_ids)
            self.feed(flight, on.StopMatched(matched, end, effect.choice))
        elif effect.last:
            self.feed(flight, on.TextDone(effect.choice))
        elif flight.answer.n_unread > self._most_unread(flight):
            self.feed(flight, on.ReaderStuck(flight.answer.n_unread))

    def _most_unread(self, flight: Flight) -> int:
        return self._config.router.limits.stream_buffer * flight.request.n_choices

    def _note_tokens(self, flight: Flight, choice: int, n_tokens: int) -> None:
        assert flight.legs is not None
        self._meter.tokens(flight, choice, n_tokens, self._clock())
        if flight.first_token_at is None:
            ticket = flight.legs.ticket
            computed_at = ticket.receiver if ticket.sender is None else ticket.sender
            self._ledger.prompt_computed(ticket.id, computed_at.worker_id)
        flight.note_token(choice, self._clock())

    def _complete(self, flight: Flight, effect: on.Finish) -> Complete:
        assert flight.legs is not None
        timings = flight.stage_timings(effect.timings)
        self._meter.stages(timings)
        usage = Usage(len(flight.request.prompt), effect.n_tokens, effect.cached_tokens)
        return Complete(effect.reason, usage, effect.matched_stop, timings)

    def end(self, flight: Flight, end: Complete | TandemError) -> None:
        """Give the client its end; a second one is nothing. Also for requests not dispatched."""
        if not flight.answer.end(end):
            return
        if flight.route is not None:
            self.n_running -= 1
        flight.stop_timer("deadline")
        self._meter.ended(flight, end, self._clock())

    def _settle_accounts(self, flight: Flight) -> None:
        """After every event: forget a flight that is over, watch one that only lingers."""
        legs = flight.legs
        if legs is None or not legs.has_ended:
            return
        if legs.legs_over:
            for name in tuple(flight.timers):
                flight.stop_timer(name)
            self._flights.pop(legs.ticket.id, None)
        elif "linger" not in flight.timers:
            flight.stop_timer("settle")
            flight.start_timer("linger", self._config.timing.lease_s, self._linger_over)

    def _settle_due(self, flight: Flight) -> None:
        self.feed(flight, on.SettleDue())

    def _linger_over(self, flight: Flight) -> None:
        log.warning("a leg of %s never said Done", flight.request.request_id)
        self.feed(flight, on.LingerOver())


def _shown(request: Request, effect: on.Deliver) -> tuple[int, ...]:
    """The tokens that become text: a stop token of the client's own is counted, not shown."""
    ids, stops = effect.token_ids, request.sampling.stop_token_ids
    stopped = stops and effect.finish is FinishReason.STOP and ids and ids[-1] in stops
    return ids[:-1] if stopped and not request.include_stop_str_in_output else ids


def _peers(ticket: Ticket) -> Iterable[tuple[Side, Peer]]:
    yield Side.RECEIVER, ticket.receiver
    if ticket.sender is not None:
        yield Side.SENDER, ticket.sender

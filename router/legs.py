"""One request over both of its legs: (state, event) -> (state, effects), as a table.

This file owns the transitions of a request in the router: which leg is opened, stopped and
cancelled when, which tokens reach the client, and that the client gets exactly one end. It is
pure: timers are events (``DeadlinePassed``, ``SettleDue``, ``LingerOver``) that the dispatcher
raises, and every effect is carried out in the order given. Events that come late, twice or out
of turn are counted, never asserted on. There is no way from FAILED to tokens.

Life of a request (the rungs of the ladder in ``protocol.lifecycle``):
 1. ``begin``: both legs are opened at the same moment, or none if one is known unreachable.
 2. RESERVING -> RESERVED: the receiver holds a credit (and may lose it again while it waits).
 3. RUNNING: tokens flow. The sender has committed by then; what it says later changes nothing.
 4. JUDGING: the last token was delivered, the text layer says whether a stop string ended it.
 5. SETTLING: the answer is whole. The end waits for the timings of both legs, but no longer
    than one short timer (``Settle``), so no client pays for them.
 6. COMPLETE or FAILED. Legs that are not over yet go on to be over; whatever they deliver is
    counted and dropped; ``LingerOver`` ends the wait for a leg that never says Done.

There are no further attempts yet: a leg's failure is the request's. The attempt number in the
ticket's id is the seam for rebinding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    SlowReader,
    Unavailable,
)
from protocol.types import FinishReason, Outcome, StageTiming, Ticket
from router.leg_events import (
    Broken,
    CancelLeg,
    ClientGone,
    Count,
    DeadlinePassed,
    Deliver,
    Effect,
    Event,
    Fail,
    Finish,
    LegDone,
    LingerOver,
    OpenLeg,
    ReaderStuck,
    ReceiverQueued,
    ReceiverReserved,
    Release,
    SenderWasLost,
    Settle,
    SettleDue,
    Side,
    StopMatched,
    StopReceiver,
    TextDone,
    TokensArrived,
    WorkerLost,
)


class LegState(StrEnum):
    """One leg as the router knows it. A leg that was never opened is OVER."""

    OPEN = "open"
    ENDING = "ending"  # Cancel or Stop was sent, Done has not come
    OVER = "over"


class Phase(StrEnum):
    """The request as a whole; see the file's head."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    RUNNING = "running"
    JUDGING = "judging"
    SETTLING = "settling"
    COMPLETE = "complete"
    FAILED = "failed"


# --- state -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Legs:
    """The state of one request. ``n_tokens`` is the sequence number expected next."""

    ticket: Ticket
    phase: Phase
    sender: LegState
    receiver: LegState
    n_tokens: int = 0
    finish: FinishReason | None = None
    matched_stop: str | None = None
    timings: tuple[StageTiming, ...] = ()
    led_here: str = "begin"  # the event that led to this phase

    @property
    def has_ended(self) -> bool:
        """The client has had its end."""
        return self.phase in (Phase.COMPLETE, Phase.FAILED)

    @property
    def legs_over(self) -> bool:
        """Nothing of this request runs anywhere any more."""
        return self.sender is LegState.OVER and self.receiver is LegState.OVER

    def leg(self, side: Side) -> LegState:
        """The state of one leg."""
        return self.sender if side is Side.SENDER else self.receiver


Step = tuple[Legs, list[Effect]]


def begin(ticket: Ticket, unreachable: Mapping[Side, ErrorInfo]) -> Step:
    """Open both legs, the receiver's first; none when one of them cannot be reached."""
    for error in unreachable.values():
        failed = Legs(ticket, Phase.FAILED, LegState.OVER, LegState.OVER, led_here="unreachable")
        gone: list[Effect] = [Release(side) for side in _sides(ticket)]
        return failed, [*gone, Fail(error)]
    sender = LegState.OVER if ticket.sender is None else LegState.OPEN
    legs = Legs(ticket, Phase.RESERVING, sender, LegState.OPEN)
    return legs, [OpenLeg(side) for side in _sides(ticket)]


def advance(legs: Legs, event: Event) -> Step:
    """Take one event. Raises ``InternalError`` for an event that no table row knows."""
    handler = TABLE.get((legs.phase, type(event)))
    if handler is None:
        raise InternalError(f"request in phase {legs.phase} cannot take {type(event).__name__}")
    after, effects = handler(legs, event)
    if after.phase is not legs.phase:
        after = replace(after, led_here=type(event).__name__)
    return after, effects


def _sides(ticket: Ticket) -> tuple[Side, ...]:
    return (Side.RECEIVER,) if ticket.sender is None else (Side.RECEIVER, Side.SENDER)


def _worker(legs: Legs, side: Side) -> str:
    peer = legs.ticket.receiver if side is Side.RECEIVER else legs.ticket.sender
    return "no worker" if peer is None else peer.worker_id


def _with_leg(legs: Legs, side: Side, state: LegState) -> Legs:
    if side is Side.SENDER:
        return replace(legs, sender=state)
    return replace(legs, receiver=state)


# --- what a handler does -----------------------------------------------------------------------


def _fail(legs: Legs, error: ErrorInfo) -> Step:
    """End the request for the client and whatever still runs of it, at once."""
    effects: list[Effect] = []
    for side in Side:
        if legs.leg(side) is LegState.OPEN:
            effects.append(CancelLeg(side, error.reason))
            legs = _with_leg(legs, side, LegState.ENDING)
    return replace(legs, phase=Phase.FAILED), [*effects, Fail(error)]


def _settle(legs: Legs) -> Step:
    """The answer is whole: end now if both legs have reported, else very soon."""
    settling = replace(legs, phase=Phase.SETTLING)
    return _complete(settling) if settling.legs_over else (settling, [Settle()])


def _complete(legs: Legs) -> Step:
    reason = FinishReason.STOP if legs.finish is None else legs.finish
    end = Finish(reason, legs.n_tokens, legs.matched_stop, legs.timings)
    return replace(legs, phase=Phase.COMPLETE), [end]


def _over(legs: Legs, side: Side, timings: tuple[StageTiming, ...] = ()) -> Step:
    """One leg is over; a leg that was over already is only counted."""
    if legs.leg(side) is LegState.OVER:
        return legs, [Count("late_messages")]
    after = replace(_with_leg(legs, side, LegState.OVER), timings=legs.timings + timings)
    return after, [Release(side)]


def _then(first: Step, second: Callable[[Legs], Step]) -> Step:
    after, effects = second(first[0])
    return after, [*first[1], *effects]


def _outcome_error(legs: Legs, event: LegDone) -> ErrorInfo:
    """Why a leg that was not asked to end has ended before its work was done."""
    worker = _worker(legs, event.side)
    if event.error is not None:
        return event.error
    if event.outcome is Outcome.CANCELLED:
        return Unavailable(f"{worker} gave up its leg of the request").info()
    return InternalError(f"{worker} ended its leg as {event.outcome} without its result").info()


# --- handlers ----------------------------------------------------------------------------------

Handler = Callable[[Legs, "Event"], Step]


def _queued(legs: Legs, event: Event) -> Step:
    return replace(legs, phase=Phase.RESERVING), []


def _reserved(legs: Legs, event: Event) -> Step:
    return replace(legs, phase=Phase.RESERVED), []


def _late(legs: Legs, event: Event) -> Step:
    return legs, [Count("late_messages")]


def _late_tokens(legs: Legs, event: Event) -> Step:
    return legs, [Count("late_tokens")]


def _nothing(legs: Legs, event: Event) -> Step:
    return legs, []


def _tokens(legs: Legs, event: Event) -> Step:
    assert isinstance(event, TokensArrived)
    item, expected = event.item, legs.n_tokens
    end = item.index + len(item.token_ids)
    if item.index < expected and end <= expected:
        return legs, [Count("duplicate_tokens")]
    worker = legs.ticket.receiver.worker_id
    if item.index != expected or item.choice != 0:
        return _fail(
            legs,
            InternalError(
                f"{worker} sent token {item.index} of choice {item.choice} where token "
                f"{expected} of choice 0 was due"
            ).info(),
        )
    if end > legs.ticket.sampling.max_tokens:
        most = legs.ticket.sampling.max_tokens
        return _fail(legs, InternalError(f"{worker} sent {end} tokens of at most {most}").info())
    if not item.token_ids and item.finish_reason is None:
        return legs, [Count("duplicate_tokens")]
    last = item.finish_reason is not None
    after = replace(
        legs,
        phase=Phase.JUDGING if last else Phase.RUNNING,
        n_tokens=end,
        finish=item.finish_reason,
    )
    return after, [Deliver(item.index, item.token_ids, last)]


def _stop_matched(legs: Legs, event: Event) -> Step:
    assert isinstance(event, StopMatched)
    effects: list[Effect] = []
    if legs.phase is Phase.RUNNING and legs.receiver is LegState.OPEN:
        effects.append(StopReceiver(event.n_tokens))
        legs = replace(legs, receiver=LegState.ENDING)
    legs = replace(legs, n_tokens=event.n_tokens, finish=FinishReason.STOP, matched_stop=event.stop)
    return _then((legs, effects), _settle)


def _text_done(legs: Legs, event: Event) -> Step:
    return _settle(legs)


def _done_before_commit(legs: Legs, event: Event) -> Step:
    assert isinstance(event, LegDone)
    over = _over(legs, event.side, event.timings)
    if event.side is Side.SENDER and event.outcome is Outcome.OK:
        return over  # committed; the first tokens are on their way from the receiver
    if legs.leg(event.side) is LegState.OVER:
        return over
    return _then(over, lambda after: _fail(after, _outcome_error(legs, event)))


def _done_running(legs: Legs, event: Event) -> Step:
    assert isinstance(event, LegDone)
    over = _over(legs, event.side, event.timings)
    if event.side is Side.RECEIVER:
        return _then(over, lambda after: _fail(after, _outcome_error(legs, event)))
    if event.outcome is Outcome.OK:
        return over
    return over[0], [*over[1], Count("sender_failed_after_commit")]


def _leg_over(legs: Legs, event: Event) -> Step:
    """The answer, or its failure, is decided already: only the leg's state changes."""
    assert isinstance(event, LegDone | WorkerLost)
    return _over(legs, event.side, event.timings if isinstance(event, LegDone) else ())


def _leg_over_settling(legs: Legs, event: Event) -> Step:
    over = _leg_over(legs, event)
    return _then(over, _complete) if over[0].legs_over else over


def _fail_with_cause(legs: Legs, event: Event) -> Step:
    assert isinstance(event, SenderWasLost | Broken)
    return _fail(legs, event.error)


def _worker_lost(legs: Legs, event: Event) -> Step:
    assert isinstance(event, WorkerLost)
    over = _over(legs, event.side)
    # A sender that had committed has done its work; so has one whose leg was over.
    done = legs.phase is Phase.RUNNING or legs.sender is LegState.OVER
    if event.side is Side.SENDER and done:
        return over
    return _then(over, lambda after: _fail(after, event.error))


def _client_gone(legs: Legs, event: Event) -> Step:
    return _fail(legs, Cancelled("the client went away").info())


def _deadline(legs: Legs, event: Event) -> Step:
    assert isinstance(event, DeadlinePassed)
    text = f"the request's deadline of {event.seconds:g} s passed"
    if legs.n_tokens:
        text += f" after {legs.n_tokens} tokens"
    return _fail(legs, DeadlineExceeded(text).info())


def _reader_stuck(legs: Legs, event: Event) -> Step:
    assert isinstance(event, ReaderStuck)
    text = f"the client reads too slowly: it lags {event.n_tokens} tokens behind"
    return _fail(legs, SlowReader(text).info())


def _finish_now(legs: Legs, event: Event) -> Step:
    return _complete(legs)


def _linger_over(legs: Legs, event: Event) -> Step:
    effects: list[Effect] = []
    for side in Side:
        if legs.leg(side) is LegState.OVER:
            continue
        if legs.leg(side) is LegState.OPEN:
            effects.append(CancelLeg(side, "the request has ended"))
        legs = _with_leg(legs, side, LegState.OVER)
        effects += [Release(side), Count("legs_never_done")]
    return legs, effects


# --- the table ---------------------------------------------------------------------------------

_BEFORE = (Phase.RESERVING, Phase.RESERVED)
_ENDED = (Phase.COMPLETE, Phase.FAILED)


def _row(*cells: tuple[tuple[Phase, ...], Handler]) -> dict[Phase, Handler]:
    return {phase: handler for phases, handler in cells for phase in phases}


_R, _J, _S = (Phase.RUNNING,), (Phase.JUDGING,), (Phase.SETTLING,)

_ROWS: Mapping[type[Event], dict[Phase, Handler]] = {
    ReceiverQueued: _row((_BEFORE, _queued), (_R + _J + _S + _ENDED, _late)),
    ReceiverReserved: _row((_BEFORE, _reserved), (_R + _J + _S + _ENDED, _late)),
    TokensArrived: _row((_BEFORE + _R, _tokens), (_J + _S + _ENDED, _late_tokens)),
    # The text layer speaks only in answer to Deliver, so only where one can be outstanding.
    StopMatched: _row((_R + _J, _stop_matched)),
    TextDone: _row((_J, _text_done)),
    LegDone: _row(
        (_BEFORE, _done_before_commit),
        (_R, _done_running),
        (_J + _ENDED, _leg_over),
        (_S, _leg_over_settling),
    ),
    SenderWasLost: _row((_BEFORE, _fail_with_cause), (_R + _J + _S + _ENDED, _late)),
    WorkerLost: _row(
        (_BEFORE + _R, _worker_lost),
        (_J + _ENDED, _leg_over),
        (_S, _leg_over_settling),
    ),
    ClientGone: _row((_BEFORE + _R + _J + _S, _client_gone), (_ENDED, _nothing)),
    DeadlinePassed: _row((_BEFORE + _R + _J, _deadline), (_S, _finish_now), (_ENDED, _nothing)),
    ReaderStuck: _row((_R + _J, _reader_stuck), (_BEFORE + _S + _ENDED, _nothing)),
    Broken: _row((_BEFORE + _R + _J, _fail_with_cause), (_S, _finish_now), (_ENDED, _nothing)),
    SettleDue: _row((_S, _finish_now), (_ENDED, _nothing)),
    LingerOver: _row((_ENDED, _linger_over)),
}

TABLE: Mapping[tuple[Phase, type[Event]], Handler] = {
    (phase, kind): handler for kind, row in _ROWS.items() for phase, handler in row.items()
}

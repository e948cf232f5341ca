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
 4. JUDGING: the last token of a choice was delivered, the text layer says whether a stop string
    ended it. While other choices go on it is RUNNING again after that.
 5. SETTLING: every choice is over, the answer is whole. The end waits for the timings of both
    legs, but no longer than one short timer (``Settle``), so no client pays for them.
 6. COMPLETE or FAILED. Legs that are not over yet go on to be over; whatever they deliver is
    counted and dropped; ``LingerOver`` ends the wait for a leg that never says Done.

There are no further attempts yet: a leg's failure is the request's. The attempt number in the
ticket's id is the seam for rebinding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    SlowReader,
    Unavailable,
)
from protocol.types import FinishReason, Outcome, StageTiming, Ticket
from router.choices import Choice, changed, fault, no_news
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
from router.leg_state import Legs, LegState, Phase

Step = tuple[Legs, list[Effect]]


def begin(ticket: Ticket, unreachable: Mapping[Side, ErrorInfo]) -> Step:
    """Open both legs, the receiver's first; none when one of them cannot be reached."""
    for error in unreachable.values():
        failed = Legs(ticket, Phase.FAILED, LegState.OVER, LegState.OVER, led_here="unreachable")
        gone: list[Effect] = [Release(side) for side in _sides(ticket)]
        return failed, [*gone, Fail(error)]
    sender = LegState.OVER if ticket.sender is None else LegState.OPEN
    choices = (Choice(),) * ticket.n_choices
    legs = Legs(ticket, Phase.RESERVING, sender, LegState.OPEN, choices)
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


def _choice_over(legs: Legs, choice: int) -> Step:
    """The last choice to be over settles the request; until then the others go on."""
    legs = replace(legs, choices=changed(legs.choices, choice, is_over=True))
    if all(each.is_over for each in legs.choices):
        return _settle(legs)
    return replace(legs, phase=Phase.RUNNING), []


def _settle(legs: Legs) -> Step:
    """The answer is whole: end now if both legs have reported, else very soon."""
    settling = replace(legs, phase=Phase.SETTLING)
    return _complete(settling) if settling.legs_over else (settling, [Settle()])


def _complete(legs: Legs) -> Step:
    first = legs.choices[0]
    reason = FinishReason.STOP if first.finish is None else first.finish
    end = Finish(reason, legs.n_tokens, first.matched_stop, legs.timings, legs.cached_tokens)
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
    item = event.item
    counter = no_news(legs.choices, item)
    if counter is not None:
        return legs, [Count(counter)]
    error = fault(legs.ticket, legs.choices, item)
    if error is not None:
        return _fail(legs, error)
    end, finish = item.index + len(item.token_ids), item.finish_reason
    after = replace(
        legs,
        phase=Phase.RUNNING if finish is None else Phase.JUDGING,
        choices=changed(legs.choices, item.choice, n_tokens=end, finish=finish),
        cached_tokens=max(legs.cached_tokens, item.cached_tokens),
    )
    delivery = Deliver(
        item.index, item.token_ids, finish, item.choice, item.logprobs, item.prompt_logprobs
    )
    return after, [delivery]


def _stop_matched(legs: Legs, event: Event) -> Step:
    assert isinstance(event, StopMatched)
    effects: list[Effect] = []
    is_last = sum(not choice.is_over for choice in legs.choices) == 1
    if legs.phase is Phase.RUNNING and legs.receiver is LegState.OPEN:
        effects.append(StopReceiver(event.n_tokens, event.choice))
        if is_last:
            legs = replace(legs, receiver=LegState.ENDING)
    choices = changed(
        legs.choices,
        event.choice,
        n_tokens=event.n_tokens,
        finish=FinishReason.STOP,
        matched_stop=event.stop,
    )
    over = _choice_over(replace(legs, choices=choices), event.choice)
    return over[0], [*effects, *over[1]]


def _text_done(legs: Legs, event: Event) -> Step:
    assert isinstance(event, TextDone)
    return _choice_over(legs, event.choice)


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

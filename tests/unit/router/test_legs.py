"""The two-legged request: exactly one end, the other leg always ended, nothing after failure.

The world is explored to its end: every interleaving of what the two workers, the text layer, the
client and the clocks can say, honest or not, until no new situation turns up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legs_watch import BAD, GONE, LOCAL, TICKET, TWO, Watch, done, item

from protocol.errors import InternalError
from protocol.types import (
    FinishReason,
    Outcome,
    Ticket,
)
from router import leg_events as on
from router.leg_events import Side
from router.leg_state import Legs, Phase
from router.legs import TABLE, advance, begin

# What each party may say next. JUDGING is answered synchronously, so nothing else comes between.
SENDER_SAYS = [done(Side.SENDER, outcome) for outcome in Outcome] + [
    on.WorkerLost(Side.SENDER, GONE)
]
RECEIVER_SAYS = [
    on.ReceiverQueued(),
    on.ReceiverReserved(),
    item(0, 7),
    item(0, 7, end=FinishReason.STOP),
    item(1, 8, end=FinishReason.LENGTH),
    item(2, 9),  # a gap, unless two came before
    *(done(Side.RECEIVER, outcome) for outcome in Outcome),
    on.SenderWasLost(BAD),
    on.WorkerLost(Side.RECEIVER, GONE),
]
OTHERS_SAY = [
    on.ClientGone(),
    on.DeadlinePassed(5.0),
    on.ReaderStuck(1025),
    on.Broken(GONE),
    on.SettleDue(),
]
OTHER_CHOICE_SAYS = [
    item(0, 5, choice=1),
    item(0, 5, choice=1, end=FinishReason.STOP),
    item(1, 6, choice=1, end=FinishReason.LENGTH),
]
ANYTHING = [*SENDER_SAYS, *RECEIVER_SAYS, *OTHERS_SAY]


def delivered_choice(effects: list[on.Effect]) -> int | None:
    """The choice of the Deliver that just went out, if one did."""
    return effects[-1].choice if effects and isinstance(effects[-1], on.Deliver) else None


def next_events(watch: Watch, delivered: int | None) -> list[on.Event]:
    """Every event that the dispatcher could raise now; ``delivered``: whose tokens went out."""
    legs = watch.legs
    stopped = []
    if delivered is not None:
        n_tokens = legs.choices[delivered].n_tokens
        stopped.append(on.StopMatched("x", n_tokens, delivered))
    if legs.phase is Phase.JUDGING:
        return [on.TextDone(delivered or 0), *stopped]
    events = [*ANYTHING, *stopped]
    if len(legs.choices) == 2:
        events += OTHER_CHOICE_SAYS
    if legs.phase is not Phase.SETTLING and not legs.has_ended:
        events.remove(on.SettleDue())
    if legs.has_ended:
        events.append(on.LingerOver())
    return events


def explore(ticket: Ticket) -> dict[object, Watch]:
    """Every situation that any history of any length can lead to, each reached once."""
    start = Watch(ticket)
    seen: dict[object, Watch] = {}
    waiting: list[tuple[Watch, int | None]] = [(start, None)]
    while waiting:
        watch, delivered = waiting.pop()
        told = tuple(tuple(messages) for messages in watch.told.values())
        key = (watch.legs, delivered, told, tuple(watch.ends), tuple(watch.released))
        if key in seen:
            continue
        seen[key] = watch
        for event in next_events(watch, delivered):
            after = watch.copy()
            effects = after.feed(event)
            waiting.append((after, delivered_choice(effects)))
    return seen


@pytest.mark.parametrize("ticket", [TICKET, LOCAL, TWO], ids=["pair", "local", "two choices"])
def test_every_history_of_any_length_keeps_the_laws(ticket: Ticket) -> None:
    seen = explore(ticket)
    assert {type(watch.ends[0]) for watch in seen.values() if watch.ends} == {on.Finish, on.Fail}
    assert {watch.legs.phase for watch in seen.values()} == set(Phase)
    # From everywhere there is a way to the end of both legs.
    for watch in seen.values():
        closing = watch.copy()
        if closing.legs.phase is Phase.JUDGING:
            judged = next(
                i for i, c in enumerate(closing.legs.choices) if c.finish and not c.is_over
            )
            closing.feed(on.TextDone(judged))
        closing.feed(on.ClientGone())
        closing.feed(on.LingerOver())
        assert closing.legs.legs_over and len(closing.ends) == 1


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 1 << 16), max_size=40), st.booleans())
def test_long_histories_keep_the_laws_and_can_always_be_closed(
    picks: list[int], local: bool
) -> None:
    watch, delivered = Watch(LOCAL if local else TICKET), None
    for pick in picks:
        events = next_events(watch, delivered)
        effects = watch.feed(events[pick % len(events)])
        delivered = delivered_choice(effects)
    if watch.legs.phase is Phase.JUDGING:
        watch.feed(on.TextDone(delivered or 0))
    watch.feed(on.ClientGone())
    watch.feed(on.LingerOver())
    assert watch.legs.legs_over and len(watch.ends) == 1
    assert sorted(watch.released) == sorted([Side.RECEIVER] if local else [*Side])


@pytest.mark.parametrize("first", [Side.SENDER, Side.RECEIVER])
def test_all_interleavings_of_two_honest_legs_complete(first: Side) -> None:
    sender = [done(Side.SENDER)]
    receiver = [
        on.ReceiverQueued(),
        on.ReceiverReserved(),
        item(0, 7),
        item(1, 8),
        item(2, 9, end=FinishReason.LENGTH),
        done(Side.RECEIVER),
    ]
    for when in range(len(receiver) + 1):
        watch = Watch()
        for event in [*receiver[:when], *sender, *receiver[when:]]:
            effects = watch.feed(event)
            if effects and isinstance(effects[-1], on.Deliver) and effects[-1].last:
                watch.feed(on.TextDone())
        (end,) = watch.ends
        assert isinstance(end, on.Finish) and end.reason is FinishReason.LENGTH
        assert watch.delivered == [7, 8, 9] and len(end.timings) == 2
        assert watch.legs.legs_over and watch.told == {s: ["open"] for s in Side}


@pytest.mark.parametrize("before", [[], [on.ReceiverQueued()], [on.ReceiverReserved()]])
@pytest.mark.parametrize(
    ("event", "cancelled"),
    [
        (done(Side.SENDER, Outcome.FAILED), [Side.RECEIVER]),
        (done(Side.SENDER, Outcome.CANCELLED), [Side.RECEIVER]),
        (done(Side.RECEIVER, Outcome.FAILED), [Side.SENDER]),
        (done(Side.RECEIVER, Outcome.CANCELLED), [Side.SENDER]),
        (done(Side.RECEIVER, Outcome.OK), [Side.SENDER]),  # OK without a token is a lie
        (on.WorkerLost(Side.SENDER, GONE), [Side.RECEIVER]),
        (on.WorkerLost(Side.RECEIVER, GONE), [Side.SENDER]),
        (on.SenderWasLost(BAD), [*Side]),
        (on.ClientGone(), [*Side]),
        (on.DeadlinePassed(1.0), [*Side]),
        (on.Broken(GONE), [*Side]),
    ],
)
def test_before_the_commit_any_failure_ends_both_legs_at_once(
    before: list[on.Event], event: on.Event, cancelled: list[Side]
) -> None:
    watch = Watch()
    for earlier in before:
        watch.feed(earlier)
    watch.feed(event)
    assert isinstance(watch.ends[0], on.Fail)
    assert [side for side in Side if "cancel" in watch.told[side]] == cancelled
    assert watch.legs.led_here == type(event).__name__


def test_after_the_first_token_the_sender_cannot_hurt_any_more() -> None:
    for event in [
        done(Side.SENDER, Outcome.FAILED),
        on.WorkerLost(Side.SENDER, GONE),
        on.SenderWasLost(BAD),
    ]:
        watch = Watch()
        watch.feed(item(0, 7))
        watch.feed(event)
        assert watch.legs.phase is Phase.RUNNING and not watch.ends


def test_the_error_of_the_worker_reaches_the_client_as_it_is() -> None:
    watch = Watch()
    watch.feed(done(Side.RECEIVER, Outcome.FAILED))
    assert watch.ends == [on.Fail(BAD)]


def test_a_leg_known_unreachable_keeps_the_other_from_starting() -> None:
    legs, effects = begin(TICKET, {Side.SENDER: GONE})
    assert not any(isinstance(effect, on.OpenLeg) for effect in effects)
    assert on.Fail(GONE) in effects and legs.phase is Phase.FAILED and legs.legs_over
    released = [effect.side for effect in effects if isinstance(effect, on.Release)]
    assert sorted(released) == sorted(Side)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (item(1, 8), "token 1 "),
        (item(0, 7, 8, 9, 10), "at most 3"),
        (item(0, 7, choice=1), "choice 1"),
    ],
)
def test_tokens_that_cannot_be_right_fail_the_request(event: on.Event, what: str) -> None:
    watch = Watch()
    watch.feed(event)
    (end,) = watch.ends
    assert isinstance(end, on.Fail) and end.error.reason == "INTERNAL" and what in end.error.message


def test_duplicates_are_dropped_and_an_overlap_is_an_error() -> None:
    watch = Watch()
    watch.feed(item(0, 7, 8))
    assert watch.feed(item(1, 8)) == [on.Count("duplicate_tokens")]
    watch.feed(item(1, 8, 9))
    assert isinstance(watch.ends[0], on.Fail) and watch.delivered == [7, 8]


def test_an_end_without_tokens_of_its_own() -> None:
    watch = Watch()
    watch.feed(item(0, 7))
    watch.feed(item(1, end=FinishReason.STOP))
    watch.feed(on.TextDone())
    watch.feed(on.SettleDue())
    assert isinstance(watch.ends[0], on.Finish) and watch.ends[0].n_tokens == 1


def test_the_deadline_does_not_spoil_an_answer_that_is_whole() -> None:
    watch = Watch()
    watch.feed(item(0, 7, end=FinishReason.STOP))
    watch.feed(on.TextDone())
    watch.feed(on.DeadlinePassed(5.0))
    assert isinstance(watch.ends[0], on.Finish)


def test_a_stop_string_stops_the_receiver_once_and_drops_the_rest() -> None:
    watch = Watch()
    watch.feed(item(0, 7, 8))
    watch.feed(on.StopMatched("x", 1))
    assert watch.told[Side.RECEIVER] == ["open", "stop"]
    assert watch.feed(item(2, 9)) == [on.Count("late_tokens")]
    watch.feed(on.ClientGone())
    assert watch.told[Side.RECEIVER] == ["open", "stop"]  # Stop was enough


def test_the_text_layer_out_of_turn_is_a_bug_and_says_so() -> None:
    watch = Watch()
    with pytest.raises(InternalError, match="reserving cannot take TextDone"):
        watch.feed(on.TextDone())


def test_the_table_answers_every_event_of_the_outside_in_every_phase() -> None:
    inside = {on.StopMatched, on.TextDone, on.SettleDue, on.LingerOver}
    for phase in Phase:
        for event in ANYTHING:
            if type(event) not in inside:
                assert (phase, type(event)) in TABLE


def test_state_is_never_changed_in_place() -> None:
    legs, _ = begin(TICKET, {})
    before = replace(legs)
    advance(legs, on.ClientGone())
    assert legs == before and isinstance(legs, Legs)

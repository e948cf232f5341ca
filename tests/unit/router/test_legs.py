"""The two-legged request: exactly one end, the other leg always ended, nothing after failure.

The world is explored to its end: every interleaving of what the two workers, the text layer, the
client and the clocks can say, honest or not, until no new situation turns up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ErrorInfo, InternalError
from protocol.messages import TokenItem
from protocol.types import (
    FinishReason,
    Outcome,
    Peer,
    SamplingParams,
    StageTiming,
    Ticket,
    TicketId,
    TokenLogprobs,
)
from router import leg_events as on
from router.leg_events import Side
from router.leg_state import Legs, LegState, Phase
from router.legs import TABLE, advance, begin

P, D = Peer("prefill-0", "i", "p:1"), Peer("decode-0", "i", "d:1")
TICKET = Ticket(TicketId("r"), P, D, (5, 6), 2, SamplingParams(max_tokens=3))
LOCAL = replace(TICKET, sender=None)
TWO = replace(LOCAL, n_choices=2, sampling=SamplingParams(max_tokens=2))
BAD = ErrorInfo("DATA_LOSS", "checksums differ")
GONE = ErrorInfo("UNAVAILABLE", "worker is gone")


def item(
    index: int, *ids: int, end: FinishReason | None = None, choice: int = 0, **more: object
) -> on.TokensArrived:
    return on.TokensArrived(TokenItem(TICKET.id, index, ids, end, choice, **more))


def done(side: Side, outcome: Outcome = Outcome.OK) -> on.LegDone:
    error = BAD if outcome is Outcome.FAILED else None
    return on.LegDone(side, outcome, (StageTiming(side.value, "w", 1.0),), error)


class Watch:
    """What the rest of the world saw of one request, and the laws it must obey."""

    def __init__(self, ticket: Ticket = TICKET) -> None:
        self.legs, effects = begin(ticket, {})
        self.ends: list[on.Effect] = []
        self.delivered_by: dict[int, list[int]] = {c: [] for c in range(ticket.n_choices)}
        self.released: list[Side] = []
        self.told: dict[Side, list[str]] = {side: [] for side in Side}
        self.see(effects)

    def copy(self) -> Watch:
        other = object.__new__(Watch)
        other.legs, other.ends = self.legs, [*self.ends]
        other.delivered_by = {c: [*ids] for c, ids in self.delivered_by.items()}
        other.released, other.told = [*self.released], {s: [*m] for s, m in self.told.items()}
        return other

    @property
    def delivered(self) -> list[int]:
        return self.delivered_by[0]

    def feed(self, event: on.Event) -> list[on.Effect]:
        self.legs, effects = advance(self.legs, event)
        self.see(effects)
        return effects

    def see(self, effects: list[on.Effect]) -> None:
        for i, effect in enumerate(effects):
            match effect:
                case on.Finish() | on.Fail():
                    self.ends.append(effect)
                    assert len(self.ends) == 1, f"two ends: {self.ends}"
                case on.Deliver(index=index, token_ids=ids, choice=choice):
                    assert not self.ends, "tokens after the end"
                    assert i == len(effects) - 1, "Deliver is the last effect"
                    assert index == len(self.delivered_by[choice]), "tokens out of sequence"
                    self.delivered_by[choice] += ids
                case on.Release(side=side):
                    assert side not in self.released, "a leg is released once"
                    self.released.append(side)
                case on.OpenLeg(side=side):
                    self.told[side].append("open")
                case on.CancelLeg(side=side):
                    self.told[side].append("cancel")
                case on.StopReceiver(choice=choice):
                    told = "stop" if len(self.legs.choices) == 1 else f"stop {choice}"
                    assert told not in self.told[Side.RECEIVER], "a choice is stopped once"
                    self.told[Side.RECEIVER].append(told)
        self.check()

    def check(self) -> None:
        legs = self.legs
        assert legs.has_ended == (len(self.ends) == 1)
        for side in Side:
            told = self.told[side]
            assert told.count("open") <= 1 and told.count("cancel") + told.count("stop") <= 1
            stopped = len([word for word in told if word.startswith("stop")])
            assert stopped + told.count("cancel") <= len(legs.choices), "Stop was enough"
            if side in self.released:
                assert legs.leg(side) is LegState.OVER
        if legs.phase is Phase.FAILED:
            assert all(legs.leg(side) is not LegState.OPEN for side in Side), "a leg runs on"
        if legs.phase is Phase.COMPLETE:
            assert all(c.finish is not None for c in legs.choices)
            assert isinstance(self.ends[0], on.Finish)
            assert self.ends[0].n_tokens == legs.n_tokens
        if legs.phase in (Phase.RESERVING, Phase.RESERVED):
            assert legs.n_tokens == 0


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


def test_the_answer_is_whole_when_every_choice_is() -> None:
    watch = Watch(TWO)
    watch.feed(item(0, 7, cached_tokens=1))
    watch.feed(item(0, 5, choice=1, cached_tokens=1))
    watch.feed(item(1, 8, end=FinishReason.LENGTH))
    watch.feed(on.TextDone(0))
    assert watch.legs.phase is Phase.RUNNING and not watch.ends
    watch.feed(item(1, 6, choice=1))
    watch.feed(on.StopMatched("x", 1, choice=1))
    watch.feed(done(Side.RECEIVER))
    assert watch.told[Side.RECEIVER] == ["open", "stop 1"]
    (end,) = watch.ends
    assert isinstance(end, on.Finish)
    assert (end.reason, end.matched_stop) == (FinishReason.LENGTH, None)
    assert (end.n_tokens, end.cached_tokens) == (3, 1)
    assert watch.delivered_by == {0: [7, 8], 1: [5, 6]}


def test_a_stopped_choice_does_not_hold_up_a_cancel_of_the_others() -> None:
    watch = Watch(TWO)
    watch.feed(item(0, 7))
    watch.feed(on.StopMatched("x", 1, choice=0))
    assert watch.feed(item(1, 8)) == [on.Count("late_tokens")]
    watch.feed(on.ClientGone())
    assert watch.told[Side.RECEIVER] == ["open", "stop 0", "cancel"]


def test_a_failure_of_one_choice_is_the_requests() -> None:
    watch = Watch(TWO)
    watch.feed(item(0, 7, end=FinishReason.STOP))
    watch.feed(on.TextDone(0))
    watch.feed(done(Side.RECEIVER, Outcome.FAILED))
    assert watch.ends == [on.Fail(BAD)]


LOGPROBS = replace(TICKET, sampling=SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0))
ONE = (TokenLogprobs(7, -1.0, 1),)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (item(0, 7, prompt_logprobs=ONE), "0 logprobs with 1 tokens"),
        (item(0, 7, logprobs=ONE * 2, prompt_logprobs=ONE), "2 logprobs with 1 tokens"),
        (item(0, 7, logprobs=ONE), "0 logprobs of a prompt with 1"),
        (item(0, 7, logprobs=ONE, prompt_logprobs=ONE), None),
    ],
)
def test_logprobs_that_were_asked_for_are_there_or_the_request_fails(
    event: on.Event, what: str | None
) -> None:
    watch = Watch(LOGPROBS)
    effects = watch.feed(event)
    if what is None:
        assert effects == [on.Deliver(0, (7,), None, 0, ONE, ONE)]
    else:
        (end,) = watch.ends
        assert isinstance(end, on.Fail) and what in end.error.message


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

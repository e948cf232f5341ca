"""Several choices of one request: each ends by itself, the answer when all have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from legs_watch import BAD, TICKET, TWO, Watch, done, item

from protocol.types import FinishReason, Outcome, SamplingParams, TokenLogprobs
from router import leg_events as on
from router.leg_events import Side
from router.leg_state import Phase


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

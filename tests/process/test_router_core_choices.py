"""One request with several choices: text, stops, ends, logprobs and counts of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from router_bench import Bench, Shout, request, run

from protocol.errors import ErrorInfo, Unavailable
from protocol.messages import Stop, TokenItem, Tokens
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    Outcome,
    TokenLogprobs,
)

FIRST = TokenLogprobs(ord("a"), -1.0, 2, ((ord("b"), -0.5),))
PROMPT = tuple(TokenLogprobs(token, -2.0, 3) for token in range(5, 24))


def two_choices(**sampling: object):
    wanted = request(max_tokens=4)
    return replace(wanted, n_choices=2, sampling=replace(wanted.sampling, **sampling))


def say(bench: Bench, *items: TokenItem) -> None:
    bench.decode.says.put_nowait(Tokens(items))


def test_each_choice_has_its_own_text_stop_and_end() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(two_choices(), Shout(), Shout())
            ticket = await bench.both_opened()
            assert ticket.n_choices == 2
            a, b, c = (ord(letter) for letter in "abc")
            say(
                bench,
                TokenItem(ticket.id, 0, (b,), choice=0, cached_tokens=16),
                TokenItem(ticket.id, 0, (a,), choice=1, cached_tokens=16),
            )
            say(
                bench,
                TokenItem(ticket.id, 1, (a,), choice=0),
                TokenItem(ticket.id, 1, (c,), choice=1),
            )
            stop = await bench.decode.hear(Stop)
            assert (stop.ticket_id, stop.index, stop.choice) == (ticket.id, 2, 1)
            say(
                bench,
                TokenItem(ticket.id, 2, (b,), choice=1),  # was on its way: dropped
                TokenItem(ticket.id, 2, (b, a), FinishReason.LENGTH, choice=0),
            )
            bench.prefill.done(ticket)
            bench.decode.done(ticket)
            *deltas, complete = await task
            assert deltas == [
                Delta(0, (b,), "b", 0),
                Delta(0, (a,), "a", 1),
                Delta(1, (a,), "a", 0),
                Delta(1, (c,), "", 1, finish_reason=FinishReason.STOP, matched_stop="c"),
                Delta(2, (b, a), "ba!", 0, finish_reason=FinishReason.LENGTH),
            ]
            assert isinstance(complete, Complete)
            assert (complete.finish_reason, complete.matched_stop) == (FinishReason.LENGTH, None)
            usage = complete.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (
                20,
                6,
                16,
            )
            assert bench.telemetry.value("ttft_seconds") == 1
            assert bench.telemetry.value("itl_seconds") == 3
            assert bench.telemetry.value("tokens_delivered") == 6
            assert bench.core.status().counters["late_tokens"] == 1
            await bench.gone()
            assert bench.decode.told.empty()

    run(scenario)


def test_a_failure_fails_the_whole_call_though_one_choice_was_whole() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(two_choices())
            ticket = await bench.both_opened()
            say(bench, TokenItem(ticket.id, 0, (7,), FinishReason.STOP, choice=1))
            bench.prefill.done(ticket)
            bench.decode.done(ticket, Outcome.FAILED, ErrorInfo("UNAVAILABLE", "no more"))
            with pytest.raises(Unavailable, match="no more"):
                await task
            await bench.gone()

    run(scenario)


def test_logprobs_go_with_their_tokens_and_end_with_a_stop_string() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            wanted = two_choices(logprobs=1, prompt_logprobs=0)
            wanted = replace(wanted, n_choices=1)
            task = bench.ask(wanted, Shout())
            ticket = await bench.both_opened()
            ids = tuple(ord(letter) for letter in "acb")
            logprobs = tuple(replace(FIRST, token_id=token) for token in ids)
            say(
                bench,
                TokenItem(ticket.id, 0, ids, logprobs=logprobs, prompt_logprobs=PROMPT),
            )
            await bench.decode.hear(Stop)
            bench.prefill.done(ticket)
            bench.decode.done(ticket)
            delta, complete = await task
            assert delta == Delta(0, ids[:2], "a", 0, logprobs[:2], PROMPT)
            assert isinstance(complete, Complete) and complete.usage.completion_tokens == 2
            await bench.gone()

    run(scenario)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_counted_and_shown_only_where_asked(include: bool) -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            wanted = replace(
                two_choices(stop_token_ids=(ord("b"),)),
                n_choices=1,
                include_stop_str_in_output=include,
            )
            task = bench.ask(wanted, Shout())
            ticket = await bench.both_opened()
            a, b = ord("a"), ord("b")
            say(bench, TokenItem(ticket.id, 0, (a, b), FinishReason.STOP))
            bench.prefill.done(ticket)
            bench.decode.done(ticket)
            delta, complete = await task
            assert delta == Delta(0, (a, b), "ab!" if include else "a!")
            assert isinstance(complete, Complete) and complete.usage.completion_tokens == 2
            await bench.gone()

    run(scenario)

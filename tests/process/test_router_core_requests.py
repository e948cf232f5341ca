"""One request over two legs: tokens, ends, hang-ups and failures."""

from __future__ import annotations

import asyncio

import pytest
from router_bench import DECODE, PREFILL, Bench, Shout, request, run

from protocol.config import SloConfig, TimingConfig
from protocol.errors import (
    DataLoss,
    ErrorInfo,
    InternalError,
    Unavailable,
)
from protocol.messages import (
    Cancel,
    Queued,
    Reserved,
    SenderLost,
    Stop,
)
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    Outcome,
)


def test_a_request_runs_over_both_legs_and_reports_all_stages() -> None:
    async def scenario() -> None:
        async with Bench(slo=SloConfig(ttft_ms=1e6, itl_ms=1e-6)) as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            assert ticket.sender is not None and ticket.sender.worker_id == PREFILL
            assert ticket.n_prompt == 20 and 0 < ticket.remaining_s <= 600
            status = {w.info.worker_id: w for w in bench.core.status().workers}
            assert status[DECODE].reserved_pages == 2 and status[PREFILL].queued_tokens == 20
            bench.decode.says.put_nowait(Queued(ticket.id, 1, "full"))
            bench.decode.says.put_nowait(Reserved(ticket.id, 2))
            bench.decode.tokens(ticket, 0, 7)
            bench.prefill.done(ticket)
            bench.decode.tokens(ticket, 1, 8, 9, end=FinishReason.LENGTH)
            bench.decode.done(ticket)
            *deltas, complete = await task
            assert deltas == [Delta(0, (7,), ""), Delta(1, (8, 9), "")]
            assert isinstance(complete, Complete)
            assert complete.finish_reason is FinishReason.LENGTH
            assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (20, 3)
            assert {t.stage for t in complete.timings} == {"queue", "prefill", "decode"}
            assert bench.telemetry.value("requests", "length") == 1
            assert bench.telemetry.value("ttft_seconds") == 1
            assert bench.telemetry.value("itl_seconds") == 1
            assert bench.telemetry.value("slo_missed", "ttft") == 0
            assert bench.telemetry.value("slo_missed", "itl") == 1
            await bench.gone()
            assert bench.core.status().running == 0

    run(scenario)


def test_the_end_does_not_wait_for_a_leg_that_does_not_report() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            complete = (await asyncio.wait_for(task, 1))[-1]
            assert isinstance(complete, Complete)
            assert [t.stage for t in complete.timings] == ["queue", "decode"]
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            assert bench.decode.told.empty() and bench.prefill.told.empty()

    run(scenario)


def test_a_client_that_hangs_up_ends_both_legs() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            stream = bench.core.generate(request())
            first = asyncio.create_task(anext(stream))
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7)
            assert await first == Delta(0, (7,), "")
            await stream.aclose()
            assert (await bench.decode.hear(Cancel)).ticket_id == ticket.id
            assert (await bench.prefill.hear(Cancel)).ticket_id == ticket.id
            assert bench.core.status().workers[0].in_flight == 1  # until the worker says Done
            bench.decode.tokens(ticket, 1, 8)
            bench.decode.done(ticket, Outcome.CANCELLED)
            bench.prefill.done(ticket, Outcome.CANCELLED)
            await bench.gone()
            assert bench.telemetry.value("requests", "cancelled") == 1
            assert bench.core.status().counters["late_tokens"] == 1

    run(scenario)


def test_a_cancelled_reader_ends_both_legs_before_the_first_token() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            task.cancel()
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)

    run(scenario)


@pytest.mark.parametrize("failing", [DECODE, PREFILL])
def test_one_failed_leg_cancels_the_other_and_the_client_hears_why(failing: str) -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            other = PREFILL if failing == DECODE else DECODE
            bench.links[failing].done(ticket, Outcome.FAILED, ErrorInfo("DATA_LOSS", "bad sum"))
            with pytest.raises(DataLoss, match="bad sum"):
                await task
            await bench.links[other].hear(Cancel)
            assert bench.links[failing].told.empty()
            bench.links[other].done(ticket, Outcome.CANCELLED)
            await bench.gone()

    run(scenario)


def test_a_lost_sender_is_an_honest_failure() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.says.put_nowait(SenderLost(ticket.id, ErrorInfo("UNAVAILABLE", "link")))
            with pytest.raises(Unavailable, match="link"):
                await task
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)

    run(scenario)


def test_duplicate_tokens_are_dropped_and_a_gap_is_an_error() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7)
            bench.decode.tokens(ticket, 0, 7)
            bench.decode.tokens(ticket, 2, 9)
            with pytest.raises(InternalError, match=r"token 2 .*where token 1"):
                await task
            assert bench.core.status().counters["duplicate_tokens"] == 1
            await bench.decode.hear(Cancel)

    run(scenario)


def test_a_stop_string_stops_the_worker_and_what_follows_is_not_counted() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"a")
            bench.decode.tokens(ticket, 1, *b"bcd")
            bench.decode.tokens(ticket, 4, *b"e")
            assert (await bench.decode.hear(Stop)).index == 3
            *deltas, complete = await task
            assert deltas == [Delta(0, tuple(b"a"), "a"), Delta(1, tuple(b"bc"), "b")]
            assert isinstance(complete, Complete)
            assert complete.finish_reason is FinishReason.STOP and complete.matched_stop == "c"
            assert complete.usage.completion_tokens == 3
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            assert bench.decode.told.empty() and bench.prefill.told.empty()

    run(scenario)


def test_a_stop_string_in_the_last_item_wins_over_the_length() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(max_tokens=2), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"ac", end=FinishReason.LENGTH)
            complete = (await task)[-1]
            assert isinstance(complete, Complete) and complete.matched_stop == "c"
            assert complete.finish_reason is FinishReason.STOP
            assert bench.decode.told.empty()  # it has ended by itself

    run(scenario)


def test_held_back_text_comes_with_the_last_token() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"ab", end=FinishReason.STOP)
            assert (await task)[0] == Delta(0, tuple(b"ab"), "ab!")

    run(scenario)


def test_a_bug_in_the_text_layer_fails_that_request_only() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            bad, good = bench.ask(request("bad"), Shout(fails_at=98)), bench.ask(request("good"))
            tickets = [await bench.decode.opened(), await bench.decode.opened()]
            for ticket in tickets:
                bench.decode.tokens(ticket, 0, *b"ab")
            with pytest.raises(InternalError, match="incident") as told:
                await bad
            assert "no such token" not in told.value.message  # a stranger's words stay in the log
            assert (await bench.decode.hear(Cancel)).ticket_id == tickets[0].id
            bench.decode.tokens(tickets[1], 2, 99, end=FinishReason.STOP)
            assert len(await good) == 3

    run(scenario)


def test_messages_for_nobody_and_from_the_wrong_worker_are_counted() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.prefill.tokens(ticket, 0, 66)
            await bench.until(lambda: bool(bench.core.status().counters))
            assert bench.core.status().counters["messages_of_unknown_tickets"] == 1
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            assert (await task)[0] == Delta(0, (7,), "")
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            bench.decode.done(ticket)
            await bench.until(
                lambda: bench.core.status().counters["messages_of_unknown_tickets"] == 2
            )

    run(scenario)


def test_a_leg_that_never_says_done_is_given_up_after_the_lease() -> None:
    async def scenario() -> None:
        async with Bench(timing=TimingConfig(lease_s=0.05)) as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            await bench.gone()
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            assert bench.core.status().counters["legs_never_done"] == 2

    run(scenario)

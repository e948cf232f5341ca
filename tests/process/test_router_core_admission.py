"""Who gets in, who waits, who is refused: the dispatcher's queue, deadlines and bounds."""

from __future__ import annotations

import asyncio

import pytest
from router_bench import DECODE, PREFILL, Bench, request, run, worker

from protocol.config import LimitsConfig
from protocol.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NeverFits,
    Overloaded,
    SlowReader,
)
from protocol.messages import (
    Cancel,
)
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    Role,
)


def test_requests_wait_for_pages_then_go_and_the_queue_is_bounded() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos, limits=LimitsConfig(max_queued=1)) as bench:
            first = bench.ask(request("first"))
            ticket = await bench.both_opened()
            second = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            with pytest.raises(Overloaded) as refused:
                await bench.ask(request("third"))
            assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
            assert bench.telemetry.value("rejected", "overloaded") == 1
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await first
            assert bench.core.status().queued == 1  # its pages are not free yet
            bench.decode.done(ticket)
            ticket = await bench.both_opened()
            assert ticket.id.request_id.startswith("second")
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await second

    run(scenario)


def test_a_queue_of_no_places_refuses_at_once() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, max_num_seqs=1), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos, limits=LimitsConfig(max_queued=0)) as bench:
            bench.ask(request("first"))
            await bench.both_opened()
            with pytest.raises(Overloaded):
                await bench.ask(request("second"))

    run(scenario)


def test_a_client_that_leaves_the_queue_gives_its_place_up() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            bench.ask(request("first"))
            await bench.both_opened()
            waiting = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            waiting.cancel()
            await bench.until(lambda: bench.core.status().queued == 0)
            assert bench.telemetry.value("requests", "cancelled") == 1

    run(scenario)


def test_deadlines_end_requests_that_wait_and_requests_that_run() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            running = bench.ask(request("running", deadline_s=0.1))
            await bench.both_opened()
            waiting = bench.ask(request("waiting", deadline_s=0.05))
            with pytest.raises(DeadlineExceeded, match=r"waited for its whole deadline.*pages"):
                await waiting
            with pytest.raises(DeadlineExceeded):
                await running
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            with pytest.raises(DeadlineExceeded):
                await bench.ask(request("dead", deadline_s=0))

    run(scenario)


def test_a_slow_reader_is_cancelled() -> None:
    async def scenario() -> None:
        async with Bench(limits=LimitsConfig(stream_buffer=4)) as bench:
            stream = bench.core.generate(request())
            first = asyncio.create_task(anext(stream))
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 10)
            await first
            for i in range(1, 7):
                bench.decode.tokens(ticket, i, 10)
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            got: list[Delta | Complete] = []
            with pytest.raises(SlowReader, match="5 tokens"):
                async for piece in stream:
                    got.append(piece)
            assert [piece.index for piece in got if isinstance(piece, Delta)] == [1, 2, 3, 4, 5]

    run(scenario)


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            with pytest.raises(NeverFits, match=r"1100 tokens.*70 pages.*64"):
                await bench.ask(request(n_prompt=1100, max_tokens=20))
            assert bench.decode.told.empty() and bench.prefill.told.empty()
            assert bench.telemetry.value("rejected", "never_fits") == 1
            assert bench.telemetry.value("prompt_tokens") == 0

    run(scenario)


def test_the_same_id_twice_at_once_is_refused_but_not_one_after_the_other() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            first = bench.ask(request("same"))
            ticket = await bench.both_opened()
            with pytest.raises(InvalidArgument, match="same"):
                await bench.ask(request("same"))
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await first
            second = bench.ask(request("same"))
            other = await bench.both_opened()
            assert other.id != ticket.id  # the first one's legs may still be ending
            bench.decode.tokens(other, 0, 7, end=FinishReason.STOP)
            await second

    run(scenario)

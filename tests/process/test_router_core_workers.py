"""Workers that come, go, hang and restart, as the dispatcher sees them."""

from __future__ import annotations

import asyncio
import time

import pytest
from router_bench import DECODE, PREFILL, Bench, FakeWorker, request, run, worker

from protocol.config import TimingConfig
from protocol.errors import (
    Unavailable,
)
from protocol.messages import (
    Cancel,
)
from protocol.types import (
    Complete,
    FinishReason,
    Mode,
    Role,
)


def test_a_lost_worker_ends_its_requests_and_is_dialled_again() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            old = bench.decode
            old.says.put_nowait(Unavailable("reset by peer"))
            with pytest.raises(Unavailable, match=r"lost worker decode-0.*reset by peer"):
                await task
            await bench.prefill.hear(Cancel)
            assert bench.core.can_serve() == (False, "no decode worker is ready")
            with pytest.raises(Unavailable, match="no decode worker"):
                await bench.ask(request("now"))
            await bench.until(lambda: bench.core.can_serve()[0])
            assert bench.decode is not old and old.closed.is_set()
            again = bench.ask(request("again"))
            ticket = await bench.decode.opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            assert isinstance((await again)[-1], Complete)
            assert bench.telemetry.value("workers_lost", "stream") == 1

    run(scenario)


def test_a_new_incarnation_voids_the_old_one_at_once() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            new = worker(DECODE, Role.DECODE, incarnation="i2")
            bench.core.set_workers((new, bench.infos[1]))
            with pytest.raises(Unavailable, match="left"):
                await task
            await bench.until(lambda: bench.core.can_serve()[0])
            assert bench.decode.info is new

    run(scenario)


def test_a_worker_that_left_does_not_come_back_by_its_last_heartbeat() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            left = bench.decode
            left.beat()  # lies unread when the worker is taken out of the set
            bench.core.set_workers((bench.infos[1],))
            await asyncio.wait_for(left.closed.wait(), 5)
            assert bench.core.can_serve() == (False, "no decode worker is ready")

    run(scenario)


def test_an_answer_of_another_incarnation_is_not_taken() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            bench.decode.beat(incarnation="stranger")
            await bench.until(lambda: not bench.core.can_serve()[0])
            assert bench.telemetry.value("workers_lost", "restarted") == 1

    run(scenario)


def test_a_silent_worker_is_lost_within_its_time() -> None:
    async def scenario() -> None:
        timing = TimingConfig(heartbeat_s=0.02, peer_dead_s=0.1)
        async with Bench(timing=timing) as bench:
            task = bench.ask(request())
            await bench.both_opened()
            began = time.monotonic()
            with pytest.raises(Unavailable, match="silent"):
                await task
            assert time.monotonic() - began < 2

    run(scenario)


def test_a_stuck_worker_is_lost_though_it_answers() -> None:
    async def scenario() -> None:
        async with Bench(timing=TimingConfig(stuck_step_s=30)) as bench:
            task = bench.ask(request())
            await bench.both_opened()
            bench.decode.beat(busy_s=29.0)
            bench.decode.beat(busy_s=31.0)
            with pytest.raises(Unavailable, match="no progress"):
                await task
            # It dials in again, but its first heartbeat shows that nothing has changed.
            bench.before_connect = lambda link: link.beat(busy_s=32.0)
            while (await bench.dialled.get()).info.worker_id != DECODE:
                pass
            await bench.until(lambda: bench.decode.closed.is_set())
            assert not bench.core.can_serve()[0]

    run(scenario)


def test_without_prefill_workers_the_decode_worker_does_it_and_it_is_counted() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE)) as bench:
            serves, detail = bench.core.can_serve()
            assert serves and detail.startswith("degraded")
            task = bench.ask(request())
            ticket = await bench.decode.opened()
            assert ticket.sender is None
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            assert bench.telemetry.value("fallbacks", "no_prefill_worker") == 1

    run(scenario)


def test_colocated_requests_are_local_and_no_fallback() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE), mode=Mode.COLOCATED) as bench:
            assert bench.core.can_serve() == (True, "")
            task = bench.ask(request())
            ticket = await bench.decode.opened()
            assert ticket.sender is None
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            assert bench.telemetry.value("fallbacks", "no_prefill_worker") == 0

    run(scenario)


def test_who_waits_is_refused_when_the_last_decode_worker_goes() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            first = bench.ask(request("first"))
            await bench.both_opened()
            second = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            bench.core.set_workers((infos[1],))
            for task in (first, second):
                with pytest.raises(Unavailable):
                    await task

    run(scenario)


def test_ten_requests_at_once_spread_over_idle_workers() -> None:
    async def scenario() -> None:
        infos = [worker(f"decode-{i}", Role.DECODE) for i in range(5)]
        infos += [worker(f"prefill-{i}", Role.PREFILL) for i in range(5)]
        async with Bench(*infos) as bench:
            for i in range(10):
                bench.ask(request(f"r{i}"))
            await bench.until(lambda: bench.core.status().running == 10)
            assert {w.in_flight for w in bench.core.status().workers} == {2}

    run(scenario)


def test_closing_fails_what_runs_and_what_waits() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            tasks = [bench.ask(request("runs"))]
            await bench.both_opened()
            tasks.append(bench.ask(request("waits")))
            await bench.until(lambda: bench.core.status().queued == 1)
            await bench.core.close()
            for task in tasks:
                with pytest.raises(Unavailable, match="shutting down"):
                    await task
            with pytest.raises(Unavailable, match="shutting down"):
                await bench.ask(request("late"))
            assert not bench.core.can_serve()[0]

    run(scenario)


def test_an_unreachable_worker_is_dialled_with_pauses_until_it_answers() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE)) as bench:

            def refuse(link: FakeWorker) -> None:
                if link.info.worker_id == PREFILL and bench.dialled.qsize() < 2:
                    link.refuse = Unavailable("connection refused")

            await bench.dialled.get()
            bench.before_connect = refuse
            bench.core.set_workers((*bench.infos, worker(PREFILL, Role.PREFILL)))
            await bench.until(lambda: bench.core.can_serve() == (True, ""))
            assert bench.dialled.qsize() == 3

    run(scenario)

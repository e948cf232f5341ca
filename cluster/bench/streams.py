"""Records when each token of a stream reaches the client.

Owns the load client of the benchmarks: one gRPC stream per request, every token with the instant
it arrived. It measures from outside, exactly what a user of the server would see, and never looks
into a worker. Instants are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cluster.bench.results import Stream
from protocol.errors import TandemError
from protocol.types import Complete
from protocol.wire.inference_client import GenerateCall, InferenceClient


class Recorder:
    """Runs streams side by side on one channel and lets the caller wait for what they reached."""

    def __init__(
        self, client: InferenceClient, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._client = client
        self._clock = clock
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def now(self) -> float:
        """The clock that arrivals are measured with."""
        return self._clock()

    def start(self, name: str, call: GenerateCall) -> Stream:
        """Submit a request now; it is recorded in the background until it ends or ``close``."""
        stream = Stream(name, submitted=self._clock())
        self._tasks.append(asyncio.create_task(self._run(stream, call)))
        return stream

    async def until(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until ``reached()``; it is asked again at every token of any stream.

        Raises ``TimeoutError`` naming ``what`` when it does not come true in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(reached)
        except TimeoutError:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}") from None

    async def close(self) -> None:
        """Hang up every stream that still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, stream: Stream, call: GenerateCall) -> None:
        answer = self._client.generate(call)
        try:
            async for piece in answer:
                now = self._clock()
                if isinstance(piece, Complete):
                    stream.timings = piece.timings
                else:
                    stream.arrivals.extend([now] * len(piece.token_ids))
                    stream.text += piece.text
                await self._notify()
        except TandemError as e:
            stream.error = e
        finally:
            await answer.aclose()
        stream.finished = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

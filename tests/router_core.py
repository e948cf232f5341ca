"""The router's dispatcher with real sessions, driven from a test's own thread.

This file owns an event loop thread and what each request has brought. Use ``Core`` as a context
manager: leaving it ends the requests, the sessions and the thread.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from remote_worker import WAIT_S, wait_until

from protocol.config import TandemConfig
from protocol.errors import TandemError
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    ModelInfo,
    Request,
    SamplingParams,
    StageTiming,
    WorkerInfo,
)
from protocol.wire.clients import SessionClient
from protocol.wire.loop_thread import LoopThread
from router.dispatcher import Dispatcher

SECRET = "the tests' secret"


@dataclass
class Answer:
    """What one request has brought so far. ``ended`` is set after the last piece."""

    token_ids: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)  # of every delta's first token
    arrivals: list[float] = field(default_factory=list)  # monotonic instants of the deltas
    finish_reason: FinishReason | None = None
    timings: tuple[StageTiming, ...] = ()
    error: TandemError | None = None
    first: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    cancel: Callable[[], None] = lambda: None

    def result(self, timeout_s: float = WAIT_S) -> list[int]:
        """All tokens; raises the request's error."""
        if not self.ended.wait(timeout_s):
            raise AssertionError(f"no end within {timeout_s:g} s, {len(self.token_ids)} tokens")
        if self.error is not None:
            raise self.error
        return self.token_ids


class Core:
    """A dispatcher with real sessions on an event loop of its own. Use it as a context manager."""

    def __init__(
        self,
        config: TandemConfig,
        model: ModelInfo,
        *,
        secret: str = SECRET,
        router_id: str = "router-t",
    ) -> None:
        self._config = config
        self._model = model
        self._secret = secret
        self._router_id = router_id
        self._loop = LoopThread(router_id)

    def __enter__(self) -> Core:
        self._loop.start()
        self.dispatcher = self._loop.call(self._make)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._loop.run(self.dispatcher.close(), WAIT_S)
        finally:
            self._loop.stop()

    def set_workers(self, workers: Sequence[WorkerInfo], *, wait: bool = True) -> None:
        """The worker list; with ``wait`` until every session is up."""
        self._loop.call(self.dispatcher.set_workers, tuple(workers))
        if wait:
            wait_until(
                lambda: all(w.session == "up" for w in self.status().workers),
                what="sessions with all workers",
            )

    def status(self) -> Any:
        """The dispatcher's ``RouterStatus``."""
        return self._loop.call(self.dispatcher.status)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, deadline_s: float = 60.0, **sampling: Any
    ) -> Answer:
        """Start one request; greedy unless ``sampling`` says otherwise, end tokens ignored."""
        params = SamplingParams(max_tokens, **({"ignore_eos": True} | sampling))
        request = Request(secrets.token_hex(8), tuple(prompt), params, deadline_s=deadline_s)
        answer = Answer()
        future = self._submit(request, answer)
        answer.cancel = future.cancel
        return answer

    def generate(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """Run one request to its end; its tokens."""
        return self.submit(prompt, max_tokens, **more).result(60.0)

    def _make(self) -> Dispatcher:
        return Dispatcher(
            self._config,
            self._model,
            router_id=self._router_id,
            session_factory=lambda info: SessionClient(
                info.endpoint, self._router_id, self._secret, timing=self._config.timing
            ),
            clock=time.monotonic,
        )

    def _submit(self, request: Request, answer: Answer) -> Future[None]:
        async def run() -> None:
            try:
                async with contextlib.aclosing(self.dispatcher.generate(request)) as pieces:
                    async for piece in pieces:
                        _take(answer, piece)
            except TandemError as error:
                answer.error = error
            finally:
                answer.ended.set()

        return self._loop.spawn(run())


def _take(answer: Answer, piece: Delta | Complete) -> None:
    if isinstance(piece, Complete):
        answer.finish_reason = piece.finish_reason
        answer.timings = piece.timings
        return
    answer.indexes.append(piece.index)
    answer.arrivals.append(time.monotonic())
    answer.token_ids.extend(piece.token_ids)
    answer.first.set()

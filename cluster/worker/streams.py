"""The live streams of one service: one per router or peer, each ended exactly once.

Owns the order of a stream's life around the host's ``attach`` and ``lost``: an older stream of
the same name is ended before a newer one attaches, and nothing is taken from a stream that is
over. Knows no message but the heartbeat that it is handed, and never decides about tickets.

Life of an entry: ``serve`` ends the older one -> attach -> read, write and heartbeat run side by
side -> the first of them to end gives the cause -> ``lost(cause)``, once -> the tasks are ended.
All on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from cluster.worker.host import Host
from protocol.config import TimingConfig
from protocol.errors import InternalError, MalformedFrame, StaleAttempt, TandemError, Unavailable
from protocol.wire.stream import Duplex

_log = logging.getLogger(__name__)


class _Served:
    """One stream from its attach to its end; ``lost`` runs exactly once, with the cause."""

    def __init__(self, duplex: Duplex, lost: Callable[[TandemError], None]) -> None:
        self.duplex = duplex
        self._lost = lost
        self.over: TandemError | None = None

    def end(self, cause: TandemError) -> None:
        if self.over is None:
            self.over = cause
            self.duplex.close(cause)
            self._lost(cause)


class StreamTable:
    """The live streams of one service by the name of their other side: one each."""

    def __init__(self, kind: str, timing: TimingConfig, host: Host) -> None:
        self._kind = kind
        self._timing = timing
        self._host = host
        self._live: dict[str, _Served] = {}
        self._stopping: TandemError | None = None

    def __len__(self) -> int:
        return len(self._live)

    def names(self) -> tuple[str, ...]:
        """Who has a stream open now."""
        return tuple(self._live)

    async def end_all(self, cause: TandemError, flush_s: float = 1.0) -> None:
        """Refuse new streams, write what is queued for at most ``flush_s``, end every stream."""
        self._stopping = cause
        live = list(self._live.values())
        try:
            async with asyncio.timeout(flush_s):
                await asyncio.gather(*(served.duplex.flush() for served in live))
        except TimeoutError:
            _log.warning("some %s streams ended with messages unread", self._kind)
        for served in live:
            served.end(cause)

    async def serve(
        self,
        name: str,
        duplex: Duplex,
        *,
        attach: Callable[[], None],
        lost: Callable[[TandemError], None],
        take: Callable[[Any], None],
        refuse: Callable[[MalformedFrame], None],
        beat: Callable[[], Any],
    ) -> TandemError:
        """Run one stream to its end and return the cause.

        ``take`` gets every message and may find it malformed; ``refuse`` hears of every malformed
        one and raises to end the stream; ``beat()`` makes what is sent every ``heartbeat_s``.
        """
        if self._stopping is not None:
            return self._stopping
        older = self._live.get(name)
        if older is not None:
            older.end(StaleAttempt(f"{name} has opened a newer {self._kind} stream"))
        served = self._live[name] = _Served(duplex, lost)
        tasks: list[asyncio.Task[None]] = []
        cause: TandemError = Unavailable(f"{name} is gone")
        try:
            attach()
            tasks = [
                asyncio.create_task(work, name=f"{self._kind} {name}")
                for work in (
                    duplex.write_all(),
                    self._read(served, take, refuse),
                    self._beat(name, served, beat),
                )
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            cause = _cause_of(done.pop())
        finally:
            served.end(cause)
            if self._live.get(name) is served:
                del self._live[name]
            self._host.count("streams_lost", self._kind)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return served.over or cause

    async def _read(
        self,
        served: _Served,
        take: Callable[[Any], None],
        refuse: Callable[[MalformedFrame], None],
    ) -> None:
        while served.over is None:
            try:
                message = await served.duplex.read()
                if message is None:
                    raise Unavailable(f"the {self._kind} stream was closed by its other side")
                if served.over is None:
                    take(message)
            except MalformedFrame as error:
                self._host.count("frames_refused", self._kind)
                _log.warning("%s frame refused: %s", self._kind, error.message)
                refuse(error)

    async def _beat(self, name: str, served: _Served, beat: Callable[[], Any]) -> None:
        loop = asyncio.get_running_loop()
        heartbeat_s, dead_s = self._timing.heartbeat_s, self._timing.peer_dead_s
        while True:
            served.duplex.send(beat())
            due = loop.time() + heartbeat_s
            await asyncio.sleep(heartbeat_s)
            # When this loop itself was held up, frames may lie unread: no verdict this time.
            on_time = loop.time() - due < heartbeat_s
            silent_s = loop.time() - served.duplex.heard_at
            if on_time and silent_s > dead_s:
                raise Unavailable(f"{name} has said nothing for {silent_s:.1f} s")


def _cause_of(task: asyncio.Task[None]) -> TandemError:
    """Why the first of a stream's tasks ended; a bug of ours is logged, not hidden."""
    if task.cancelled():
        return Unavailable("the call was cancelled")
    error = task.exception()
    if isinstance(error, TandemError):
        return error
    if error is None or isinstance(error, grpc.aio.UsageError | grpc.aio.InternalError):
        return Unavailable("the call has ended")
    _log.error("a stream handler raised", exc_info=error)
    return InternalError(f"a stream handler raised {type(error).__name__}")

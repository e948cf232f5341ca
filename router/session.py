"""The router's Sessions: one stream to each worker of the set, kept up while the worker is in it.

This file owns connecting, reconnecting with growing pauses, and the verdict that a worker is
lost: its stream ended, it was silent for ``peer_dead_s``, or one step of it has run for longer
than ``stuck_step_s`` (it answers, but makes no progress). It must never decide what a lost worker
means for a request: it tells its listener. A worker counts as up only after its first heartbeat,
so a stuck one does not come back by answering the dial.

All methods are called on one event loop; ``send`` never blocks.

Life of a session: connecting -> up (first heartbeat) -> lost (the listener hears it at once; the
stream is closed) -> pause -> connecting, until the worker leaves the set or has a new
incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Protocol

from protocol.config import TimingConfig
from protocol.errors import InternalError, TandemError, Unavailable
from protocol.messages import RouterToWorker, WorkerHeartbeat, WorkerToRouter
from protocol.types import WorkerInfo, WorkerLoad

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
MEANT = ("left", "closed")  # causes of a session's end that are nobody's failure

log = logging.getLogger(__name__)


class SessionLink(Protocol):
    """One Session stream to one worker: ``protocol.wire.clients.SessionClient`` is one.

    ``messages`` raises a ``TandemError`` with the cause when the stream ends. The link sends the
    router's heartbeat by itself.
    """

    async def connect(self) -> None: ...
    def send_nowait(self, message: RouterToWorker) -> None: ...
    def messages(self) -> AsyncIterator[WorkerToRouter]: ...
    async def close(self) -> None: ...


SessionFactory = Callable[[WorkerInfo], SessionLink]


class SessionListener(Protocol):
    """Who hears what happens on the sessions. Called on the event loop; must not raise."""

    def session_up(self, info: WorkerInfo) -> None: ...
    def session_message(self, info: WorkerInfo, message: WorkerToRouter) -> None: ...
    def session_lost(self, info: WorkerInfo, error: TandemError, cause: str) -> None: ...


class SessionState(StrEnum):
    """See the file's head."""

    CONNECTING = "connecting"
    UP = "up"
    LOST = "lost"


class WorkerSession:
    """One worker's session. ``detail`` says why it is not up."""

    def __init__(
        self,
        info: WorkerInfo,
        factory: SessionFactory,
        timing: TimingConfig,
        clock: Callable[[], float],
        listener: SessionListener,
    ) -> None:
        self.info = info
        self.state = SessionState.CONNECTING
        self.detail = "not connected yet"
        self.load: WorkerLoad | None = None
        self._factory = factory
        self._timing = timing
        self._clock = clock
        self._listener = listener
        self._link: SessionLink | None = None
        self._last_heard = clock()
        self._verdict: TandemError | None = None
        self._breaking: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    def send(self, message: RouterToWorker) -> None:
        """Queue a message; one to a worker that is not up is of no use and goes nowhere."""
        if self.state is SessionState.UP and self._link is not None:
            self._link.send_nowait(message)

    def excuse(self) -> None:
        """The router itself stood still: silence until now was not the worker's."""
        self._last_heard = self._clock()

    def check_alive(self) -> None:
        """Give the session up if its worker is silent."""
        silent = self._clock() - self._last_heard
        if self._link is not None and silent > self._timing.peer_dead_s:
            self._break(
                Unavailable(f"{self.info.worker_id} was silent for {silent:.1f} s"), "silent"
            )

    def leave(self, cause: str) -> None:
        """The worker is no longer in the set; the listener hears it now, and nothing after it."""
        self._verdict = Unavailable(f"{self.info.worker_id} left the cluster")
        self._lost(self._verdict, cause)

    async def close(self) -> None:
        """End the stream and the attempts to connect."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            self.state, self._verdict = SessionState.CONNECTING, None
            was_up = False
            link = self._factory(self.info)
            try:
                await link.connect()
                self._link, self._last_heard = link, self._clock()
                async for message in link.messages():
                    self._heard(message)
                    was_up = was_up or self.state is SessionState.UP
                error: TandemError = Unavailable(f"{self.info.worker_id} ended its session")
            except TandemError as failure:
                error = failure
            except Exception as failure:
                log.exception("session with %s failed with a bug", self.info.worker_id)
                error = InternalError(
                    f"the session with {self.info.worker_id} failed: {type(failure).__name__}"
                )
            finally:
                self._link = None
                await link.close()
            self._lost(self._verdict or error, "stream")
            pause = FIRST_PAUSE_S if was_up else min(2 * pause, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    def _heard(self, message: WorkerToRouter) -> None:
        if self._verdict is not None:
            return  # given up already; what its stream still held is of no use
        self._last_heard = self._clock()
        if isinstance(message, WorkerHeartbeat) and not self._take_heartbeat(message):
            return
        if self.state is SessionState.UP:
            self._listener.session_message(self.info, message)

    def _take_heartbeat(self, message: WorkerHeartbeat) -> bool:
        """Whether the heartbeat is that of a worker in order."""
        worker = self.info.worker_id
        if message.incarnation != self.info.incarnation:
            self._break(
                Unavailable(f"{worker} was restarted: {message.incarnation} answers"), "restarted"
            )
            return False
        self.load = message.load
        if message.load.busy_s > self._timing.stuck_step_s:
            self._break(
                Unavailable(
                    f"{worker} makes no progress: step {message.load.steps + 1} has run for "
                    f"{message.load.busy_s:.0f} s"
                ),
                "stuck",
            )
            return False
        if self.state is not SessionState.UP:
            self.state, self.detail = SessionState.UP, ""
            log.info("session with %s is up", worker)
            self._listener.session_up(self.info)
        return True

    def _break(self, error: TandemError, cause: str) -> None:
        """Declare the worker lost now, then end its stream, which ends the reader."""
        if self._verdict is not None:
            return
        self._verdict = error
        self._lost(error, cause)
        if self._link is not None:
            self._breaking = asyncio.create_task(self._link.close())

    def _lost(self, error: TandemError, cause: str) -> None:
        worker, was_up = self.info.worker_id, self.state is SessionState.UP
        self.state, self.detail = SessionState.LOST, error.message
        if was_up:
            level = logging.INFO if cause in MEANT else logging.WARNING
            log.log(level, "session with %s is over (%s): %s", worker, cause, error.message)
            self._listener.session_lost(self.info, error, cause)


class WorkerSessions:
    """The sessions of one router and the clock that watches over them."""

    def __init__(
        self,
        factory: SessionFactory,
        timing: TimingConfig,
        clock: Callable[[], float],
        listener: SessionListener,
    ) -> None:
        self._factory = factory
        self._timing = timing
        self._clock = clock
        self._listener = listener
        self._sessions: dict[str, WorkerSession] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        """Make the set of sessions that of these workers; a changed worker is a new one."""
        wanted = {info.worker_id: info for info in workers}
        for worker_id, session in list(self._sessions.items()):
            if wanted.get(worker_id) != session.info:
                del self._sessions[worker_id]
                session.leave("left")
                task = asyncio.create_task(session.close())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        for worker_id, info in wanted.items():
            if worker_id not in self._sessions:
                self._sessions[worker_id] = WorkerSession(
                    info, self._factory, self._timing, self._clock, self._listener
                )
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    def all(self) -> tuple[WorkerSession, ...]:
        """Every session, whatever its state."""
        return tuple(self._sessions.values())

    def is_up(self, worker_id: str, incarnation: str) -> bool:
        """Whether this very worker can be spoken to."""
        session = self._sessions.get(worker_id)
        return (
            session is not None
            and session.state is SessionState.UP
            and session.info.incarnation == incarnation
        )

    def send(self, worker_id: str, incarnation: str, message: RouterToWorker) -> None:
        """Queue a message to this very worker; nothing happens when it is not up."""
        if self.is_up(worker_id, incarnation):
            self._sessions[worker_id].send(message)

    async def close(self) -> None:
        """End every session."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.leave("closed")
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _watch(self) -> None:
        period = self._timing.heartbeat_s / 2
        expected = self._clock() + period
        while True:
            await asyncio.sleep(period)
            now = self._clock()
            late = now - expected
            expected = now + period
            for session in self.all():
                if late > self._timing.heartbeat_s:
                    session.excuse()
                else:
                    session.check_alive()

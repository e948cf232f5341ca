"""The router's core: takes one request, runs it over its legs, gives back one stream of text.

Interface published early; the body follows in the next commits.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.config import TandemConfig
from protocol.messages import RouterToWorker, WorkerToRouter
from protocol.types import Complete, Delta, ModelInfo, Request, WorkerInfo, WorkerLoad
from router.text import IncrementalText


class SessionLink(Protocol):
    """One Session stream to one worker, as ``protocol.wire.clients.SessionClient`` offers it."""

    async def connect(self) -> None: ...
    async def send(self, message: RouterToWorker) -> None: ...
    def messages(self) -> AsyncGenerator[WorkerToRouter, None]: ...
    async def close(self) -> None: ...


SessionFactory = Callable[[WorkerInfo], SessionLink]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as this router sees it."""

    info: WorkerInfo
    session: str  # connecting | up | lost
    detail: str  # why it is lost; empty when up
    load: WorkerLoad | None  # last heartbeat
    in_flight: int  # legs of this router's requests
    reserved_pages: int  # by this router's accounting
    queued_tokens: int  # prompt tokens this router expects to be uncomputed there


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """What ``/load``, ``Admin`` and the dashboard show about this router."""

    router_id: str
    workers: tuple[WorkerStatus, ...]
    running: int  # dispatched requests that have not ended
    queued: int  # requests waiting in the router
    counters: Mapping[str, int] = field(default_factory=dict)


class Dispatcher:
    """One per router; all methods are called on the router's event loop."""

    def __init__(
        self,
        config: TandemConfig,
        model: ModelInfo,
        *,
        router_id: str,
        session_factory: SessionFactory,
        clock: Callable[[], float],
    ) -> None: ...

    def generate(
        self, request: Request, text: IncrementalText | None
    ) -> AsyncGenerator[Delta | Complete, None]:
        """Run one request. Yields ``Delta``s, then exactly one ``Complete``.

        ``request.sampling.seed`` must be set by the caller. ``text`` (``TextCodec.decoder_for``)
        turns tokens into text and matches stop strings; None yields tokens without text.
        Closing the generator (use ``contextlib.aclosing``) or cancelling its task cancels both
        legs. Raises a ``TandemError`` (also before the first item): ``InvalidArgument``,
        ``ContextLengthExceeded``, ``NeverFits``, ``Overloaded``, ``Unavailable``,
        ``DeadlineExceeded``, ``SlowReader``, ``DataLoss``, ``InternalError``.
        """
        raise NotImplementedError

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        """The whole list of workers that are up; connects to new ones, drops missing ones."""
        raise NotImplementedError

    def can_serve(self) -> tuple[bool, str]:
        """Whether a request would be answered now, and why not (or what is degraded)."""
        raise NotImplementedError

    def status(self) -> RouterStatus:
        """A snapshot; cheap."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel everything and close the sessions."""
        raise NotImplementedError

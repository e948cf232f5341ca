"""What one router knows about itself and its workers, as frozen dataclasses.

This file owns the words of ``/load``, ``/ready`` and the dashboard. It must never hold anything
that a client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.types import WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as this router sees it."""

    info: WorkerInfo
    session: str  # connecting | up | lost
    detail: str  # why it is not up; empty when up
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

"""What ``tandem status`` knows: the state of a whole cluster as frozen dataclasses.

This file owns the words of the Admin service. The controller fills them, the command line and
the dashboard read them; ``protocol.wire`` carries them. It must never hold anything that a
client sent (no prompt text, no request bodies).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.types import Mode, Role, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the controller sees it. ``state`` is a word of its life cycle."""

    worker_id: str
    incarnation: str
    role: Role
    state: str
    endpoint: str
    node: str = ""
    pid: int = 0
    threads: int = 1
    load: WorkerLoad = field(default_factory=WorkerLoad)


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """One router: ``http`` and ``grpc`` are the addresses that it serves on."""

    router_id: str
    state: str
    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened ``age_s`` seconds ago and that an operator should know."""

    age_s: float
    text: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The answer to ``Admin.Status``."""

    cluster: str
    mode: Mode
    model: str
    uptime_s: float
    workers: tuple[WorkerStatus, ...] = ()
    routers: tuple[RouterStatus, ...] = ()
    notes: tuple[Note, ...] = ()

"""What a cold start waits for, as data: steps with states, and where a ready cluster answers.

This file owns the words that ``tandem serve``, the demo and the benchmark show while a cluster
comes up. It must never do I/O: bring-up fills these, the command line prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.types import Mode, WorkerInfo


class StepState(StrEnum):
    """How far one step of a start has come."""

    WAITING = "waiting"
    PLACING = "placing"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing a start waits for. ``detail`` says what for, in words an operator can use."""

    name: str  # ray, controller, a worker's id, router
    state: StepState
    detail: str = ""
    seconds: float = 0.0  # since it was first waited for; frozen once ready


@dataclass(frozen=True, slots=True)
class Progress:
    """All steps of a start, in the order in which they are shown."""

    steps: tuple[Step, ...] = ()

    @property
    def ready(self) -> bool:
        """Whether nothing is waited for any more."""
        return bool(self.steps) and all(s.state is StepState.READY for s in self.steps)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a ready cluster answers, and what it consists of."""

    cluster: str
    mode: Mode
    model: str
    http: str  # host:port
    grpc: str  # host:port
    secret: str  # of the Admin calls; never printed
    workers: tuple[WorkerInfo, ...] = field(default=())

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API, as its SDK takes it."""
        return f"http://{self.http}/v1"

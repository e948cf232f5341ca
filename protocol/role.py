"""The interface between a worker's runtime and the role that it hosts.

A role decides; the runtime carries out. A role is a plain, single-threaded, deterministic
object: the runtime serialises all calls with one lock, hands in the time, and executes the
returned effects in order before it lets the lock go. A role never blocks, sleeps or does I/O.

Life of a role object:
 1. The runtime constructs it over the worker's ``Pages`` (``kv_transfer.pages``).
 2. ``handle`` for every event; ``tick`` at least every 100 ms, so that leases end on a clock.
 3. The engine thread calls ``plan``; not None means a step is running until ``step_done`` (or
    ``step_failed``). Pages used by that step are not freed in between, whatever arrives.
 4. ``check_integrity`` holds whenever no step is running.
"""

from __future__ import annotations

from typing import Protocol

from protocol.errors import ErrorInfo
from protocol.events import Effect, Event
from protocol.step import StepPlan, StepResult
from protocol.types import WorkerLoad


class WorkerRole(Protocol):
    """What both ``PrefillRole`` and ``DecodeRole`` offer to the runtime."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event. Unknown, late and duplicate ones are counted and ignored."""
        ...

    def tick(self, now: float) -> list[Effect]:
        """End leases and deadlines that have passed."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. One step at a time."""
        ...

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """The planned step ran."""
        ...

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """The planned step raised: every request in it fails with ``error``."""
        ...

    def load(self, now: float) -> WorkerLoad:
        """The load report for routers and the controller."""
        ...

    def is_idle(self) -> bool:
        """No ticket, transfer or link operation is live."""
        ...

    def check_integrity(self) -> None:
        """Raise ``InternalError`` with the numbers if the conservation law does not hold."""
        ...

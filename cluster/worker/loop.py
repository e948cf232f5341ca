"""The role of a worker behind its one lock, and the engine thread that runs the role's steps.

This file owns the lock, the clock that the role sees, and what "alive" means: steps done, how
long the running one has taken, faults met. It must never decide about requests (the role does),
know what an effect does (``effects.py`` does), or hold the lock while a step runs.

Life of a worker's engine:
 1. ``RoleHost`` takes in events from any thread: role -> effects -> carried out in order, all
    under the lock. An event that comes out of carrying out an effect waits for its turn.
 2. The engine thread (``engine_thread.py``) asks for a plan, runs it without the lock, hands in
    the result; with nothing to do it sleeps until an event or a tick may have made work.
 3. ``tick`` from the event loop, at least every 100 ms: leases end on a clock.
 4. ``drain``: new tickets are refused, ``wait_idle``; ``stop``: the thread ends after its step.

A role that raises has met a bug of ours: it is logged with an id, the worker reports itself
unhealthy (the controller replaces it), and whatever still works goes on.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from protocol.errors import ErrorInfo, InternalError, TandemError, WrongState
from protocol.events import Effect, Event, FromPeer, FromRouter, ToRouter
from protocol.messages import Done, Open, RouterHeartbeat, TransferHeartbeat
from protocol.role import WorkerRole
from protocol.step import StepPlan, StepResult
from protocol.types import Outcome, WorkerLoad

_log = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # at most this often is an idle worker's page account checked
_STEP_WEIGHT = 0.2  # of the newest step in the moving average of step times
# A step is stuck when it has run longer than this; far above the slowest machine's prefill.
_STUCK_S = 60.0
_STUCK_S_PER_TOKEN = 0.1
_BEATS = (RouterHeartbeat, TransferHeartbeat)  # move no page
_BROKEN_STEPS = 3  # failed steps in a row that make a worker unhealthy


@dataclass(frozen=True, slots=True)
class Health:
    """Whether this worker does its work, by its own clock. ``reason`` is empty when it does."""

    healthy: bool
    reason: str = ""


class RoleHost:
    """Serialises everything that touches the role.

    ``carry_out`` gets the effects of one decision, in order, under the lock; it must only
    enqueue. ``before_effects`` runs under the lock after every decision and before its effects
    (the debug mode poisons freed pages there). ``clock`` is monotonic seconds.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        carry_out: Callable[[Sequence[Effect]], None],
        clock: Callable[[], float],
        before_effects: Callable[[], None] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._installed: WorkerRole | None = None
        self._worker_id = worker_id
        self._carry_out = carry_out
        self._clock = clock
        self._before_effects = before_effects
        self._changed = threading.Condition(self.lock)
        self._inbox: deque[Event] = deque()
        self._deciding = False
        self._draining = False
        self._stopping = False
        self._fault = ""
        self._integrity = ""
        self._failed_in_row = 0
        self._steps = 0
        self._step_s = 0.0
        self._running: StepPlan | None = None
        self._running_since = 0.0
        self._checked_at = float("-inf")
        self._check_due = True

    @property
    def _role(self) -> WorkerRole:
        if self._installed is None:
            raise InternalError(f"{self._worker_id} has no role yet")
        return self._installed

    # --- from any thread -----------------------------------------------------------------------

    def install(self, role: WorkerRole) -> None:
        """Host this role from now on; before any event, tick or engine thread."""
        with self.lock:
            self._installed = role

    def submit(self, event: Event) -> None:
        """Hand one event to the role and carry out its effects."""
        with self.lock:
            self._inbox.append(event)
            if not self._deciding:
                self._take_in()

    def tick(self) -> None:
        """Let the role end what is overdue."""
        with self.lock:
            self._decide("tick", lambda now: self._role.tick(now))

    def load(self) -> WorkerLoad:
        """The role's load, with the progress that this runtime measures."""
        with self.lock:
            now = self._clock()
            busy_s = now - self._running_since if self._running is not None else 0.0
            return replace(
                self._role.load(now), steps=self._steps, step_s=self._step_s, busy_s=busy_s
            )

    def health(self) -> Health:
        """Made progress or idle, and no fault met."""
        with self.lock:
            if self._fault or self._integrity:
                return Health(False, self._fault or f"integrity: {self._integrity}")
            if self._failed_in_row >= _BROKEN_STEPS:
                return Health(False, f"the last {self._failed_in_row} steps failed")
            if self._running is not None:
                busy_s = self._clock() - self._running_since
                bound_s = _STUCK_S + _STUCK_S_PER_TOKEN * self._running.n_tokens
                if busy_s > bound_s:
                    return Health(
                        False,
                        f"a step of {self._running.n_tokens} tokens has run for {busy_s:.0f} s",
                    )
            return Health(True)

    def check_integrity(self) -> str:
        """What is wrong with the page account, or "". Looked at now if idle and anything moved."""
        with self.lock:
            if self._check_due and self.is_idle():
                self._check()
            return self._integrity

    def report_fault(self, reason: str) -> None:
        """Something this worker cannot recover from; its health says so from now on."""
        with self.lock:
            self._fault = self._fault or reason

    def drain(self) -> None:
        """Refuse new tickets from now on."""
        with self.lock:
            self._draining = True

    def is_idle(self) -> bool:
        """No ticket, transfer, link operation or step is live."""
        with self.lock:
            return self._running is None and self._role.is_idle()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the role is idle; whether it is."""
        with self.lock:
            return self._changed.wait_for(self.is_idle, timeout_s)

    def stop(self) -> None:
        """``next_plan`` answers None from now on."""
        with self.lock:
            self._stopping = True
            self._changed.notify_all()

    # --- from the engine thread ----------------------------------------------------------------

    def next_plan(self) -> StepPlan | None:
        """Block until there is a step to run; None at the end of the worker."""
        with self.lock:
            while not self._stopping:
                plan = self._plan()
                if plan is not None:
                    self._running, self._running_since = plan, self._clock()
                    return plan
                self._check_when_idle()
                self._changed.wait()  # every event and every tick notifies
            return None

    def step_done(self, result: StepResult) -> None:
        """The running step's results; its effects are carried out before this returns."""
        with self.lock:
            self._end_step()
            self._failed_in_row = 0
            self._decide("step_done", lambda now: self._role.step_done(result, now))

    def step_failed(self, error: ErrorInfo) -> None:
        """The running step raised."""
        with self.lock:
            self._end_step()
            self._failed_in_row += 1
            self._decide("step_failed", lambda now: self._role.step_failed(error, now))

    # --- under the lock ------------------------------------------------------------------------

    def _decide(self, what: str, decision: Callable[[float], list[Effect]]) -> None:
        """One decision of the role with its effects, then every event that these made."""
        self._deciding = True
        try:
            self._turn(what, decision)
        finally:
            self._deciding = False
        self._take_in()

    def _take_in(self) -> None:
        """Every event that waits, each with its effects; then whoever waits looks again."""
        self._deciding = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                self._turn(type(event).__name__, partial(self._handle, event))
        finally:
            self._deciding = False
        self._changed.notify_all()

    def _turn(self, what: str, decision: Callable[[float], list[Effect]]) -> None:
        try:
            effects = decision(self._clock())
        except Exception as error:
            self._bug(f"the role's {what}", error)
            effects = []
        if self._before_effects is not None:
            self._before_effects()
        if effects:
            self._check_due = True
            self._carry_out(effects)

    def _handle(self, event: Event, now: float) -> list[Effect]:
        if self._draining and isinstance(event, FromRouter) and isinstance(event.message, Open):
            error = WrongState(f"{self._worker_id} is draining").info()
            done = Done(event.message.ticket.id, Outcome.FAILED, error=error)
            return [ToRouter(event.router_id, done)]
        if not (isinstance(event, FromRouter | FromPeer) and isinstance(event.message, _BEATS)):
            self._check_due = True
        return self._role.handle(event, now)

    def _plan(self) -> StepPlan | None:
        try:
            plan = self._role.plan(self._clock())
        except Exception as error:
            self._bug("the role's plan", error)
            return None
        if self._before_effects is not None:
            self._before_effects()
        return plan

    def _end_step(self) -> None:
        seconds = self._clock() - self._running_since
        self._running = None
        self._steps += 1
        self._check_due = True
        old = self._step_s if self._steps > 1 else seconds
        self._step_s = old + _STEP_WEIGHT * (seconds - old)

    def _check_when_idle(self) -> None:
        now = self._clock()
        if self._check_due and now - self._checked_at >= IDLE_CHECK_S and self._role.is_idle():
            self._check()

    def _check(self) -> None:
        self._checked_at, self._check_due = self._clock(), False
        try:
            self._role.check_integrity()
        except TandemError as error:
            if not self._integrity:
                _log.error("%s: integrity: %s", self._worker_id, error.message)
            self._integrity = error.message

    def _bug(self, where: str, error: Exception) -> None:
        fault_id = new_fault_id()
        _log.exception("%s: %s raised; id %s", self._worker_id, where, fault_id)
        self.report_fault(f"{where} raised {type(error).__name__}; id {fault_id} in the log")


def new_fault_id() -> str:
    """A short id that an error message and the log share."""
    return uuid.uuid4().hex[:12]

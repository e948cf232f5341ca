"""The one thread of a worker that computes.

This file owns running steps and what a step that raised is called. It must never hold the role's
lock while a step runs, and never hide a failure: it is logged with an id that the requests'
error carries too.

Life: ``start`` (prepares the device in the thread itself) -> plan, run, hand in, over and over ->
``RoleHost.stop`` -> ``join``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cluster.worker.loop import RoleHost, new_fault_id
from protocol.errors import InternalError, Unavailable
from protocol.step import StepPlan, StepResult

_log = logging.getLogger(__name__)


class EngineThread:
    """The one thread that computes. ``run`` is the model runner's; ``prepare`` runs first, in
    the thread (thread counts of a compute library belong to the thread that sets them)."""

    def __init__(
        self,
        host: RoleHost,
        run: Callable[[StepPlan], StepResult],
        *,
        name: str = "engine",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._host = host
        self._run = run
        self._prepare = prepare
        self._prepared = threading.Event()
        self._refusal: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        """Begin to compute; returns when ``prepare`` has, and raises what it raised."""
        self._thread.start()
        self._prepared.wait()
        if self._refusal is not None:
            raise self._refusal

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end (after ``RoleHost.stop``); whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
        except BaseException as error:
            self._refusal = error
            return
        finally:
            self._prepared.set()
        while (plan := self._host.next_plan()) is not None:
            try:
                result = self._run(plan)
            except Unavailable as error:  # the engine itself says that it is lost
                self._host.step_failed(error.info())
            except Exception as error:
                self._host.step_failed(_step_error(plan, error).info())
            else:
                self._host.step_done(result)


def _step_error(plan: StepPlan, error: Exception) -> InternalError:
    """What the requests of a failed step are told; the cause stays in the log."""
    fault_id = new_fault_id()
    _log.exception(
        "a step of %d rows and %d tokens raised; id %s", len(plan.rows), plan.n_tokens, fault_id
    )
    return InternalError(f"the model step failed ({type(error).__name__}); id {fault_id}")

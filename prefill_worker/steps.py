"""The running step of a prefill worker: what it plans, and what becomes of its results.

This file owns the step between ``plan`` and ``done``, and the moving averages of its time. A
ticket that a step computes ends only when the step has ended.

Life of a step: ``plan`` -> the device runs it -> ``done``: chunks count as computed, complete
pages go out, finished prompts have their first tokens; or ``failed``: every prompt of it fails.
"""

from __future__ import annotations

from prefill_worker.handoff import HandOff
from prefill_worker.leg import Leg
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.tickets import Tickets
from protocol.errors import ErrorInfo, InternalError
from protocol.events import Effect
from protocol.step import RowResult, StepPlan, StepResult, StepRow
from protocol.types import Outcome


class Steps:
    """The steps of one worker, one at a time. Times in seconds."""

    def __init__(self, tickets: Tickets, scheduler: PrefillScheduler, hand_off: HandOff) -> None:
        self._tickets = tickets
        self._scheduler = scheduler
        self._hand_off = hand_off
        self._step: StepPlan | None = None
        self._began = 0.0
        self.count = 0
        self.step_s = 0.0  # moving average
        self.token_s = 0.0  # the same per prompt token

    @property
    def n_running(self) -> int:
        """Prompts in the running step."""
        return len(self._step.advance) if self._step is not None else 0

    def busy_s(self, now: float) -> float:
        """How long the running step has run; 0 when none does."""
        return now - self._began if self._step is not None else 0.0

    def plan(self, now: float) -> StepPlan | None:
        """See ``WorkerRole.plan``."""
        if self._step is not None:
            raise InternalError("a step is planned while another one is running")
        plan, dropped = self._scheduler.plan()
        for prompt in dropped:
            self._tickets.known(prompt.ticket.id).drop_work()
        if plan is None:
            return None
        self._step, self._began = plan, now
        for ticket_id in plan.advance:
            leg = self._tickets.known(ticket_id)
            leg.in_step = True
            leg.began_at = now if leg.began_at is None else leg.began_at
            leg.transfer.computed(self._scheduler.final_pages(leg.prompt))  # found in the cache
        return plan

    def done(self, result: StepResult, now: float) -> list[Effect]:
        """See ``WorkerRole.step_done``."""
        plan, legs = self._take()
        seconds = result.seconds or now - self._began
        self.count += 1
        self.step_s = _average(self.step_s, seconds)
        self.token_s = _average(self.token_s, seconds / plan.n_tokens)
        effects: list[Effect] = []
        for leg, row, got in zip(legs, plan.rows, result.rows, strict=True):
            effects += self._take_row(leg, row, got, now)
        return effects

    def failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """See ``WorkerRole.step_failed``."""
        effects: list[Effect] = []
        for leg in self._take()[1]:
            if leg.outcome is not None:
                effects += self._tickets.finish(leg)
            else:
                effects += self._tickets.end(leg, Outcome.FAILED, error, now)
        return effects

    def _take_row(self, leg: Leg, row: StepRow, got: RowResult, now: float) -> list[Effect]:
        if leg.outcome is not None:
            return self._tickets.finish(leg)
        error = leg.take(row, got, now)
        if error is not None:
            if error.reason == InternalError.reason:
                self._scheduler.distrust(leg.prompt)
            return self._tickets.end(leg, Outcome.FAILED, error, now)
        self._scheduler.advance(leg.prompt, len(row.tokens))
        leg.transfer.computed(self._scheduler.final_pages(leg.prompt))
        return self._hand_off.go_on(leg, now)

    def _take(self) -> tuple[StepPlan, list[Leg]]:
        """The step that has ended, and its legs in the order of its rows."""
        plan, self._step = self._step, None
        if plan is None:
            raise InternalError("a step ended that was not planned")
        legs = [self._tickets.known(row.ticket_id) for row in plan.rows]
        for leg in legs:
            leg.in_step = False
        return plan, legs


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else 0.8 * old + 0.2 * new

"""A decode worker's steps: planned, run elsewhere, and what comes back becomes tokens.

This file owns the running step and the meaning of its results. It must never let a row's failure
touch another ticket, and never append a token to a sequence that is over.

Life of a step: ``plan`` -> it runs, for as long as it takes, while events are handled -> ``done``:
row by row, KV that is computed now, pages that are full, a token for whoever sampled, ends; or
``failed``: every ticket with a row in it fails.
"""

from __future__ import annotations

from decode_worker.intake import Intake
from decode_worker.leg import Leg
from decode_worker.memory import Memory
from decode_worker.preemption import Preemption
from decode_worker.scheduler import DecodeScheduler, Step
from decode_worker.sequence import On, Sequence, State
from decode_worker.tickets import Tickets
from protocol.costs import StepCosts
from protocol.errors import ErrorInfo, InternalError
from protocol.events import Effect, ToRouter
from protocol.messages import TokenItem, Tokens
from protocol.role import RoleOptions
from protocol.step import RowResult, StepPlan, StepResult, StepRow
from protocol.types import Outcome


class Steps:
    """One step at a time, and how long they take."""

    def __init__(
        self,
        memory: Memory,
        preemption: Preemption,
        scheduler: DecodeScheduler,
        intake: Intake,
        tickets: Tickets,
        costs: StepCosts,
        options: RoleOptions,
    ) -> None:
        self._memory = memory
        self._preemption = preemption
        self._scheduler = scheduler
        self._intake = intake
        self._tickets = tickets
        self._costs = costs
        self._options = options
        self._step: Step | None = None
        self._began = 0.0
        self.count = 0
        self.step_s = 0.0  # moving average

    @property
    def running(self) -> bool:
        """A step is being run."""
        return self._step is not None

    def busy_s(self, now: float) -> float:
        """How long the running step has run; 0 when none does."""
        return now - self._began if self._step is not None else 0.0

    def plan(self, now: float) -> StepPlan | None:
        """See ``WorkerRole.plan``."""
        if self._step is not None:
            raise InternalError("a step is planned while another one is running")
        self._step = self._scheduler.plan(self._intake.reasons(), now)
        self._began = now
        return None if self._step is None else self._step.plan

    def done(self, result: StepResult, now: float) -> list[Effect]:
        """See ``WorkerRole.step_done``."""
        step = self._take(result.seconds, now, result.steps)
        rows = step.plan.rows
        if len(result.rows) != len(rows) or not 1 <= result.steps <= step.plan.repeats + 1:
            raise InternalError(
                f"{len(result.rows)} results of {result.steps} steps for a plan of {len(rows)} "
                f"rows and {step.plan.repeats} repeats"
            )
        if result.seconds > 0 and result.steps == 1:
            self._costs.observe(step.shape, result.seconds)
        for seq in step.leaving:
            self._preemption.moved_out(seq)
        for seq in step.returning:
            self._memory.free_host(seq)
        effects: list[Effect] = []
        for i in range(result.steps):
            last = i == result.steps - 1
            if i:
                self._scheduler.grow_again(step.sequences)
            got = result.rows if result.steps == 1 else [_one(row, i, last) for row in result.rows]
            ended, out = self._take_rows(step, got, now)
            effects += out
            if ended and not last:
                raise InternalError(
                    "an answer ended before its plan was repeated for the last time"
                )
            for seq in ended:
                effects += self._tickets.end_choice(seq, now)
        return effects + self._finish_ended(step, now)

    def failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """See ``WorkerRole.step_failed``."""
        step = self._take(0.0, now, 1)
        for seq in step.leaving:
            self._preemption.not_moved(seq)
        effects: list[Effect] = []
        for leg in _legs(step.sequences):
            effects += self._tickets.end(leg, Outcome.FAILED, error, now)
        return effects + self._finish_ended(step, now)

    # --- rows ---------------------------------------------------------------------------------

    def _take_rows(
        self, step: Step, results: tuple[RowResult, ...] | list[RowResult], now: float
    ) -> tuple[list[Sequence], list[Effect]]:
        """What the rows made: the choices that end, and what is said."""
        items: dict[str, list[TokenItem]] = {}
        ended: list[Sequence] = []
        failed: list[tuple[Leg, ErrorInfo]] = []
        eos = self._options.eos_token_ids
        for row, seq, got in zip(step.plan.rows, step.sequences, results, strict=True):
            leg = seq.leg
            if leg.outcome is not None or seq.state is State.OVER:
                continue
            if got.error is not None:
                self._memory.distrust(seq)
                failed.append((leg, got.error))
                continue
            seq.computed += len(row.tokens)
            if seq.computed >= seq.publish_at:
                self._memory.publish(seq)
            if got.prompt_logprobs:
                leg.prompt_logprobs += got.prompt_logprobs
            if row.sample is None:
                continue
            if len(got.tokens) != len(seq.choices):
                raise InternalError(
                    f"{len(got.tokens)} tokens for {len(seq.choices)} choices of {leg.ticket.id}"
                )
            if not leg.running:
                out, over = self._first_tokens(leg, seq, got, now)
                items.setdefault(leg.router_id, []).extend(out)
                ended += over
                continue
            if seq.state is State.PROMPT:  # computed again after a preemption
                seq.follow(On.COMPUTED)
                self._scheduler.run(seq)
            item = self._token(leg, seq, row, got, eos)
            items.setdefault(leg.router_id, []).append(item)
            if item.finish_reason is not None:
                ended.append(seq)
        effects: list[Effect] = [ToRouter(r, Tokens(tuple(i))) for r, i in items.items()]
        for leg, error in failed:
            effects += self._tickets.end(leg, Outcome.FAILED, error, now)
        return ended, effects

    def _token(
        self, leg: Leg, seq: Sequence, row: StepRow, got: RowResult, eos: tuple[int, ...]
    ) -> TokenItem:
        index = seq.n_answer
        reason = seq.take(got.tokens[0], eos)
        return TokenItem(leg.ticket.id, index, got.tokens, reason, seq.choices[0], got.logprobs)

    def _first_tokens(
        self, leg: Leg, seq: Sequence, got: RowResult, now: float
    ) -> tuple[list[TokenItem], list[Sequence]]:
        """A local prompt has its first tokens; a choice that ends with it is returned."""
        seq.follow(On.COMPUTED)
        self._scheduler.run(seq)
        leg.running_at = now
        items = leg.part(got.tokens, got.logprobs, self._options.eos_token_ids)
        self._tickets.parted(leg, seq)
        return items, [seq] if seq.finish_reason is not None else []

    # --- details ------------------------------------------------------------------------------

    def _take(self, seconds: float, now: float, steps: int) -> Step:
        step, self._step = self._step, None
        if step is None:
            raise InternalError("a step ended that was not planned")
        each = (seconds or now - self._began) / max(steps, 1)
        self.count += steps
        self.step_s = each if self.step_s == 0.0 else 0.8 * self.step_s + 0.2 * each
        for seq in step.sequences:
            seq.in_step = False
        for seq in step.leaving:
            seq.in_step = False
        return step

    def _finish_ended(self, step: Step, now: float) -> list[Effect]:
        """Say Done of tickets that ended while the step ran, free choices that did."""
        effects: list[Effect] = []
        for leg in _legs([*step.sequences, *step.leaving]):
            if leg.outcome is not None and self._tickets.get(leg.ticket.id) is leg:
                effects += self._tickets.finish(leg, now)
        for seq in step.sequences:
            if seq.state is State.OVER and seq.leg.outcome is None:
                self._memory.free(seq)
        return effects


def _one(row: RowResult, i: int, last: bool) -> RowResult:
    """The part of a row's result that belongs to the plan's run number ``i``."""
    if row.error is not None:
        return row if last else RowResult()
    return RowResult(row.tokens[i : i + 1], row.logprobs[i : i + 1])


def _legs(sequences: list[Sequence]) -> list[Leg]:
    """Their tickets, each once, in order."""
    return list(dict.fromkeys(seq.leg for seq in sequences))

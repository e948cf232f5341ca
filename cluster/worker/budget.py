"""Finds a worker's token budget at its start, on its own device, when none is configured.

This file owns the presets and the rule (a decode or colocated worker: the largest budget up to the
preset whose step stays within ``slo.itl_ms``; a prefill worker: the smallest within 5 % of the best
tokens/s), and the steps that are timed for it. It must never run while a page is in use: the steps
write into the pool.

Life: ``find_budget`` once, in the engine thread, after the warm-up and before the role exists.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from protocol.config import Profile
from protocol.step import StepPlan, StepResult, StepRow
from protocol.types import Role, SamplingParams, TicketId

_log = logging.getLogger(__name__)

# Where the search ends. On a CPU the same names mean smaller budgets.
_CUDA_PRESET = {Profile.CHAT: 2048, Profile.MIXED: 8192, Profile.BATCH: 16384}
_CPU_PRESET = {Profile.CHAT: 512, Profile.MIXED: 1024, Profile.BATCH: 2048}
_CONTEXT = 256  # tokens that every row of a timed step has in its cache already
_RIDING_SHARE = 4  # one in so many places decodes while prompts are computed
_SMALLEST_SEQS = 8  # places that the smallest budget leaves
_NEARLY_BEST = 0.95
_SEARCH_S = 6.0  # a larger budget is not tried when it would end later than this
_GREEDY = SamplingParams(max_tokens=1)

StepSeconds = Callable[[int, int], float]  # (decodes, prompt tokens) -> seconds of one step


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """What a budget is chosen by. ``itl_s`` is the target for the gap between two tokens."""

    role: Role
    profile: Profile
    itl_s: float
    max_num_seqs: int
    min_prefill_tokens: int

    @property
    def floor(self) -> int:
        """The smallest budget worth having."""
        return self.min_prefill_tokens + min(self.max_num_seqs, _SMALLEST_SEQS)

    def preset(self, *, cuda: bool) -> int:
        """The profile's budget on this kind of device."""
        return max(self.floor, (_CUDA_PRESET if cuda else _CPU_PRESET)[self.profile])


@dataclass(frozen=True, slots=True)
class Chosen:
    """A budget, the sequences that fit beside the prompts' share, and why, in one line."""

    budget: int
    max_num_seqs: int
    why: str
    target_missed: bool = False

    @property
    def note(self) -> str:
        """What was chosen and why, for people."""
        missed = "warning: " if self.target_missed else ""
        return (
            f"{missed}max_num_batched_tokens {self.budget}, max_num_seqs {self.max_num_seqs}: "
            f"{self.why}"
        )


def find_budget(rule: BudgetRule, step_seconds: StepSeconds, *, cuda: bool) -> Chosen:
    """Choose by timing steps; ``step_seconds`` runs one."""
    preset = rule.preset(cuda=cuda)
    if rule.role is Role.PREFILL:
        budget, why, missed = *_for_prefill(rule, preset, step_seconds), False
    elif rule.profile is Profile.BATCH:
        budget, why, missed = preset, "the preset of profile batch", False
    else:
        budget, why, missed = _for_decode(rule, preset, step_seconds)
    seqs = min(rule.max_num_seqs, budget - rule.min_prefill_tokens)
    return Chosen(budget, seqs, why, missed)


def _sizes(floor: int, preset: int) -> list[int]:
    """The floor, the powers of two above it, the preset."""
    powers = [1 << i for i in range(floor.bit_length(), preset.bit_length()) if 1 << i < preset]
    return sorted({floor, *powers, preset})


def _for_decode(rule: BudgetRule, preset: int, step_seconds: StepSeconds) -> tuple[int, str, bool]:
    target_ms = 1e3 * rule.itl_s
    chosen: tuple[int, float] | None = None
    for budget in _sizes(rule.floor, preset):
        decodes = max(1, min(rule.max_num_seqs, budget - rule.min_prefill_tokens) // _RIDING_SHARE)
        seconds = step_seconds(decodes, budget - decodes)
        if seconds > rule.itl_s:
            if chosen is None:
                alone = step_seconds(decodes, 0)
                what = (
                    f"even {decodes} decodes alone take {1e3 * alone:.0f} ms"
                    if alone > rule.itl_s
                    else f"its step takes {1e3 * seconds:.0f} ms"
                )
                return budget, f"slo.itl_ms {target_ms:g} is missed here: {what}", True
            why = (
                f"its step takes {1e3 * chosen[1]:.0f} ms, one of {budget} tokens "
                f"{1e3 * seconds:.0f} ms, and slo.itl_ms is {target_ms:g}"
            )
            return chosen[0], why, False
        chosen = (budget, seconds)
    seconds = chosen[1] if chosen else math.nan
    why = f"the preset of profile {rule.profile.value}; its step takes {1e3 * seconds:.0f} ms"
    return preset, why, False


def _for_prefill(rule: BudgetRule, preset: int, step_seconds: StepSeconds) -> tuple[int, str]:
    rates: dict[int, float] = {}
    spent = 0.0
    for budget in _sizes(rule.floor, preset):
        if rates and spent + 2 * budget / max(rates.values()) > _SEARCH_S:
            break
        seconds = step_seconds(0, budget)
        spent += 2 * seconds
        rates[budget] = budget / seconds
    best = max(rates.values())
    budget = min(size for size, rate in rates.items() if rate >= _NEARLY_BEST * best)
    tried = ", ".join(f"{size}: {rate:.0f}" for size, rate in rates.items())
    return budget, f"prompt tokens/s by budget: {tried}"


class StepTimer:
    """Times steps of an engine over a pool in which no page is in use."""

    def __init__(
        self,
        run: Callable[[StepPlan], StepResult],
        *,
        pages: int,
        page_size: int,
        max_model_len: int,
    ) -> None:
        self._run = run
        self._pages, self._page_size = pages, page_size
        room = min(max_model_len, pages * page_size)
        self._context = min(_CONTEXT, room // 2)
        self._longest_chunk = room - self._context

    def __call__(self, decodes: int, prompt_tokens: int) -> float:
        """The better of two runs, in seconds: what disturbs a run only makes it slower."""
        plan = self._plan(decodes, prompt_tokens)
        return min(self._run(plan).seconds for _ in range(2))

    def _plan(self, decodes: int, prompt_tokens: int) -> StepPlan:
        lengths = [1] * decodes
        while prompt_tokens > 0:
            lengths.append(min(prompt_tokens, self._longest_chunk))
            prompt_tokens -= lengths[-1]
        rows: list[StepRow] = []
        first_page = 0
        for length in lengths:
            n_pages = -(-(self._context + length) // self._page_size)
            # In a small pool rows share pages and overwrite each other: only time counts.
            pages = [(first_page + i) % self._pages for i in range(n_pages)]
            first_page += n_pages
            ticket_id, tokens = TicketId("budget", len(rows) + 1), [0] * length
            history = [0] * (self._context + length)
            rows.append(
                StepRow(
                    ticket_id,
                    tokens,
                    self._context,
                    pages,
                    _GREEDY,
                    history=history,
                    n_prompt=len(history),
                )
            )
        advance = {row.ticket_id: len(row.tokens) for row in rows}
        return StepPlan(advance, tuple(rows))

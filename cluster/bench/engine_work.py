"""What ``tandem bench engine`` measures, and the figures that follow from it (pure).

Owns the cases, the raw rates of every arm and repeat, and their reduction to medians. It never
drops a repeat: an arm that died keeps what it had, and its rows say how many repeats that is.

Rates are tokens per second: prompt tokens for prefill, output tokens for decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from protocol.errors import InvalidArgument

DECODE_STEPS = 8


class Phase(StrEnum):
    """Which half of a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the comparison. ``context`` is the prompt's length where ``phase`` is prefill,
    else how many tokens each of ``batch`` sequences has when its first timed step begins."""

    phase: Phase
    batch: int
    context: int

    def __str__(self) -> str:
        if self.phase is Phase.PREFILL:
            return f"prefill of {self.context} tokens"
        return f"decode, batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class Work:
    """All cases, and ``steps`` decode steps per measurement."""

    cases: tuple[Case, ...]
    steps: int = DECODE_STEPS

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, what decoding adds included."""
        return max(c.context for c in self.cases) + self.steps + 2

    @property
    def widest(self) -> int:
        """Most sequences at once."""
        return max(c.batch for c in self.cases)

    def pages(self, page_size: int) -> int:
        """Pages that the largest case needs."""
        spare = self.steps + 2
        return max(c.batch * -(-(c.context + spare) // page_size) for c in self.cases)


def make_work(
    prompts: Sequence[int], batches: Sequence[int], contexts: Sequence[int], steps: int
) -> Work:
    """Prefill of every length, then decode of every batch at every context."""
    prefill = [Case(Phase.PREFILL, 1, n) for n in prompts]
    decode = [Case(Phase.DECODE, b, c) for c in contexts for b in batches]
    if not prefill and not decode:
        raise InvalidArgument("there is nothing to measure", field="prompts")
    return Work((*prefill, *decode), steps)


def parse_sizes(text: str, field_name: str) -> tuple[int, ...]:
    """For example "1,4,8"; empty for none. Raises ``InvalidArgument`` naming what is wrong."""
    sizes: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if not part.isdecimal() or int(part) < 1:
            raise InvalidArgument(
                f"{field_name} {text!r}: {part!r} is not a whole number above 0", field=field_name
            )
        sizes.append(int(part))
    return tuple(sorted(set(sizes)))


@dataclass(slots=True)
class Rates:
    """Every repeat's rate of one case, by the arm's name."""

    case: Case
    by_arm: dict[str, list[float]] = field(default_factory=dict)

    def add(self, arm: str, rate: float) -> None:
        """One more repeat of an arm."""
        self.by_arm.setdefault(arm, []).append(rate)

    def typical(self, arm: str) -> float | None:
        """Median over repeats; None for an arm that never finished one."""
        rates = self.by_arm.get(arm)
        return median(rates) if rates else None

    def spread(self, arm: str) -> tuple[float, float] | None:
        """Smallest and largest repeat."""
        rates = self.by_arm.get(arm)
        return (min(rates), max(rates)) if rates else None

    def ratio(self, arm: str, other: str) -> float | None:
        """Median over repeats of ``arm``'s rate to ``other``'s in the same repeat.

        Both ran within moments of each other, so what disturbs the machine disturbs both.
        """
        pairs = list(zip(self.by_arm.get(arm, ()), self.by_arm.get(other, ()), strict=False))
        return median(a / b for a, b in pairs) if pairs else None

"""The engine comparison: ours, transformers' plain forward and a peer, case by case.

Owns the order of measuring: every repeat visits every case, and a case's arms run one right after
the other, so that what disturbs the machine disturbs all. It never chooses among repeats. An arm
that fails for good (a peer that dies) leaves with what it has; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cluster.bench.engine_peer import PeerFailed
from cluster.bench.engine_work import Case, Phase, Rates, Work

Progress = Callable[[str], None]


class Arm(Protocol):
    """One engine at work."""

    @property
    def name(self) -> str:
        """tandem, transformers, peer or machine."""
        ...

    def measure(self, case: Case) -> float:
        """Tokens per second of one run."""
        ...


@dataclass(slots=True)
class Results:
    """What was measured. ``lost`` says why an arm did not finish."""

    rates: list[Rates]
    lost: dict[str, str] = field(default_factory=dict)


def compare(arms: Sequence[Arm], work: Work, repeats: int, progress: Progress) -> Results:
    """Every case ``repeats`` times on every arm, alternating.

    The first repeat is preceded by one unmeasured run of the smallest case of each phase.
    """
    running = list(arms)
    results = Results([Rates(case) for case in work.cases])

    def run(arm: Arm, case: Case) -> float | None:
        try:
            return arm.measure(case)
        except PeerFailed as e:
            results.lost[arm.name] = e.message
            running.remove(arm)
            progress(f"{arm.name} is lost: {e.message}")
            return None

    for phase in Phase:
        if small := [c for c in work.cases if c.phase is phase]:
            for arm in tuple(running):
                run(arm, min(small, key=lambda c: (c.batch, c.context)))
    for repeat in range(repeats):
        for rates in results.rates:
            said = []
            # Who comes first changes: the first one finds the caches cold.
            order = running if repeat % 2 == 0 else running[::-1]
            for arm in tuple(order):
                if (rate := run(arm, rates.case)) is not None:
                    rates.add(arm.name, rate)
                    said.append(f"{arm.name} {rate:.1f}")
            progress(f"[{repeat + 1}/{repeats}] {rates.case}: {', '.join(said)}")
    return results

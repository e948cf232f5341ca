"""Gaps between tokens, sorted into before, during and after a long prompt (pure).

Owns the definitions that every interference figure rests on:
 - *before* runs from the instant when every chat has its 8th token to the long prompt's submit;
 - *during* runs from the submit to the long prompt's second token, so that the hand-over from
   prefill to decode lies inside it; a gap that overlaps it counts here, whole;
 - *after* is what follows.
A window with fewer than ``MIN_GAPS_FOR_P99`` gaps has no p99: it would be its maximum.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

WARM_TOKENS = 8
MIN_GAPS_FOR_P99 = 200
WINDOWS = ("before", "during", "after")


@dataclass(frozen=True)
class Gaps:
    """One window's inter-token latencies in milliseconds. None where there is nothing to say."""

    count: int
    p50: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True)
class Marks:
    """The instants that separate the windows, seconds."""

    warm: float  # every chat has had its 8th token
    submit: float  # the long prompt is sent
    second: float  # its second token arrived


def sort_gaps(chats: Iterable[Sequence[float]], marks: Marks) -> dict[str, list[float]]:
    """Every gap in milliseconds, in the one window that it belongs to.

    A gap that began before ``warm`` belongs to none.
    """
    windows: dict[str, list[float]] = {name: [] for name in WINDOWS}
    for arrivals in chats:
        for earlier, later in pairwise(arrivals):
            gap = (later - earlier) * 1000
            if later > marks.submit and earlier < marks.second:
                windows["during"].append(gap)
            elif earlier >= marks.second:
                windows["after"].append(gap)
            elif earlier >= marks.warm:
                windows["before"].append(gap)
    return windows


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0..100) with linear interpolation; ``values`` is not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(gaps: Sequence[float]) -> Gaps:
    """Count, median, p99 and maximum of one window of one run."""
    if not gaps:
        return Gaps(0, None, None, None)
    p99 = percentile(gaps, 99) if len(gaps) >= MIN_GAPS_FOR_P99 else None
    return Gaps(len(gaps), percentile(gaps, 50), p99, max(gaps))


def median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured; None when nothing was."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def median_gaps(runs: Sequence[Gaps]) -> Gaps:
    """Each figure's median over repeats; a p99 only where every repeat has one."""
    every_p99 = all(g.p99 is not None for g in runs)
    return Gaps(
        int(statistics.median([g.count for g in runs])),
        median(g.p50 for g in runs),
        median(g.p99 for g in runs) if every_p99 else None,
        median(g.max for g in runs),
    )


def output_rate(chats: Iterable[Sequence[float]], marks: Marks, end: float) -> float:
    """Chat tokens per second from ``warm`` to ``end``."""
    tokens = sum(1 for arrivals in chats for t in arrivals if marks.warm < t <= end)
    return tokens / (end - marks.warm) if end > marks.warm else 0.0

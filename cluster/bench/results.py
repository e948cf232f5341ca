"""What a benchmark run recorded, and the figures that follow from it (pure).

Owns the raw record (every arrival of every stream) and its reduction: windows per run, medians
over repeats. It never drops a run or a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from cluster.bench import windows
from cluster.bench.arms import Arm
from cluster.bench.windows import Gaps, Marks
from protocol.errors import TandemError
from protocol.types import StageTiming


@dataclass
class Stream:
    """One request as its client saw it. ``arrivals[i]`` is when token ``i`` came."""

    name: str
    submitted: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    error: TandemError | None = None
    timings: tuple[StageTiming, ...] = ()


@dataclass(frozen=True)
class Workload:
    """What every arm is given. Lengths in tokens."""

    chats: int = 6
    long_tokens: int = 2048
    long_output: int = 8
    chat_output: int = 1500
    window_gaps: int = windows.MIN_GAPS_FOR_P99 + 4


@dataclass(frozen=True)
class Run:
    """One arm, once: every arrival, and the instants that separate the windows."""

    chats: tuple[Stream, ...]
    long: Stream
    marks: Marks
    end: float

    @property
    def long_ttft_ms(self) -> float:
        """Submit of the long prompt to its first token."""
        return (self.long.arrivals[0] - self.long.submitted) * 1000

    @property
    def output_tok_s(self) -> float:
        """Chat tokens per second over the three windows together."""
        return windows.output_rate([c.arrivals for c in self.chats], self.marks, self.end)

    def gaps(self) -> dict[str, Gaps]:
        """The chats' inter-token latencies of each window."""
        sorted_gaps = windows.sort_gaps([c.arrivals for c in self.chats], self.marks)
        return {name: windows.summarize(gaps) for name, gaps in sorted_gaps.items()}


@dataclass(frozen=True)
class ArmResult:
    """All repeats of one arm. ``foreign_load`` is the largest share of the cores that other
    programs used just before one of its runs; None where the machine does not tell."""

    arm: Arm
    runs: tuple[Run, ...]
    foreign_load: float | None = None

    def gaps(self) -> dict[str, Gaps]:
        """Medians over repeats."""
        per_run = [run.gaps() for run in self.runs]
        return {name: windows.median_gaps([g[name] for g in per_run]) for name in windows.WINDOWS}

    @property
    def long_ttft_ms(self) -> float:
        """Median over repeats."""
        return median(run.long_ttft_ms for run in self.runs)

    @property
    def output_tok_s(self) -> float:
        """Median over repeats."""
        return median(run.output_tok_s for run in self.runs)

    def typical_run(self) -> Run:
        """The repeat whose longest gap is the median one: what a picture should show."""
        ordered = sorted(self.runs, key=lambda run: run.gaps()["during"].max or 0.0)
        return ordered[(len(ordered) - 1) // 2]

"""How long a decode worker's scheduler takes to decide, without any model.

This file owns the measurement: a real ``DecodeRole`` with 256 running and 1,000 waiting requests,
before and after it has served many. It must never hold a result against a limit (machines differ)
and never quote a single time: medians over many steps, the ages alternating in one run.

Use: ``decision_times()`` -> one ``Decisions`` per age; ``python -m cluster.bench.decisions`` prints
them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from protocol.errors import InternalError
from protocol.events import FromRouter
from protocol.messages import Cancel, Open
from protocol.role import RoleOptions
from protocol.step import RowResult, StepResult
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "bench", "bench:1")
PAGE_SIZE = 16
LONG = 100_000  # tokens: these answers never end here


@dataclass(slots=True)
class Decisions:
    """Seconds of single decisions of a role that had ``served`` requests before."""

    served: int
    running: int
    waiting: int
    plan_s: list[float] = field(default_factory=list)  # what a step does
    done_s: list[float] = field(default_factory=list)  # what its results mean

    @property
    def plan_ms(self) -> float:
        """The median decision, in milliseconds."""
        return median(self.plan_s) * 1e3

    @property
    def done_ms(self) -> float:
        """The median of taking a step's results in, in milliseconds."""
        return median(self.done_s) * 1e3


class _Bench:
    """One role, filled as asked."""

    def __init__(self, running: int, waiting: int, served: int) -> None:
        options = RoleOptions(
            page_bytes=1 << 20,
            max_num_batched_tokens=8192,
            max_num_seqs=running,
            max_model_len=2 * LONG,
            max_waiting=waiting + 1,
            hash_root=b"bench",
            lease_s=1e9,
        )
        self.times = Decisions(served, running, waiting)
        # Just enough for one answer at its longest: whoever waits, waits for a seat.
        self._role = DecodeRole(ME, Pages(max(running * 64, LONG // PAGE_SIZE + 8), 16), options)
        self._opened = 0
        self._now = 0.0
        for _ in range(served):
            self._open(24, 3)
            while not self._role.is_idle():
                self.step()
        for _ in range(running):
            self._open(24, LONG)
        while self._role.load(self._now).running < running:
            self.step()
        for _ in range(waiting):
            self._open(300, 300)
        self.times.plan_s.clear()
        self.times.done_s.clear()

    def _open(self, n: int, max_tokens: int) -> None:
        self._opened += 1
        tokens = tuple((self._opened * 31 + i) % 50_000 for i in range(n))
        ticket = Ticket(
            id=TicketId(f"bench-{self._opened}"),
            sender=None,
            receiver=ME,
            tokens=tokens,
            n_prompt=n,
            sampling=SamplingParams(max_tokens=max_tokens),
            order_key=float(self._opened),
            remaining_s=1e9,
        )
        self._role.handle(FromRouter("r", Open(ticket)), self._now)

    def step(self) -> None:
        """One plan and its results, both timed."""
        began = perf_counter()
        plan = self._role.plan(self._now)
        planned = perf_counter()
        if plan is None:
            raise InternalError("nothing is planned although requests run")
        result = StepResult(tuple(RowResult((5,) if row.sample else ()) for row in plan.rows))
        ready = perf_counter()
        self._role.step_done(result, self._now)
        self.times.done_s.append(perf_counter() - ready)
        self.times.plan_s.append(planned - began)
        self._now += 0.01

    def newcomer(self) -> None:
        """One waiting request leaves and another one comes: something to decide about."""
        cancelled = TicketId(f"bench-{self._opened}")
        self._role.handle(FromRouter("r", Cancel(cancelled, "bench")), self._now)
        self._open(300, 300)


def decision_times(
    *,
    running: int = 256,
    waiting: int = 1000,
    served: Sequence[int] = (0, 20_000),
    steps: int = 200,
) -> list[Decisions]:
    """Time decisions of roles that had served so many requests before, alternating."""
    benches = [_Bench(running, waiting, n) for n in served]
    gc.collect()
    for _ in range(steps):
        for bench in benches:
            bench.newcomer()
            bench.step()
    return [bench.times for bench in benches]


def report(times: Sequence[Decisions]) -> str:
    """The figures as lines for a terminal."""
    lines = [
        f"{d.running} running, {d.waiting} waiting, {d.served} served before: "
        f"decision {d.plan_ms:.2f} ms, results {d.done_ms:.2f} ms (medians of {len(d.plan_s)})"
        for d in times
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(report(decision_times(served=(0, 100_000))) + "\n")

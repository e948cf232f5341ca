"""How long a prefill worker's scheduler takes to decide, without any model.

This file owns the measurement: a real ``PrefillScheduler`` with 1,000 waiting prompts in four
situations, fresh and after it has served many. It must never hold a result against a limit
(machines differ) and never quote a single time: medians over many decisions in the thread's own
CPU time, the situations alternating in one run.

Use: ``decision_times()`` -> one ``Decisions`` per situation and age;
``python -m cluster.bench.prefill_decisions`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import thread_time

from kv_transfer.pages import Pages
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import PrefillScheduler
from protocol.page_hash import root
from protocol.role import RoleOptions
from protocol.step import StepPlan
from protocol.types import Peer, SamplingParams, Ticket, TicketId

PAGE_SIZE = 16
PEER = Peer("prefill-0", "bench", "bench:1")


@dataclass(frozen=True, slots=True)
class Situation:
    """Waiting prompts of ``own`` tokens behind ``shared`` equal ones; ``pages`` in the pool."""

    name: str
    own: int
    shared: int = 0
    pages: int = 60_000
    full: bool = False  # somebody who is granted holds nearly all pages


SITUATIONS = (
    Situation("chunks of long prompts", own=3000),
    Situation("256 short prompts begin", own=32),
    Situation("256 prompts begin, 2,048 tokens of each cached", own=32, shared=2048),
    Situation("no room for anybody", own=600, shared=1024, pages=300, full=True),
)


@dataclass(slots=True)
class Decisions:
    """CPU seconds of single decisions of a scheduler that had ``served`` prompts before."""

    situation: str
    served: int
    waiting: int
    rows: int = 0
    plan_s: list[float] = field(default_factory=list)

    @property
    def plan_ms(self) -> float:
        """The median, in milliseconds."""
        return median(self.plan_s) * 1e3


class _Bench:
    """One scheduler, filled as asked."""

    def __init__(self, situation: Situation, waiting: int, served: int) -> None:
        options = RoleOptions(
            page_bytes=1 << 20,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            max_model_len=100_000,
            hash_root=root("bench", "float32", PAGE_SIZE),
        )
        self.times = Decisions(situation.name, served, waiting)
        self._situation = situation
        self._pages = Pages(situation.pages, PAGE_SIZE)
        self._scheduler = PrefillScheduler(self._pages, options)
        self._prompts: dict[TicketId, Prompt] = {}
        self._added = 0
        for _ in range(served):
            self._add(24, 0)
            self._run()
        if situation.shared and not situation.full:
            self._add(1, situation.shared)
            self._run()
        if situation.full:
            self._add((situation.pages - 1) * PAGE_SIZE, 0).granted = True
            self._scheduler.plan()
        for _ in range(waiting):
            self._add(situation.own, situation.shared)

    def _add(self, own: int, shared: int) -> Prompt:
        self._added += 1
        tokens = (*range(shared), *((self._added * 31 + i) % 50_000 for i in range(own)))
        ticket = Ticket(
            id=TicketId(f"bench-{self._added}"),
            sender=PEER,
            receiver=PEER,
            tokens=tokens,
            n_prompt=len(tokens),
            sampling=SamplingParams(max_tokens=8),
            order_key=float(self._added),
        )
        prompt = self._prompts[ticket.id] = self._scheduler.add(ticket)
        return prompt

    def _run(self) -> None:
        while self._prompts:
            plan, _ = self._scheduler.plan()
            if plan is not None:
                self._advance(plan)

    def _advance(self, plan: StepPlan) -> int:
        """The step ran: how many prompts are through and gone."""
        gone = 0
        for ticket_id, n_tokens in plan.advance.items():
            prompt = self._prompts[ticket_id]
            self._scheduler.advance(prompt, n_tokens)
            if prompt.remaining == 0:
                self._scheduler.forget(self._prompts.pop(ticket_id))
                if prompt.reservation is not None:
                    self._pages.release(prompt.reservation)
                gone += 1
        return gone

    def decide(self) -> None:
        """One decision, timed; who is through is followed by somebody new."""
        began = thread_time()
        plan, _ = self._scheduler.plan()
        self.times.plan_s.append(thread_time() - began)
        if plan is None or self._situation.full:
            return
        self.times.rows = len(plan.rows)
        for _ in range(self._advance(plan)):
            self._add(self._situation.own, self._situation.shared)


def decision_times(
    *, waiting: int = 1000, served: Sequence[int] = (0, 20_000), steps: int = 60
) -> list[Decisions]:
    """Time decisions in every situation, after so many prompts served, alternating."""
    benches = [_Bench(one, waiting, n) for one in SITUATIONS for n in served]
    for _ in range(steps):
        for bench in benches:
            bench.decide()
    return [bench.times for bench in benches]


if __name__ == "__main__":
    for times in decision_times():
        sys.stdout.write(
            f"{times.situation}; {times.waiting} waiting, {times.served} served before: "
            f"{times.plan_ms:.2f} ms for {times.rows} rows\n"
        )

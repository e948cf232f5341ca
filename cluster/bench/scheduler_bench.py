"""How long a role takes to decide, and whether that grows with the requests it has served.

Owns two measurements on the real roles, spoken to as the runtime speaks to them; the device is one
that knows every token at once. It must never look inside a role: what counts is ``plan`` and
``step_done``, whatever they are made of.

CPU time of the deciding thread is what is reported: on a shared machine the wall clock measures
the neighbours. ``wall_p50_ms`` stands beside it.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.bench.windows import percentile
from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from prefill_worker.role import PrefillRole
from protocol.events import (
    Effect,
    FromPeer,
    FromRouter,
    SegmentSent,
    SendPages,
    ToReceiver,
    ToRouter,
)
from protocol.messages import Commit, Done, Grant, Offer, Open, Sealed
from protocol.page_hash import root
from protocol.role import RoleOptions, WorkerRole
from protocol.step import RowResult, StepPlan, StepResult
from protocol.types import Peer, Role, SamplingParams, Ticket, TicketId

PAGE_SIZE = 16
SHORT, USUAL = 40, 200  # prompt tokens
COMPARED = 200  # steps of a role with a past beside one without
_BUDGET = 2048
_STEP_S = 0.05  # of the virtual clock
_VOCAB = 50_000
_D = Peer("decode-0", "bench", "127.0.0.1:1")
_P = Peer("prefill-0", "bench", "127.0.0.1:2")

Progress = Callable[[str], None]


@dataclass(slots=True)
class Spent:
    """CPU and wall milliseconds of single calls."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def p(self, q: float) -> float:
        """A percentile of the CPU time."""
        return round(percentile(self.cpu, q), 4)


class Bench:
    """One role, the world around it, and how long its decisions take."""

    def __init__(
        self, role: Role, running: int, waiting: int, *, n_prompt: int, max_tokens: int
    ) -> None:
        self._draw = random.Random(0)
        self.kind, self._n_prompt, self._max_tokens = role, n_prompt, max_tokens
        self.outstanding = running + waiting
        self.plans, self.dones = Spent(), Spent()
        self.done = 0
        self._asked = 0
        self._now = 0.0
        options = RoleOptions(
            page_bytes=1 << 16,
            max_num_batched_tokens=running + _BUDGET,
            max_num_seqs=running,
            max_model_len=n_prompt + max_tokens,
            eos_token_ids=(0,),
            max_waiting=2 * self.outstanding,
            hash_root=root("bench", "float32", PAGE_SIZE),
        )
        # Room for everybody who runs, so that what is measured is deciding, not thrashing.
        longest = -(-(n_prompt + max_tokens) // PAGE_SIZE)
        pages = Pages((longest + 1) * max(running, self.outstanding // 4), PAGE_SIZE)
        self._me = _D if role is Role.DECODE else _P
        self._role: WorkerRole = (
            DecodeRole(_D, pages, options)
            if role is Role.DECODE
            else PrefillRole(_P, pages, options)
        )

    def fill(self) -> None:
        """Open requests up to the number that is kept open. Each answer ends by its length."""
        while self._asked - self.done < self.outstanding:
            self._asked += 1
            prompt = tuple(self._draw.randrange(1, _VOCAB) for _ in range(self._n_prompt))
            ticket = Ticket(
                TicketId(f"q{self._asked}"),
                None if self.kind is Role.DECODE else _P,
                _D,
                prompt,
                self._n_prompt,
                SamplingParams(max_tokens=self._max_tokens, ignore_eos=True),
                priority=self._draw.randrange(3),
                order_key=self._draw.random(),
                remaining_s=1e9,
            )
            self._carry_out(self._role.handle(FromRouter("bench", Open(ticket)), self._now))

    def step(self) -> int:
        """Decide, run and take in one step; how many rows it had."""
        self._now += _STEP_S
        plan = _timed(self.plans, lambda: self._role.plan(self._now))
        if plan is None:
            return 0
        result = _result(plan)
        self._carry_out(_timed(self.dones, lambda: self._role.step_done(result, self._now)))
        return len(plan.rows)

    def check(self) -> None:
        """The role's own account. Raises ``InternalError``."""
        self._role.check_integrity()

    def forget_times(self) -> None:
        """What follows is measured anew."""
        self.plans, self.dones = Spent(), Spent()

    def _carry_out(self, effects: list[Effect]) -> None:
        """Routers hear their Done; a receiver grants at once, a link sends at once."""
        for effect in effects:
            match effect:
                case ToRouter(_, Done()):
                    self.done += 1
                case ToReceiver(_, Offer(ticket_id, n_tokens)):
                    self._hear(Grant(ticket_id, -(-n_tokens // PAGE_SIZE), 8))
                case ToReceiver(_, Commit(ticket_id)):
                    self._hear(Sealed(ticket_id))
                case SendPages(worker_id, ticket_id, segment):
                    sent = SegmentSent(worker_id, ticket_id, segment, 0)
                    self._carry_out(self._role.handle(sent, self._now))

    def _hear(self, message: Grant | Sealed) -> None:
        self._carry_out(self._role.handle(FromPeer(_D.worker_id, message), self._now))


def decision_time(role: Role, running: int, waiting: int, decisions: int) -> dict[str, Any]:
    """Percentiles of ``plan`` and ``step_done`` over ``decisions`` steps of a full house.

    A decode worker has ``running`` sequences in every step and ``waiting`` requests without a
    place. A prefill worker has as many prompts, of which each step takes what fits its budget.
    """
    ramp = 2 * (running * USUAL // _BUDGET + 8)
    decode = role is Role.DECODE
    length = decisions + ramp + 1 if decode else 1
    bench = Bench(role, running, waiting, n_prompt=USUAL, max_tokens=length)
    bench.fill()
    for _ in range(ramp):
        if bench.step() == running and decode:
            break  # every place is taken and every prompt is computed
    _settle()
    bench.forget_times()
    for _ in range(decisions):
        bench.step()
        bench.fill()
    bench.check()
    gc.unfreeze()
    return {
        "role": role.value,
        "running": running if decode else 0,
        "waiting": waiting if decode else running + waiting,
        "decisions": decisions,
        "p50_ms": bench.plans.p(50),
        "p99_ms": bench.plans.p(99),
        "wall_p50_ms": round(percentile(bench.plans.wall, 50), 4),
        "step_done_p50_ms": bench.dones.p(50),
        "step_done_p99_ms": bench.dones.p(99),
    }


def growth(
    role: Role, running: int, waiting: int, requests: int, warm: int = 8192
) -> dict[str, Any]:
    """Whether deciding costs more, or memory is kept, after ``requests`` were served.

    A role that has served them and one that has served ``warm`` only (enough to fill what has a
    bound: the prefix cache, the ids remembered) decide in turns, so that a busy machine slows both.
    ``objects_grown`` counts what Python's collector knows.
    """
    old, young = (
        Bench(role, running, waiting, n_prompt=SHORT, max_tokens=4) for _ in ("old", "young")
    )
    for bench in (old, young):
        _serve(bench, warm)
    before = _kept()
    _serve(old, warm + requests)
    after = _kept()
    for bench in (old, young):
        bench.forget_times()
    for _ in range(COMPARED):
        for bench in (old, young):
            bench.fill()
            bench.step()
    for bench in (old, young):
        bench.check()
    return {
        "role": role.value,
        "requests": requests,
        "first_ms": young.plans.p(50),
        "last_ms": old.plans.p(50),
        "ratio": round(old.plans.p(50) / young.plans.p(50), 3),
        "step_done_first_ms": young.dones.p(50),
        "step_done_last_ms": old.dones.p(50),
        "objects_grown": after[0] - before[0],
        "rss_grown_mb": round((after[1] - before[1]) / 1e6, 1),
    }


def _serve(bench: Bench, until: int) -> None:
    """Serve until ``until`` requests are done in all; one step at least."""
    while True:
        bench.fill()
        bench.step()
        if bench.done >= until:
            return


def _timed(spent: Spent, call: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.thread_time()
    value = call()
    spent.cpu.append((time.thread_time() - cpu) * 1e3)
    spent.wall.append((time.perf_counter() - wall) * 1e3)
    return value


def _result(plan: StepPlan) -> StepResult:
    rows = (RowResult((7,) * len(r.choices)) if r.sample else RowResult() for r in plan.rows)
    return StepResult(tuple(rows), _STEP_S)


def _settle() -> None:
    """As a worker does before its first request."""
    gc.collect()
    gc.freeze()


def _kept() -> tuple[int, int]:
    """Objects and resident bytes after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return len(gc.get_objects()), pages * 4096

"""One decode role under load on a virtual clock: what it delivers, when, and what it costs.

The device is a formula (``StepModel``), the traffic is a list of arrivals with the length that
each answer will have, which the role does not know: it learns of the end by the EOS token. So the
throughput of a rule (how much an admission leaves free, who is preempted) can be computed exactly
and compared. ``skip`` runs a plan as often as its ``repeats`` and the next event allow, in one go.
"""

from __future__ import annotations

import csv
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from protocol.costs import StepShape, attended_by
from protocol.events import Count, Effect, FromRouter, ToRouter
from protocol.messages import Cancel, Done, Open, Tokens
from protocol.role import RoleOptions
from protocol.step import RowResult, StepPlan, StepResult, StepRow
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "inc", "d:1")
EOS = 0
AZURE = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"


@dataclass(frozen=True)
class StepModel:
    """Seconds per step, per token, per attended pair, per copied page."""

    step: float = 0.008
    token: float = 2e-5
    pair: float = 2e-9
    copy: float = 2e-4

    def seconds(self, shape: StepShape) -> float:
        """How long a step takes."""
        parts = zip((self.step, self.token, self.pair, self.copy), shape.amounts, strict=True)
        return sum(c * a for c, a in parts)


@dataclass(frozen=True)
class Arrival:
    """A request: what it asks for and what it will need."""

    at: float
    n_in: int
    n_out: int
    max_tokens: int
    n_choices: int = 1
    cancel_after: float | None = None


def azure_lengths(n: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, answer) lengths of recorded chat traffic; the same kind made up where it lacks."""
    rng = random.Random(seed)
    if AZURE.exists():
        with AZURE.open() as file:
            rows = [
                (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)
            ]
        first = rng.randrange(len(rows) - n)
        return [(max(a, 1), max(b, 1)) for a, b in rows[first : first + n]]
    return [
        (1 + min(int(rng.lognormvariate(6.5, 1.0)), 4000), 1 + int(rng.expovariate(1 / 210)))
        for _ in range(n)
    ]


@dataclass
class Outcome:
    """What the clients saw and what the worker did."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    plans: int = 0
    computed: int = 0  # tokens, recomputed ones too
    counts: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)  # every token and end, with its instant


class DecodeLoad:
    """One run. All prompts are local, so that recompute and prompts share the budget."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        total_pages: int,
        options: RoleOptions,
        *,
        page_size: int = 16,
        model: StepModel | None = None,
        skip: bool = True,
        tick_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.pages = Pages(total_pages, page_size)
        self.role = DecodeRole(ME, self.pages, options)
        self.out = Outcome()
        self._model = model or StepModel()
        self._skip = skip
        self._tick_s = tick_s
        self._lengths: dict[TicketId, int] = {}
        self._now = 0.0
        self._events: list[tuple[float, int, Open | Cancel]] = []
        rng = random.Random(seed)
        for i, one in enumerate(arrivals):
            ticket = self._ticket(i, one, rng)
            self._lengths[ticket.id] = one.n_out
            self._events.append((one.at, 2 * i, Open(ticket)))
            if one.cancel_after is not None:
                at = one.at + one.cancel_after
                self._events.append((at, 2 * i + 1, Cancel(ticket.id, "gone")))
        self._events.sort(key=lambda e: e[:2])
        self._next = 0  # event
        self._next_tick = tick_s

    def _ticket(self, i: int, one: Arrival, rng: random.Random) -> Ticket:
        tokens = tuple(rng.randrange(2, 50_000) for _ in range(one.n_in))
        return Ticket(
            id=TicketId(f"q{i}"),
            sender=None,
            receiver=ME,
            tokens=tokens,
            n_prompt=one.n_in,
            sampling=SamplingParams(max_tokens=one.max_tokens),
            n_choices=one.n_choices,
            order_key=one.at,
            remaining_s=1e9,
        )

    def run(self) -> Outcome:
        """To the last token."""
        while self._next < len(self._events) or not self.role.is_idle():
            plan = self.role.plan(self._now)
            if plan is None:
                self._now = self._next_at()
                self._handle_until(self._now)
                continue
            self._step(plan)
        self.role.check_integrity()
        assert self.pages.available == self.pages.total
        self.out.seconds = self._now
        return self.out

    def _next_at(self) -> float:
        if self._next < len(self._events):
            return min(self._events[self._next][0], self._next_tick)
        return self._next_tick

    def _handle_until(self, when: float) -> None:
        while (at := self._next_at()) <= when:
            if at == self._next_tick:
                self._next_tick += self._tick_s
                self._hear(self.role.tick(at), (at,))
            else:
                message = self._events[self._next][2]
                self._next += 1
                self._hear(self.role.handle(FromRouter("r", message), at), (at,))

    def _step(self, plan: StepPlan) -> None:
        self.out.plans += 1
        attended = sum(attended_by(row.start, len(row.tokens)) for row in plan.rows)
        most = 1 + (plan.repeats if self._skip else 0)
        for row in plan.rows if most > 1 else ():
            most = min(most, self._to_end(row))
        ends: list[float] = []
        now, next_at = self._now, self._next_at()
        while len(ends) < most:
            shape = StepShape(
                plan.n_tokens, attended + len(ends) * len(plan.rows), len(plan.copies)
            )
            now += self._model.seconds(shape)
            if ends and now >= next_at:
                break
            ends.append(now)
        n = len(ends)
        self._now = ends[-1]
        self._handle_until(self._now)
        self.out.steps += n
        self.out.computed += plan.n_tokens * n
        rows = tuple(self._row(row, n) for row in plan.rows)
        took = self._now - ends[-2] if n > 1 else 0.0
        self._hear(self.role.step_done(StepResult(rows, took, n), self._now), ends)

    def _to_end(self, row: StepRow) -> int:
        """Steps until this row draws its last token, that one included."""
        return max(1, self._lengths[row.ticket_id] - row.token_index)

    def _row(self, row: StepRow, n: int) -> RowResult:
        if row.sample is None:
            return RowResult()
        if n > 1:
            last = self._to_end(row) == n
            return RowResult((5,) * (n - 1) + (EOS if last else 5,))
        token = EOS if self._to_end(row) == 1 else 5
        return RowResult((token,) * len(row.choices))

    def _hear(self, effects: list[Effect], ends: Sequence[float]) -> None:
        said = 0
        for effect in effects:
            match effect:
                case ToRouter(_, Tokens(items)):
                    at = ends[min(said, len(ends) - 1)]
                    said += 1
                    for item in items:
                        self.out.tokens += len(item.token_ids)
                        end = item.finish_reason or ""
                        self.out.log.append(
                            f"{at!r} {item.ticket_id} {item.choice} {item.index} "
                            f"{item.token_ids} {end}"
                        )
                case ToRouter(_, Done() as done):
                    self.out.log.append(f"{self._now!r} {done.ticket_id} {done.outcome}")
                case Count(metric, label):
                    self.out.counts[f"{metric} {label}"] += 1


def first_token_times(arrivals: Sequence[Arrival], log: Sequence[str]) -> list[float]:
    """How long each request waited for its first token, sorted."""
    came = {f"q{i}#1": one.at for i, one in enumerate(arrivals)}
    waits = []
    for line in log:
        at, name, *rest = line.split(" ", 4)
        if len(rest) == 3 and rest[1] == "0" and rest[0] == "0":
            waits.append(float(at) - came[name])
    return sorted(waits)


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ranks = [i / len(sorted_values) for i in range(len(sorted_values))]
    return sorted_values[max(bisect_right(ranks, share) - 1, 0)]

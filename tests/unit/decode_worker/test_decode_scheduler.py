"""Mixed steps against an obvious slow reference: who advances how far, in which order, and why."""

from __future__ import annotations

import random

import pytest

from decode_worker.leg import begin
from decode_worker.memory import Memory
from decode_worker.preemption import Preemption
from decode_worker.scheduler import DecodeScheduler, Step
from decode_worker.sequence import On, Sequence, State
from kv_transfer.pages import Pages
from protocol.costs import StepCosts
from protocol.role import RoleOptions
from protocol.step import MAX_OVERTAKES, StepPlan
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "i", "e")


class Bench:
    """A scheduler with its memory, fed by hand."""

    def __init__(
        self, budget: int, seqs: int, floor: int = 4, chunked: bool = True, total: int = 4000
    ) -> None:
        self.options = RoleOptions(
            page_bytes=100,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_model_len=10_000,
            min_prefill_tokens=floor,
            chunked_prefill=chunked,
        )
        self.pages = Pages(total, 4)
        self.memory = Memory(self.pages, self.options)
        preemption = Preemption(self.pages, self.memory, StepCosts())
        self.scheduler = DecodeScheduler(self.memory, preemption, self.options)
        self.sequences: dict[TicketId, Sequence] = {}
        self.serial = 0

    def join(
        self, name: str, n: int, priority: int = 0, order_key: float = 0.0, max_tokens: int = 20
    ) -> Sequence:
        """A local prompt that has its place."""
        params = SamplingParams(max_tokens=max_tokens)
        ticket = Ticket(
            TicketId(name),
            None,
            ME,
            tuple(range(n)),
            n,
            params,
            priority=priority,
            order_key=order_key,
        )
        self.serial += 1
        seq = begin("r", ticket, self.serial, 0.0, self.pages, self.options).first
        self.memory.place(seq, On.PROMPT)
        self.scheduler.join(seq)
        self.sequences[ticket.id] = seq
        return seq

    def leave(self, seq: Sequence) -> None:
        """This sequence has ended."""
        self.scheduler.leave(seq)
        seq.in_step = False
        seq.follow(On.END)
        self.memory.free(seq)
        del self.sequences[seq.leg.ticket.id]

    def plan(self) -> StepPlan | None:
        """The next plan, carried out at once: every row that samples gets token 1."""
        step = self.scheduler.plan({}, 0.0)
        if step is not None:
            self.carry_out(step)
        return step.plan if step is not None else None

    def carry_out(self, step: Step) -> None:
        for row, seq in zip(step.plan.rows, step.sequences, strict=True):
            assert row.start == seq.computed
            assert list(row.tokens) == seq.tokens[row.start : row.start + len(row.tokens)]
            assert len(row.pages) >= -(-(row.start + len(row.tokens)) // 4)
            seq.computed += len(row.tokens)
            seq.in_step = False
            if row.sample is not None:
                assert row.token_index == seq.n_answer
                if seq.state is State.PROMPT:
                    seq.follow(On.COMPUTED)
                    self.scheduler.run(seq)
                    seq.leg.running_at = 0.0
                seq.tokens.append(1)


@pytest.mark.parametrize("seed", range(30))
def test_random_traces_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    budget, seqs = rng.choice(((12, 6), (20, 8), (64, 16)))
    chunked = rng.random() < 0.8
    bench = Bench(budget, seqs, chunked=chunked)
    legs = bench.sequences
    arrival: dict[TicketId, int] = {}
    overtakes, last_oldest = 0, None
    for i in range(150):
        if rng.random() < 0.5 and len(legs) < seqs:
            one = bench.join(f"q{i}", rng.randint(1, 90), rng.choice((0, 1)), rng.randint(0, 3))
            arrival[one.leg.ticket.id] = i
        prompts = [x for x in legs.values() if x.state is State.PROMPT]
        running = [x for x in legs.values() if x.state is State.RUNNING]
        expected = {x.leg.ticket.id: 1 for x in running}
        share = max(budget - len(running), 4)
        left = share
        prompts.sort(
            key=lambda x: (
                x.leg.ticket.priority,
                x.leg.ticket.order_key,
                arrival[x.leg.ticket.id],
            )
        )
        oldest = min(prompts, key=lambda x: arrival[x.leg.ticket.id], default=None)
        if oldest is not last_oldest:
            overtakes = 0
        if oldest and overtakes >= MAX_OVERTAKES:
            prompts.remove(oldest)
            prompts.insert(0, oldest)
        first = True
        for x in prompts:
            need = len(x.tokens) - x.computed
            if left <= 0 or (not chunked and need > left and not first):
                continue
            expected[x.leg.ticket.id] = min(need, left) if chunked else need
            left -= expected[x.leg.ticket.id]
            first = False
        plan = bench.plan()
        assert (dict(plan.advance) if plan else {}) == expected
        if plan is None:
            continue
        if oldest:
            overtakes = 0 if oldest.leg.ticket.id in expected else overtakes + 1
        last_oldest = oldest
        assert set(plan.reasons) == {x.leg.ticket.id for x in prompts} - set(expected)
        decodes_first = list(plan.advance)[: len(running)]
        assert set(decodes_first) == {x.leg.ticket.id for x in running}
        for one in list(legs.values()):
            if one.n_answer >= 20 or rng.random() < 0.02:
                bench.leave(one)
        bench.pages.check_integrity()


def test_decodes_advance_in_every_step_and_a_long_prompt_too() -> None:
    bench = Bench(12, 8)
    chats = [bench.join(f"chat{i}", 3, max_tokens=10_000) for i in range(7)]
    while any(chat.state is State.PROMPT for chat in chats):
        assert bench.plan() is not None
    long_ = bench.join("long", 400)
    steps = 0
    while long_.state is State.PROMPT:
        plan = bench.plan()
        assert plan is not None and plan.n_tokens <= 12 and plan.repeats == 0
        assert all(plan.advance[chat.leg.ticket.id] == 1 for chat in chats)
        assert plan.advance[long_.leg.ticket.id] >= 4
        steps += 1
    assert steps == 80  # 5 tokens beside 7 decodes


def test_repeats_end_with_the_first_answer_and_with_the_pages() -> None:
    bench = Bench(64, 16, total=12)
    bench.join("long", 4, max_tokens=40)
    assert (plan := bench.plan()) is not None and plan.repeats == 0  # a prompt
    assert (plan := bench.plan()) is not None and plan.repeats == 38  # 1 made, 39 to come
    bench.join("short", 3, max_tokens=6)
    assert (plan := bench.plan()) is not None and plan.repeats == 0
    assert (plan := bench.plan()) is not None and plan.repeats == 4
    crowded = Bench(64, 16, total=5)
    for i in range(2):
        crowded.join(f"q{i}", 3, max_tokens=12)
    crowded.plan()
    plan = crowded.plan()  # position 3 of page 0 for both; three pages are left
    assert plan is not None and plan.repeats == 3
    for seq in list(crowded.sequences.values()):
        for _ in range(plan.repeats):
            assert crowded.memory.reach(seq, 1)
            seq.computed += 1

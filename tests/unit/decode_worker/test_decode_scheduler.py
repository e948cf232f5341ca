"""Mixed steps against an obvious slow reference, and the time one decision takes."""

from __future__ import annotations

import gc
import random
from time import perf_counter

import pytest

from decode_worker.leg import Leg
from decode_worker.scheduler import DecodeScheduler
from kv_transfer.pages import Pages
from protocol.role import RoleOptions
from protocol.step import MAX_OVERTAKES, StepPlan
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("decode-0", "i", "e")


def options(budget: int, seqs: int, floor: int = 4, chunked: bool = True) -> RoleOptions:
    return RoleOptions(
        page_bytes=100,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_model_len=10_000,
        min_prefill_tokens=floor,
        chunked_prefill=chunked,
    )


def leg(pages: Pages, name: str, n: int, priority: int = 0, order_key: float = 0.0) -> Leg:
    params = SamplingParams(max_tokens=20)
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
    made = Leg("r", ticket, 0.0, 600.0, list(ticket.tokens))
    made.reservation = pages.reserve(ticket.id, pages.pages_for(ticket.n_tokens_reserved))
    return made


def carry_out(scheduler: DecodeScheduler, legs: dict[TicketId, Leg], plan: StepPlan) -> None:
    for row in plan.rows:
        one = legs[row.ticket_id]
        assert row.start == one.computed
        assert list(row.tokens) == one.tokens[row.start : row.start + len(row.tokens)]
        assert len(row.pages) >= -(-(row.start + len(row.tokens)) // 4)
        one.computed += len(row.tokens)
        if row.sample is not None:
            assert row.token_index == one.n_answer
            if not one.running:
                scheduler.started(one)
            one.tokens.append(1)


@pytest.mark.parametrize("seed", range(30))
def test_random_traces_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    budget, seqs = rng.choice(((12, 6), (20, 8), (64, 16)))
    chunked = rng.random() < 0.8
    pages = Pages(4000, 4)
    scheduler = DecodeScheduler(pages, options(budget, seqs, chunked=chunked))
    legs: dict[TicketId, Leg] = {}
    arrival: dict[TicketId, int] = {}
    overtakes, last_oldest = 0, None
    for i in range(150):
        if rng.random() < 0.5 and len(legs) < seqs:
            one = leg(pages, f"q{i}", rng.randint(1, 90), rng.choice((0, 1)), rng.randint(0, 3))
            legs[one.ticket.id], arrival[one.ticket.id] = one, i
            scheduler.join(one)
        prompts = [x for x in legs.values() if not x.running]
        running = [x for x in legs.values() if x.running]
        expected = {x.ticket.id: 1 for x in running}
        share = max(budget - len(running), 4)
        left = share
        prompts.sort(key=lambda x: (x.ticket.priority, x.ticket.order_key, arrival[x.ticket.id]))
        oldest = min(prompts, key=lambda x: arrival[x.ticket.id], default=None)
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
            expected[x.ticket.id] = min(need, left) if chunked else need
            left -= expected[x.ticket.id]
            first = False
        plan = scheduler.plan({}, 0.0)
        assert (dict(plan.advance) if plan else {}) == expected
        if plan is None:
            continue
        if oldest:
            overtakes = 0 if oldest.ticket.id in expected else overtakes + 1
        last_oldest = oldest
        assert set(plan.reasons) == {x.ticket.id for x in prompts} - set(expected)
        decodes_first = list(plan.advance)[: len(running)]
        assert set(decodes_first) == {x.ticket.id for x in running}
        carry_out(scheduler, legs, plan)
        for ticket_id, one in list(legs.items()):
            if one.n_answer >= 20 or rng.random() < 0.02:
                scheduler.leave(one)
                assert one.reservation is not None
                pages.release(one.reservation)
                del legs[ticket_id]
        pages.check_integrity()


def test_decodes_advance_in_every_step_and_a_long_prompt_too() -> None:
    pages = Pages(4000, 4)
    scheduler = DecodeScheduler(pages, options(12, 8))
    legs = {x.ticket.id: x for x in (leg(pages, f"chat{i}", 3) for i in range(7))}
    for one in legs.values():
        scheduler.join(one)
    while any(not x.running for x in legs.values()):
        plan = scheduler.plan({}, 0.0)
        assert plan is not None
        carry_out(scheduler, legs, plan)
    long_ = leg(pages, "long", 400)
    legs[long_.ticket.id] = long_
    scheduler.join(long_)
    steps = 0
    while not long_.running:
        plan = scheduler.plan({}, 0.0)
        assert plan is not None and plan.n_tokens <= 12
        assert all(plan.advance[TicketId(f"chat{i}")] == 1 for i in range(7))
        assert plan.advance[long_.ticket.id] >= 4
        carry_out(scheduler, legs, plan)
        for i in range(7):  # chats go on for ever in this test
            legs[TicketId(f"chat{i}")].tokens.pop()
            legs[TicketId(f"chat{i}")].computed -= 1
        steps += 1
    assert steps == 80  # 5 tokens beside 7 decodes


@pytest.mark.parametrize("served", [0, 3000])
def test_a_decision_is_fast_and_does_not_grow_with_requests_served(served: int) -> None:
    pages = Pages(40_000, 4)
    scheduler = DecodeScheduler(pages, options(2048, 256, 64))
    for i in range(served):
        one = leg(pages, f"old{i}", 3)
        scheduler.join(one)
        scheduler.leave(one)
        assert one.reservation is not None
        pages.release(one.reservation)
    for i in range(256):
        one = leg(pages, f"run{i}", 30)
        one.computed, one.running = 30, True
        one.tokens.append(1)
        scheduler.join(one)
    waiting = {TicketId(f"wait{i}"): "no place" for i in range(1000)}
    gc.collect()
    times = []
    for _ in range(15):
        began = perf_counter()
        plan = scheduler.plan(dict.fromkeys(waiting, "no place"), 0.0)
        times.append(perf_counter() - began)
        assert plan is not None and len(plan.rows) == 256 and len(plan.reasons) == 1000
    print(f"\ndecision: median {sorted(times)[7] * 1e3:.2f} ms")
    assert min(times) < 0.004  # the target is 1 ms; shared machines are slower at times

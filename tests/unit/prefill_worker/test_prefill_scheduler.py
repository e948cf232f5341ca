"""What a prefill step takes in, against an obvious slow reference, on random traces."""

from __future__ import annotations

import random

import pytest
from unit.prefill_worker.prefill_reference import Trace, options, ticket

from kv_transfer.pages import Pages
from prefill_worker.scheduler import LOOK_AHEAD, PrefillScheduler
from protocol.step import MAX_OVERTAKES
from protocol.types import TicketId


@pytest.mark.parametrize("seed", range(30))
def test_random_traces_equal_the_reference(seed: int) -> None:
    trace = Trace(seed)
    trace.run(60)
    assert trace.slow.hits


@pytest.mark.long
def test_thousands_of_random_traces_equal_the_reference() -> None:
    hits = drops = 0
    for seed in range(1000, 3000):
        trace = Trace(seed)
        trace.run(25)
        hits, drops = hits + trace.slow.hits, drops + trace.slow.drops
    assert hits > 5000 and drops > 500, (hits, drops)


@pytest.mark.parametrize("seed", range(10))
def test_the_oldest_is_in_one_of_any_few_steps(seed: int) -> None:
    """The stated bound, with pages for everybody: urgent traffic without end starves nobody."""
    rng = random.Random(seed)
    pages = Pages(4000, 4)
    scheduler = PrefillScheduler(pages, options(budget=8, seqs=rng.choice((1, 4))))
    waiting = [scheduler.add(ticket(f"old{i}", 100, priority=5)) for i in range(3)]
    without = 0
    for i in range(400):
        waiting.append(scheduler.add(ticket(f"q{i}", rng.randint(1, 16), rng.choice((-1, 0)))))
        plan, _ = scheduler.plan()
        assert plan is not None
        oldest = min((p for p in waiting if p.remaining), key=lambda p: p.arrival)
        without = 0 if oldest.ticket.id in plan.advance else without + 1
        assert without <= MAX_OVERTAKES
        for row in plan.rows:
            (prompt,) = [p for p in waiting if p.ticket.id == row.ticket_id]
            scheduler.advance(prompt, len(row.tokens))
            if prompt.remaining == 0:
                scheduler.forget(prompt)
                waiting.remove(prompt)
                without = 0 if prompt is oldest else without
                if prompt.reservation:
                    pages.release(prompt.reservation)


@pytest.mark.parametrize("seed", range(10))
def test_everyone_finishes_when_everyone_is_granted_in_time(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(20, 4)
    scheduler = PrefillScheduler(pages, options())
    waiting = [scheduler.add(ticket(f"q{i}", rng.randint(1, 80), i % 3)) for i in range(40)]
    for _ in range(2000):
        plan, _dropped = scheduler.plan()
        rows = plan.rows if plan else ()
        for row in rows:
            prompt = next(p for p in waiting if p.ticket.id == row.ticket_id)
            scheduler.advance(prompt, len(row.tokens))
        rng.choice(waiting).granted = True
        for prompt in [p for p in waiting if p.granted and p.remaining == 0]:
            waiting.remove(prompt)
            scheduler.forget(prompt)
            if prompt.reservation:
                pages.release(prompt.reservation)
        if not waiting:
            break
    assert not waiting and pages.available == 20


def test_short_prompts_share_a_step_and_a_long_one_is_cut() -> None:
    scheduler = PrefillScheduler(Pages(40, 4), options(budget=16))
    for i, n in enumerate((3, 5, 60)):
        scheduler.add(ticket(f"q{i}", n, order_key=i))
    plan, _ = scheduler.plan()
    assert plan is not None
    assert list(plan.advance.values()) == [3, 5, 8]
    assert [row.sample is not None for row in plan.rows] == [True, True, False]
    assert [len(row.pages) for row in plan.rows] == [1, 2, 2]


def test_without_chunking_a_long_prompt_is_one_step() -> None:
    scheduler = PrefillScheduler(Pages(40, 4), options(budget=16, chunked=False))
    scheduler.add(ticket("a", 60))
    scheduler.add(ticket("b", 3, order_key=1.0))
    plan, _ = scheduler.plan()
    assert plan is not None and dict(plan.advance) == {TicketId("a"): 60}
    assert TicketId("b") in plan.reasons


def test_a_granted_prompt_takes_the_pages_of_ungranted_work() -> None:
    pages = Pages(4, 4)
    scheduler = PrefillScheduler(pages, options())
    held = scheduler.add(ticket("ungranted", 16, priority=-1))
    plan, _ = scheduler.plan()
    assert plan is not None
    scheduler.advance(held, 16)
    granted = scheduler.add(ticket("granted", 8, priority=5))
    assert scheduler.plan()[0] is None  # both without a grant: first come, first held
    granted.granted = True
    plan, dropped = scheduler.plan()
    assert plan is not None and list(plan.advance) == [granted.ticket.id]
    assert dropped == [held] and held.computed == 0 and held.reservation is None
    assert len(scheduler) == 2  # it waits again, at its old place
    pages.check_integrity()


def test_two_granted_prompts_never_take_from_each_other() -> None:
    pages = Pages(4, 4)
    scheduler = PrefillScheduler(pages, options())
    first = scheduler.add(ticket("first", 16))
    first.granted = True
    plan, _ = scheduler.plan()
    assert plan is not None
    scheduler.advance(first, 16)
    second = scheduler.add(ticket("second", 8, priority=-1))
    second.granted = True
    assert scheduler.plan() == (None, [])
    assert first.reservation is not None


def test_behind_many_without_room_only_a_granted_prompt_is_tried() -> None:
    pages = Pages(8, 4)
    scheduler = PrefillScheduler(pages, options())
    holder = scheduler.add(ticket("holder", 24, priority=-1))
    holder.granted = True
    assert scheduler.plan()[0] is not None  # 6 of 8 pages
    for i in range(LOOK_AHEAD + 1):
        scheduler.add(ticket(f"large{i}", 12))
    small = scheduler.add(ticket("small", 4, priority=1))
    scheduler.advance(holder, 24)
    assert scheduler.plan()[0] is None
    small.granted = True
    plan, _ = scheduler.plan()
    assert plan is not None and list(plan.advance) == [small.ticket.id]
    assert "needs 3 pages, 2 of 8 are free" in plan.reasons[TicketId("large0")]

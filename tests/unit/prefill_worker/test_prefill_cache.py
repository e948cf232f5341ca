"""What a prefill worker finds instead of computing it, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.prefill_worker.prefill_reference import options, ticket

from kv_transfer.pages import Pages
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import PrefillScheduler
from protocol.step import StepPlan
from protocol.types import Ticket


def same(t: Ticket, name: str, n: int, **changes: object) -> Ticket:
    """A ticket with the first ``n`` tokens of another one."""
    return replace(ticket(name, n), tokens=t.tokens[:n], **changes)  # type: ignore[arg-type]


class Bench:
    """One scheduler, run by hand."""

    def __init__(self, total: int = 40, budget: int = 64) -> None:
        self.pages = Pages(total, 4)
        self.scheduler = PrefillScheduler(self.pages, options(budget))
        self.dropped: list[Prompt] = []

    def add(self, t: Ticket, *, granted: bool = False) -> Prompt:
        prompt = self.scheduler.add(t)
        prompt.granted = granted
        return prompt

    def step(self, *prompts: Prompt) -> StepPlan:
        plan, self.dropped = self.scheduler.plan()
        assert plan is not None
        for prompt in prompts:
            if prompt.ticket.id in plan.advance:
                self.scheduler.advance(prompt, plan.advance[prompt.ticket.id])
        return plan

    def end(self, prompt: Prompt) -> None:
        self.scheduler.forget(prompt)
        assert prompt.reservation is not None
        self.pages.release(prompt.reservation)
        prompt.reservation = None
        self.pages.check_integrity()

    def compute(self, t: Ticket) -> None:
        prompt = self.add(t)
        self.step(prompt)
        assert prompt.remaining == 0
        self.end(prompt)


def test_a_second_turn_computes_only_what_is_new() -> None:
    bench = Bench()
    long = ticket("a", 60)
    bench.compute(same(long, "first", 22))
    kept = bench.pages.match(bench.scheduler.add(same(long, "x", 22)).chain.walk(long.tokens, 5))  # type: ignore[union-attr]
    second = bench.add(same(long, "second", 38, priority=-1))
    plan = bench.step(second)
    row = plan.rows[0]
    assert (row.start, len(row.tokens)) == (20, 18)  # the partly filled page is not found
    assert row.pages[:5] == kept and second.cached_tokens == 20 and second.remaining == 0


@pytest.mark.parametrize(("n", "found"), [(3, 0), (4, 0), (5, 4), (16, 12), (17, 16), (18, 16)])
def test_the_last_token_is_always_computed(n: int, found: int) -> None:
    bench = Bench()
    bench.compute(ticket("a", n))
    again = bench.add(same(ticket("a", n), "again", n))
    row = bench.step(again).rows[0]
    assert (row.start, row.start + len(row.tokens)) == (found, n)
    assert row.sample is not None and again.cached_tokens == found


def test_a_prompt_that_is_still_being_computed_is_shared_as_far_as_it_is() -> None:
    bench = Bench(budget=16)
    first = bench.add(ticket("a", 40, priority=1), granted=True)
    bench.step(first)
    second = bench.add(same(first.ticket, "second", 24))
    row = bench.step(first, second).rows[0]
    assert (row.ticket_id, row.start) == (second.ticket.id, 16)
    assert first.reservation and second.reservation
    assert second.reservation.bound[:4] == first.reservation.bound[:4]
    assert bench.pages.bound == 10 + 2 and bench.pages.references == 10 + 6
    bench.end(first)
    assert bench.pages.bound == 6
    bench.end(second)
    assert bench.pages.available == 40


def test_a_dropped_prompt_goes_on_from_what_is_still_cached() -> None:
    bench = Bench(total=10, budget=16)
    ungranted = bench.add(ticket("ungranted", 36))
    bench.step(ungranted)
    bench.step(ungranted)
    assert ungranted.computed == 32
    granted = bench.add(ticket("granted", 20, priority=-1), granted=True)
    plan = bench.step(granted)
    assert bench.dropped == [ungranted] and list(plan.advance) == [granted.ticket.id]
    assert ungranted.computed == 0 and bench.pages.cached == 5  # its tail was evicted
    bench.step(granted)
    bench.end(granted)
    row = bench.step(ungranted).rows[0]
    assert row.start == 20 and ungranted.cached_tokens == 0  # computed for this very ticket


def test_what_another_ticket_computed_meanwhile_counts_as_cached() -> None:
    bench = Bench(total=13, budget=12)
    dropped = bench.add(ticket("a", 36))
    bench.step(dropped)
    assert dropped.computed == 12
    other = bench.add(same(dropped.ticket, "other", 28, priority=-1), granted=True)
    bench.step(other)
    bench.step(other)
    assert other.remaining == 0 and other.cached_tokens == 12
    pushing = bench.add(ticket("pushing", 20, priority=-2), granted=True)
    bench.step(pushing)
    assert bench.dropped == [dropped]
    bench.step(pushing)
    bench.end(pushing)
    assert bench.step(dropped).rows[0].start == 28
    assert dropped.cached_tokens == 16  # 12 to 28 are other's work


def test_ungranted_work_is_not_dropped_for_pages_that_are_shared_with_it() -> None:
    bench = Bench(total=10)
    ungranted = bench.add(ticket("ungranted", 32))
    bench.step(ungranted)
    granted = bench.add(same(ticket("ungranted", 40), "granted", 40), granted=True)
    plan = bench.step(granted)
    assert bench.dropped == [] and plan.rows[0].start == 32  # two new pages are enough
    assert bench.pages.available == 0


def test_logprobs_of_the_prompt_are_computed_but_others_may_find_the_pages() -> None:
    bench = Bench()
    first = ticket("a", 20)
    asks = replace(first, sampling=replace(first.sampling, prompt_logprobs=2))
    bench.compute(asks)
    again = bench.add(same(asks, "again", 20, sampling=asks.sampling))
    row = bench.step(again).rows[0]
    assert (row.start, row.prompt_logprobs, again.cached_tokens) == (0, 2, 0)
    other = bench.add(same(first, "other", 20))
    assert bench.step(other).rows[0].start == 16


def test_tenants_do_not_find_each_other() -> None:
    bench = Bench()
    bench.compute(replace(ticket("a", 20), salt="one"))
    for salt, start in (("two", 0), ("", 0), ("one", 16)):
        other = bench.add(same(ticket("a", 20), f"other{salt}", 20, salt=salt))
        assert bench.step(other).rows[0].start == start


def test_without_a_root_nothing_is_found() -> None:
    pages = Pages(40, 4)
    scheduler = PrefillScheduler(pages, replace(options(), hash_root=b""))
    first = scheduler.add(ticket("a", 16))
    plan, _ = scheduler.plan()
    assert plan is not None
    scheduler.advance(first, 16)
    scheduler.forget(first)
    assert first.reservation is not None
    pages.release(first.reservation)
    assert pages.cached == 0 and pages.available == 40


def test_the_last_row_draws_every_choice() -> None:
    bench = Bench(budget=16)
    prompt = bench.add(replace(ticket("a", 20), n_choices=3))
    first, last = bench.step(prompt).rows[0], bench.step(prompt).rows[0]
    assert first.sample is None and last.sample is not None
    assert last.choices == (0, 1, 2)
    assert last.history == prompt.ticket.tokens and last.n_prompt == 20

"""What a prefill step takes in, against an obvious slow reference, on random traces."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kv_transfer.pages import Pages
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import PrefillScheduler
from protocol.role import RoleOptions
from protocol.step import MAX_OVERTAKES
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("prefill-0", "i", "e")
D = Peer("decode-0", "i", "e")


def options(budget: int = 16, seqs: int = 4, chunked: bool = True) -> RoleOptions:
    return RoleOptions(
        page_bytes=100,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_model_len=1000,
        min_prefill_tokens=4,
        chunked_prefill=chunked,
    )


def ticket(name: str, n: int, priority: int = 0, order_key: float = 0.0) -> Ticket:
    return Ticket(
        TicketId(name),
        ME,
        D,
        tuple(range(n)),
        n,
        SamplingParams(max_tokens=4),
        priority=priority,
        order_key=order_key,
    )


@dataclass
class Slow:
    """The rule, spelled out over a plain list that is sorted for every step."""

    budget: int
    seqs: int
    chunked: bool
    total: int
    prompts: list[dict[str, object]] = field(default_factory=list)
    overtakes: int = 0

    def plan(self) -> dict[str, int]:
        waiting = [p for p in self.prompts if p["left"]]
        order = sorted(waiting, key=lambda p: (p["priority"], p["key"], p["arrival"]))
        oldest = min(waiting, key=lambda p: p["arrival"], default=None)
        aged = oldest if self.overtakes >= MAX_OVERTAKES else None
        if aged:
            order = [aged, *(p for p in order if p is not aged)]
        free = self.total - sum(p["pages"] for p in self.prompts if p["holds"])
        left, plan, shut, shut_all = self.budget, {}, False, False
        for p in order:
            if left <= 0 or len(plan) == self.seqs:
                break
            n = min(p["left"], left) if self.chunked else p["left"]
            if plan and n > left:
                continue
            if not p["holds"]:
                if shut_all or (shut and not p["granted"]):
                    continue
                victims = []
                if p["granted"]:
                    victims = [
                        v
                        for v in self.prompts
                        if v["holds"] and not v["granted"] and v["name"] not in plan
                    ]
                    victims.sort(
                        key=lambda v: (v["priority"], v["key"], v["arrival"]), reverse=True
                    )
                gone, gain = [], 0
                for v in victims:
                    if free + gain >= p["pages"]:
                        break
                    gone.append(v)
                    gain += v["pages"]
                if free + gain < p["pages"]:
                    if p is aged:
                        shut, shut_all = True, bool(p["granted"])
                    continue
                for v in gone:
                    v["holds"], v["left"] = False, v["n"]
                free += gain - p["pages"]
                p["holds"] = True
            plan[p["name"]] = n
            left -= n
        if plan and oldest:
            now_oldest = min((p for p in self.prompts if p["left"]), key=lambda p: p["arrival"])
            if now_oldest is not oldest:
                self.overtakes = 0
            self.overtakes = 0 if now_oldest["name"] in plan else self.overtakes + 1
        return plan

    def advance(self, plan: dict[str, int]) -> None:
        oldest = min((p for p in self.prompts if p["left"]), key=lambda p: p["arrival"])
        for p in self.prompts:
            p["left"] -= plan.get(p["name"], 0)
        if not oldest["left"]:
            self.overtakes = 0


@pytest.mark.parametrize("seed", range(30))
def test_random_traces_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    opts = options(rng.choice((8, 16, 40)), rng.choice((1, 3, 4)), rng.random() < 0.8)
    total = rng.choice((16, 24, 60))
    pages = Pages(total, 4)
    fast = PrefillScheduler(pages, opts)
    slow = Slow(opts.max_num_batched_tokens, opts.max_num_seqs, opts.chunked_prefill, total)
    prompts: dict[str, Prompt] = {}

    def leave(name: str) -> None:
        prompt = prompts.pop(name)
        fast.forget(prompt)
        if prompt.reservation:
            pages.release(prompt.reservation)
        if slow.prompts:
            oldest = min(
                (p for p in slow.prompts if p["left"]), key=lambda p: p["arrival"], default=None
            )
            if oldest and oldest["name"] == name:
                slow.overtakes = 0
        slow.prompts = [p for p in slow.prompts if p["name"] != name]

    for i in range(120):
        if rng.random() < 0.5:
            t = ticket(f"q{i}", rng.randint(1, 60), rng.choice((0, 0, 1)), rng.randint(0, 5))
            prompts[f"q{i}"] = fast.add(t)
            if not any(p["left"] for p in slow.prompts):
                slow.overtakes = 0
            slow.prompts.append(
                {
                    "name": f"q{i}",
                    "n": len(t.tokens),
                    "left": len(t.tokens),
                    "pages": pages.pages_for(len(t.tokens)),
                    "priority": t.priority,
                    "key": t.order_key,
                    "arrival": i,
                    "granted": False,
                    "holds": False,
                }
            )
        for entry in slow.prompts:
            if not entry["granted"] and rng.random() < 0.1:
                entry["granted"] = prompts[str(entry["name"])].granted = True
        plan, _ = fast.plan()
        expected = slow.plan()
        got = {t.request_id: n for t, n in plan.advance.items()} if plan else {}
        assert got == expected
        pages.check_integrity()
        if plan is not None:
            assert len(plan.rows) <= opts.max_num_seqs
            assert plan.n_tokens <= opts.max_num_batched_tokens or (
                not opts.chunked_prefill and len(plan.rows) == 1
            )
            waiting = {p for p in prompts if prompts[p].remaining}
            assert {t.request_id for t in plan.reasons} == waiting - set(got)
            assert all(plan.reasons.values())
            for ticket_id, n in plan.advance.items():
                fast.advance(prompts[ticket_id.request_id], n)
            slow.advance(expected)
        for name, prompt in list(prompts.items()):
            handed_over = prompt.remaining == 0 and prompt.granted and rng.random() < 0.5
            if handed_over or rng.random() < 0.02:
                leave(name)


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

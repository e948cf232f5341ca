"""Pages run out: who gives way, how, and when it comes back; and that nobody starves."""

from __future__ import annotations

import random

import pytest
from unit.decode_worker.decode_bench import (
    Q,
    done,
    home,
    items,
    make,
    open_,
    said,
    step,
    ticket,
)
from unit.decode_worker.decode_traffic import make_options
from unit.decode_worker.decode_world import DecodeWorld

from decode_worker.role import DecodeRole
from decode_worker.sequence import MAX_PREEMPTIONS
from protocol.errors import ErrorInfo
from protocol.events import Count, FromRouter, RouterLost
from protocol.messages import Cancel, Queued, Reserved, Stop
from protocol.step import MAX_OVERTAKES, CopyKind, RowResult, StepPlan, StepResult
from protocol.types import Outcome, SamplingParams, Ticket, TicketId, TokenLogprobs

OLD, MID, NEW = (TicketId(name) for name in ("old", "mid", "new"))
BROKEN = ErrorInfo("INTERNAL", "broken")


def local(id_: TicketId, n: int = 4, max_tokens: int = 12, **changes: object) -> Ticket:
    return ticket(n, id_, sender=None, max_tokens=max_tokens, **changes)


def preempted(effects: list[object]) -> list[str]:
    return [e.label for e in effects if isinstance(e, Count) and e.metric == "preemptions"]


def make_tight(total: int = 4, **changes: object) -> DecodeRole:
    """A pool that two answers outgrow; nothing is kept free for them."""
    return make(total, **{"reserve_tokens": 0, "max_waiting": 99, "page_bytes": 1 << 40, **changes})


def until_away(role: DecodeRole, victim: TicketId, limit: int = 60) -> StepPlan:
    """Run until a plan gives a reason why ``victim`` is away."""
    for _ in range(limit):
        plan = role.plan(0.0)
        assert plan is not None
        if plan.reasons.get(victim, "").startswith("preempted"):
            return plan
        finish(role, plan)
    raise AssertionError(f"{victim} never gave way")


def finish(role: DecodeRole, plan: StepPlan) -> list[object]:
    rows = tuple(RowResult((7,) * len(r.choices) if r.sample else ()) for r in plan.rows)
    return list(role.step_done(StepResult(rows), 0.0))


def test_the_youngest_gives_way_and_comes_back_before_newcomers() -> None:
    role = make_tight()
    open_(role, local(OLD))
    open_(role, local(MID))
    plan = until_away(role, MID)
    assert "preempted: needs 3 pages" in plan.reasons[MID] and list(plan.advance) == [OLD]
    effects = finish(role, plan)
    assert preempted(effects) == ["recompute"]
    (queued,) = said(open_(role, local(NEW, 1)), Queued)
    plan = role.plan(0.0)
    assert isinstance(queued, Queued) and plan is not None
    assert "1 preempted ones come first" in plan.reasons[NEW]
    finish(role, plan)
    order: list[TicketId] = []
    while not role.is_idle():
        plan = role.plan(0.0)
        assert plan is not None
        order += [t for t in plan.advance if t not in order]
        finish(role, plan)
    assert order == [OLD, MID, NEW]
    home(role)


def test_the_lowest_class_gives_way_though_it_is_older() -> None:
    role = make_tight()
    open_(role, local(OLD, priority=1))
    open_(role, local(MID, priority=0))
    assert list(until_away(role, OLD).advance) == [MID]


def test_a_more_urgent_class_is_placed_beside_one_that_is_away_but_only_so_often() -> None:
    role = make_tight(8, max_num_seqs=3)
    open_(role, local(OLD, 12, 18, priority=1))
    open_(role, local(MID, 12, 18, priority=1))
    finish(role, until_away(role, MID))  # OLD has five pages or more; MID needs as many
    placed = 0
    for number in range(MAX_OVERTAKES + 4):
        urgent = local(TicketId(f"u{number}"), 1, 2)
        if said(open_(role, urgent), Reserved):
            placed += 1
            role.handle(FromRouter("r", Cancel(urgent.id, "")), 0.0)
        else:
            role.handle(FromRouter("r", Cancel(urgent.id, "")), 0.0)
    assert placed == MAX_OVERTAKES


def test_what_was_preempted_often_ranks_before_every_class() -> None:
    role = make_tight()
    open_(role, local(OLD, priority=1))
    seq = role._tickets.live(OLD).first  # type: ignore[union-attr]
    for _ in range(MAX_PREEMPTIONS):
        assert seq.rank[0] == 1
        seq.preempted += 1
    open_(role, local(MID, priority=-5))
    assert list(until_away(role, MID).advance) == [OLD]


def test_tokens_and_places_are_kept_over_a_recompute() -> None:
    role = make_tight(4, hash_root=b"root")
    open_(role, local(OLD))
    open_(role, local(MID))
    heard: dict[TicketId, list[int]] = {OLD: [], MID: []}
    drawn = 100
    while not role.is_idle():
        plan = role.plan(0.0)
        assert plan is not None
        rows = []
        for row in plan.rows:
            drawn += 1
            assert row.n_prompt == 4
            assert list(row.history[4:]) == heard[row.ticket_id]
            assert row.token_index == len(heard[row.ticket_id]) or row.sample is None
            rows.append(RowResult((drawn,)) if row.sample else RowResult())
        for item in items(role.step_done(StepResult(tuple(rows)), 0.0)):
            assert item.index == len(heard[item.ticket_id])
            heard[item.ticket_id] += item.token_ids
    assert [len(tokens) for tokens in heard.values()] == [12, 12]
    home(role)


def test_a_cheaper_copy_takes_pages_out_a_step_before_they_are_needed() -> None:
    role = make_tight(4, page_bytes=1, host_pages=4)
    open_(role, local(OLD))
    open_(role, local(MID))
    plan = until_away(role, MID)
    assert [c.kind for c in plan.copies] == [CopyKind.TO_HOST] * 2
    assert len({c.source for c in plan.copies}) == len({c.target for c in plan.copies}) == 2
    assert "2 in host memory" in plan.reasons[MID]
    assert role.load(0.0).free_pages == 0  # its pages are its own until the step has ended
    effects = finish(role, plan)
    assert preempted(effects) == ["offload"] and role.load(0.0).free_pages == 2
    while True:
        plan = role.plan(0.0)
        assert plan is not None
        if plan.copies:
            break
        assert list(plan.advance) == [OLD]  # it never missed a step
        finish(role, plan)
    assert [c.kind for c in plan.copies] == [CopyKind.FROM_HOST] * 2
    (row,) = [r for r in plan.rows if r.ticket_id == MID]
    assert len(row.tokens) == 1 and list(row.pages)[:2] == [c.target for c in plan.copies]
    while not role.is_idle():
        finish(role, plan)
        plan = role.plan(0.0) or plan
    home(role)


def test_a_dear_copy_or_a_full_host_means_recompute() -> None:
    for changes in ({"page_bytes": 1 << 40, "host_pages": 9}, {"page_bytes": 1, "host_pages": 1}):
        role = make_tight(4, **changes)
        open_(role, local(OLD))
        open_(role, local(MID))
        assert preempted(finish(role, until_away(role, MID))) == ["recompute"]


@pytest.mark.parametrize("how", ["cancel", "stop", "deadline", "router", "step fails"])
@pytest.mark.parametrize("when", ["leaving", "away"])
def test_who_is_away_still_ends_and_gives_its_host_pages_back(how: str, when: str) -> None:
    role = make_tight(4, page_bytes=1, host_pages=4)
    open_(role, local(OLD), router="r1")
    open_(role, local(MID, remaining_s=50.0), router="r2")
    plan = until_away(role, MID)
    if when == "away":
        finish(role, plan)
        plan = role.plan(0.0)
        assert plan is not None
    effects: list[object] = []
    if how == "cancel":
        effects += role.handle(FromRouter("r2", Cancel(MID, "gone")), 0.0)
    elif how == "stop":
        effects += role.handle(FromRouter("r2", Stop(MID, 1)), 0.0)
    elif how == "deadline":
        effects += role.tick(50.0)
    elif how == "router":
        effects += role.handle(RouterLost("r2"), 0.0)
    if how == "step fails":
        effects += role.step_failed(BROKEN, 0.0)
        assert [d.ticket_id for d in done(effects)] == [OLD]  # its copy failed, not its answer
        while not role.is_idle():
            plan = role.plan(0.0)
            assert plan is not None
            effects += finish(role, plan)
        assert done(effects)[-1].outcome is Outcome.OK
    else:
        effects += finish(role, plan)
        ended = {
            "cancel": Outcome.CANCELLED,
            "router": Outcome.CANCELLED,
            "stop": Outcome.OK,
            "deadline": Outcome.FAILED,
        }
        assert [(d.ticket_id, d.outcome) for d in done(effects)] == [(MID, ended[how])]
        role.handle(FromRouter("r1", Cancel(OLD, "")), 0.0)
    home(role)
    assert role._memory.host.taken == 0


def test_a_credit_without_an_offer_is_revoked_first_and_keeps_its_place() -> None:
    role = make_tight(6)
    open_(role, local(OLD, 8, 16))
    assert said(open_(role, ticket(10, MID)), Reserved) == [Reserved(MID, 3)]
    open_(role, ticket(10, NEW))
    for _ in range(5):
        effects = step(role)
        assert not preempted(effects)
    assert role.load(0.0).free_pages == 0  # OLD has three, MID is to have three
    step(role)  # one more is needed
    plan = role.plan(0.0)
    assert plan is not None and plan.reasons[MID].startswith("waits for a place")
    effects = finish(role, plan)
    assert not preempted(effects) and role.load(0.0).free_pages == 2
    effects = role.handle(FromRouter("r", Cancel(OLD, "")), 0.0)
    assert said(effects, Reserved) == [Reserved(MID, 3), Reserved(NEW, 3)]


def test_prompts_that_are_being_computed_give_way_too() -> None:
    role = make_tight(6, max_num_batched_tokens=8)
    open_(role, local(OLD, 8, 16))
    step(role)
    open_(role, local(MID, 16, 2))
    plan = until_away(role, MID)
    assert list(plan.advance) == [OLD]


def test_nobody_takes_the_pages_that_a_fork_still_copies() -> None:
    """Rather does a running answer miss one step; in the next plan somebody gives way."""
    role = make_tight(5)
    open_(role, local(OLD))
    for _ in range(4):
        step(role)
    open_(role, local(MID, 6, 6, n_choices=2))
    step(role)  # OLD has filled two pages now, and MID's choices part
    plan = role.plan(0.0)
    assert plan is not None and len(plan.copies) == 1 and list(plan.advance) == [MID]
    assert plan.reasons[OLD].startswith("not one page for its next token")
    finish(role, plan)
    plan = role.plan(0.0)
    assert plan is not None and dict(plan.advance) == {OLD: 1, MID: 1}
    assert preempted(finish(role, plan)) == ["recompute"]


def test_nobody_gives_way_to_a_later_one() -> None:
    """A fork's first choice lacks a page, and only older answers could be preempted."""
    role = make_tight(7)
    open_(role, local(OLD))
    open_(role, local(MID))
    for _ in range(2):
        step(role)
    open_(role, local(NEW, 8, 6, n_choices=2))
    step(role)
    plan = role.plan(0.0)
    assert plan is not None and dict(plan.advance) == {OLD: 1, MID: 1, NEW: 1}
    assert [row.choices for row in plan.rows if row.ticket_id == NEW] == [(1,)]
    assert not preempted(finish(role, plan))


def test_prompt_logprobs_of_a_prompt_that_gave_way_are_gathered_anew() -> None:
    role = make_tight(7, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    open_(role, local(OLD, 8, 16))
    for _ in range(3):
        step(role)
    open_(role, local(MID, 16, sampling=params))
    heard = []
    away = computed = 0
    while not role.is_idle():
        plan = role.plan(0.0)
        assert plan is not None
        away += plan.reasons.get(MID, "").startswith("preempted")
        computed += plan.advance.get(MID, 0)
        rows = []
        for row in plan.rows:
            given = ()
            if row.prompt_logprobs is not None:
                last = row.start + len(row.tokens)
                given = tuple(TokenLogprobs(i, -1.0, 1) for i in range(row.start + 1, last + 1))
                given = given[: 15 - row.start]
            rows.append(RowResult((7,) if row.sample else (), prompt_logprobs=given))
        heard += [
            item
            for item in items(role.step_done(StepResult(tuple(rows)), 0.0))
            if item.ticket_id == MID
        ]
    assert away and computed > 16 + 7  # some of it was computed twice
    assert [one.token_id for one in heard[0].prompt_logprobs] == list(range(1, 16))
    assert not heard[1].prompt_logprobs


def test_urgent_floods_do_not_starve_who_was_preempted() -> None:
    """A steady flood of a higher class, in a pool that two answers outgrow."""
    rng = random.Random(3)
    world = DecodeWorld(3, 12, make_options(reserve_tokens=0, max_num_seqs=4))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    low = local(Q, 6, priority=5, sampling=params, receiver=world.role._me, remaining_s=1e6)
    world.open(low)
    for number in range(400):
        urgent = local(
            TicketId(f"u{number}"),
            rng.randint(1, 8),
            priority=0,
            sampling=SamplingParams(max_tokens=rng.randint(4, 24), ignore_eos=True),
            receiver=world.role._me,
            remaining_s=1e6,
        )
        world.open(urgent)
        while world.records[Q].done is None and world.role.load(0.0).waiting > 6:
            world.turn()
        if world.records[Q].done is not None:
            break
    assert world.records[Q].done is not None, "the flood lasted longer"
    assert number < 200
    world.run(60_000)
    world.check_end()

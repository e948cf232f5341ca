"""The rule by which a worker finds its token budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.worker.budget import BudgetRule, StepTimer, find_budget
from protocol.config import Profile
from protocol.step import StepPlan, StepResult
from protocol.types import Role


def a_rule(role: Role = Role.DECODE, **changes) -> BudgetRule:
    values = {
        "role": role,
        "profile": Profile.CHAT,
        "itl_s": 0.3,
        "max_num_seqs": 32,
        "min_prefill_tokens": 64,
    }
    return BudgetRule(**values | changes)


def per_token(seconds: float, fixed: float = 0.0):
    return lambda decodes, tokens: fixed + seconds * (decodes + tokens)


@given(
    st.floats(1e-5, 0.1),
    st.floats(0, 0.5),
    st.sampled_from(list(Profile)),
    st.integers(1, 300),
    st.booleans(),
)
def test_the_largest_budget_within_the_target_is_taken(
    token_s: float, fixed_s: float, profile: Profile, seqs: int, cuda: bool
) -> None:
    rule = a_rule(profile=profile, max_num_seqs=seqs)
    seconds = per_token(token_s, fixed_s)
    chosen = find_budget(rule, seconds, cuda=cuda)
    preset = rule.preset(cuda=cuda)
    assert rule.floor <= chosen.budget <= preset
    assert chosen.budget >= chosen.max_num_seqs + rule.min_prefill_tokens
    assert 1 <= chosen.max_num_seqs <= seqs
    if profile is Profile.BATCH:
        assert chosen.budget == preset and not chosen.target_missed
        return
    met = seconds(0, chosen.budget) <= rule.itl_s
    assert met != chosen.target_missed
    if chosen.target_missed:
        assert chosen.budget == rule.floor
    elif chosen.budget < preset:
        assert seconds(0, min(preset, 2 * chosen.budget)) > rule.itl_s


def test_a_target_that_decodes_alone_miss_is_said_to_be_missed() -> None:
    chosen = find_budget(a_rule(itl_s=0.05), per_token(0, 0.2), cuda=False)
    assert chosen.target_missed and chosen.budget == a_rule().floor
    assert "slo.itl_ms 50 is missed" in chosen.why and "decodes alone take 200 ms" in chosen.why


@given(st.floats(1e-5, 1e-2), st.floats(0, 0.2))
def test_a_prefill_worker_takes_the_smallest_budget_that_is_nearly_the_fastest(
    token_s: float, fixed_s: float
) -> None:
    rule, tried = a_rule(Role.PREFILL), {}

    def seconds(decodes: int, tokens: int) -> float:
        assert decodes == 0
        tried[tokens] = tokens / (fixed_s + token_s * tokens)
        return fixed_s + token_s * tokens

    chosen = find_budget(rule, seconds, cuda=False)
    best = max(tried.values())
    assert tried[chosen.budget] >= 0.95 * best
    assert all(rate < 0.95 * best for size, rate in tried.items() if size < chosen.budget)


def test_the_search_of_a_slow_prefill_worker_ends_in_time() -> None:
    spent = []

    def seconds(decodes: int, tokens: int) -> float:
        spent.append(0.01 * tokens)
        return 0.01 * tokens

    find_budget(a_rule(Role.PREFILL), seconds, cuda=False)
    assert len(spent) > 1 and sum(2 * s for s in spent) < 12


@pytest.mark.parametrize("pages", [3, 40])
def test_a_timed_step_has_the_shape_that_was_asked_for(pages: int) -> None:
    plans: list[StepPlan] = []

    def run(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return StepResult((), seconds=float(len(plans)))

    timer = StepTimer(run, pages=pages, page_size=16, max_model_len=512)
    assert timer(4, 100) == 1.0
    assert len(plans) == 2 and plans[0].n_tokens == 104
    for row in plans[0].rows:
        end = row.start + len(row.tokens)
        assert len(row.pages) == -(-end // 16) and max(row.pages) < pages and end <= 512
    assert [len(row.tokens) for row in plans[0].rows[:4]] == [1] * 4

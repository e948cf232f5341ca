"""The controller's decisions, one by one and over random histories."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.reconcile import (
    Kind,
    Limits,
    Lose,
    Phase,
    Plan,
    Replace,
    Seen,
    Start,
    Stop,
    Wanted,
    backoff,
    lost,
    reconcile,
    started,
    wanted_members,
)
from protocol.config import ModelConfig, PoolConfig, PoolsConfig, TandemConfig
from protocol.types import Mode

LIMITS = Limits(start_s=100, silent_s=20, young_s=60, backoff_s=1, longest_backoff_s=30, tries=3)
WANT = Wanted("decode-0", Kind.DECODE)


def config(mode: Mode = Mode.DISAGGREGATED, prefill: int = 2, decode: int = 3) -> TandemConfig:
    pools = PoolsConfig(prefill=PoolConfig(replicas=prefill), decode=PoolConfig(replicas=decode))
    return TandemConfig(model=ModelConfig(path="m"), mode=mode, pools=pools)


def ready(at: float = 0.0, **changes: object) -> Seen:
    seen = started("decode-0", Kind.DECODE, at).now_in(Phase.READY, at)
    return replace(seen, **changes)


def plan(seen: Seen | None, now: float) -> Plan:
    return reconcile([WANT], [] if seen is None else [seen], now, LIMITS)


def test_both_pools_and_a_router_are_wanted() -> None:
    ids = [w.member_id for w in wanted_members(config())]
    assert ids == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "router-0"]


def test_colocated_mode_has_no_prefill_pool() -> None:
    kinds = {w.kind for w in wanted_members(config(Mode.COLOCATED))}
    assert kinds == {Kind.DECODE, Kind.ROUTER}


def test_what_is_missing_is_started() -> None:
    assert [type(a) for a in plan(None, 0).actions] == [Start]


def test_what_is_ready_and_reports_is_left_alone() -> None:
    assert plan(ready(heard=95), 100) == Plan(())


def test_what_nobody_wants_is_stopped() -> None:
    actions = reconcile([], [ready()], 0, LIMITS).actions
    assert [(type(a), a.member_id) for a in actions] == [(Stop, "decode-0")]


def test_a_start_that_takes_too_long_is_lost_with_the_phase_it_hangs_in() -> None:
    loading = started("decode-0", Kind.DECODE, 0).now_in(Phase.LOADING, 5)
    assert plan(loading, 100).actions == ()
    assert "loading" in plan(loading, 100).waiting["decode-0"]
    (action,) = plan(loading, 101).actions
    assert isinstance(action, Lose) and "loading" in action.reason


@pytest.mark.parametrize("phase", [Phase.PLACING, Phase.LOADING])
def test_a_member_that_starts_need_not_report(phase: Phase) -> None:
    seen = started("decode-0", Kind.DECODE, 0).now_in(phase, 0)
    assert plan(seen, 99).actions == ()


def test_silence_and_faults_lose_a_ready_member() -> None:
    (silent,) = plan(ready(heard=0), 21).actions
    (faulty,) = plan(ready(heard=21, fault="a step runs for 130 s"), 21).actions
    assert isinstance(silent, Lose) and "no report" in silent.reason
    assert faulty == Lose("decode-0", "a step runs for 130 s")


def test_after_a_long_life_the_successor_comes_at_once() -> None:
    gone = lost(ready(at=0), "killed", 60, LIMITS)
    assert gone.failures == 0
    assert plan(gone, 60).actions == (Replace("decode-0", Kind.DECODE, "killed"),)


def test_who_dies_young_waits_longer_each_time_and_is_given_up() -> None:
    now, seen, waits = 0.0, None, []
    for _ in range(LIMITS.tries):
        seen = lost(started("decode-0", Kind.DECODE, now, seen), "no memory", now, LIMITS)
        since = now
        while not (found := plan(seen, now)).actions and not found.given_up:
            now += 0.25
        waits.append(now - since)
    assert waits[:2] == [1.0, 2.0]
    assert found.given_up == {"decode-0": "failed 3 times in a row: no memory"}
    assert plan(seen, now + 1e6).actions == ()


def test_what_a_repeat_cannot_cure_is_given_up_at_once() -> None:
    start = started("decode-0", Kind.DECODE, 0)
    gone = lost(start, "no such model", 1, LIMITS, hopeless=True)
    assert plan(gone, 1e6) == Plan((), {}, {"decode-0": "no such model"})


def test_a_member_of_another_kind_makes_room_first() -> None:
    other = replace(ready(), kind=Kind.PREFILL)
    (action,) = plan(other, 1).actions
    assert isinstance(action, Lose)
    (after,) = plan(lost(other, action.reason, 1e3, LIMITS), 1e3).actions
    assert after == Replace("decode-0", Kind.DECODE, action.reason)


def test_being_lost_twice_counts_once() -> None:
    once = lost(started("decode-0", Kind.DECODE, 0), "first", 1, LIMITS)
    assert lost(once, "second", 2, LIMITS) is once


def test_backoff_is_bounded() -> None:
    assert backoff(0, LIMITS) == 0
    assert [backoff(n, LIMITS) for n in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]


@given(seed=st.integers(0, 2**32), n=st.integers(1, 5))
def test_over_any_history_the_wanted_members_come_back_or_are_given_up(seed: int, n: int) -> None:
    """Random deaths for a while, then none: everyone ends up ready, or given up with a reason.

    And at no time are there two lives of one member, or a start without a reason.
    """
    rng = random.Random(seed)
    wanted = [Wanted(f"decode-{i}", Kind.DECODE) for i in range(n)]
    members: dict[str, Seen] = {}
    now = 0.0
    for round_ in range(400):
        now += rng.choice([0.1, 1.0, 10.0])
        calm = round_ > 150
        for key, seen in members.items():
            if seen.phase is Phase.LOST:
                continue
            if not calm and rng.random() < 0.1:
                members[key] = lost(seen, "killed", now, LIMITS)
            elif seen.phase is Phase.PLACING:
                members[key] = seen.now_in(Phase.LOADING, now)
            elif seen.phase is Phase.LOADING:
                members[key] = seen.now_in(Phase.READY, now)
            else:
                members[key] = replace(seen, heard=now)
        found = reconcile(wanted, members.values(), now, LIMITS)
        named = [a.member_id for a in found.actions]
        assert len(named) == len(set(named))
        for action in found.actions:
            assert action.reason
            assert not isinstance(action, Stop)
            before = members.get(action.member_id)
            if isinstance(action, Lose):
                assert before is not None and before.phase is not Phase.LOST
                members[action.member_id] = lost(before, action.reason, now, LIMITS)
            else:
                assert before is None or before.phase is Phase.LOST
                members[action.member_id] = started(action.member_id, action.kind, now, before)
    final = reconcile(wanted, members.values(), now, LIMITS)
    for want in wanted:
        is_ready = members[want.member_id].phase is Phase.READY
        assert is_ready != (want.member_id in final.given_up)

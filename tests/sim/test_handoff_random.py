"""Real prefill and decode roles against each other, under random delays and random faults.

The world (``sim.handoff_world``) asserts on the way: one receive per announcement, Done once per
leg, tokens right and in order, no page freed while a link or a step uses it, all pages home.
"""

from __future__ import annotations

import pytest
from sim.handoff_traffic import Chances, Habits
from sim.handoff_world import World

from protocol.types import Outcome

FAULTS = Chances(
    cancel=0.15,
    stop=0.02,
    break_link=0.01,
    dial_fails=0.1,
    corrupt=0.01,
    step_fails=0.003,
    row_fails=0.003,
    router_lost=0.01,
    noise=0.1,
    retry=0.05,
    short_deadline=0.1,
    stall=0.004,
)


def all_but_the_impossible(world: World) -> int:
    """How many were answered; the others could never fit: choices on few pages or places."""
    outcomes = world.check_end()
    refused = [world.routers.failures[r] for r in ("NEVER_FITS", "INVALID_ARGUMENT")]
    assert outcomes[Outcome.OK] + sum(refused) == outcomes.total(), outcomes
    return outcomes[Outcome.OK]


@pytest.mark.parametrize("seed", range(6))
def test_without_faults_every_answer_is_whole(seed: int) -> None:
    world = World(seed, Chances())
    world.traffic(60, 0.05)
    world.run(300)
    assert all_but_the_impossible(world) > 55


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tight", [False, True])
def test_conversations_find_their_pages_on_both_sides_also_under_pressure(
    seed: int, tight: bool
) -> None:
    sizes = {"prefill_pages": 18, "decode_pages": 26} if tight else {}
    habits = Habits(share=0.85, choices=0.2)
    world = World(seed, Chances(noise=0.05), habits, n_prefill=1, n_decode=1, **sizes)
    world.traffic(60, 0.1)
    world.run(600)
    assert all_but_the_impossible(world) > 50
    for worker in world.workers.values():
        assert worker.device.found > 0 and worker.device.evictions > 0, worker.me.worker_id
    assert world.counts["held"] > 0  # pages that were not sent again


@pytest.mark.parametrize("seed", range(4))
def test_tenants_and_prompt_logprobs_share_nothing(seed: int) -> None:
    habits = Habits(share=1.0, prompt_logprobs=1.0)
    world = World(seed, Chances(), habits, n_prefill=1, n_decode=1)
    world.traffic(40, 0.1)
    world.run(300)
    assert all_but_the_impossible(world) > 30
    assert [w.device.found for w in world.workers.values()] == [0, 0]


@pytest.mark.parametrize(
    "sizes",
    [
        {"prefill_pages": 16, "decode_pages": 20},  # barely larger than the largest request
        {"max_num_seqs": 1, "window": 1},
        {"chunked_prefill": 0, "budget": 12},
        {"page_size": 16, "prefill_pages": 6, "decode_pages": 8},
        {"lease_s": 1},  # credits lapse and are taken again
        {"cache": 0},
    ],
)
def test_tight_sizes_still_finish_everything(sizes: dict[str, int]) -> None:
    world = World(7, Chances(noise=0.1), **sizes)
    world.traffic(60, 0.05)
    world.run(600)
    if sizes.get("lease_s") is None:
        assert all_but_the_impossible(world) > 50
    else:
        assert world.check_end()[Outcome.OK] >= 40


@pytest.mark.parametrize("seed", range(8))
def test_random_faults_leave_nothing_behind(seed: int) -> None:
    world = World(seed, FAULTS)
    world.traffic(80, 0.08)
    world.run(2000)
    outcomes = world.check_end()
    assert outcomes[Outcome.OK] > 20, outcomes


@pytest.mark.parametrize("seed", range(4))
def test_stalls_end_by_the_clock_and_leave_nothing_behind(seed: int) -> None:
    world = World(seed, Chances(stall=0.03, noise=0.05), prefill_pages=18, decode_pages=24)
    world.traffic(80, 0.2)
    world.run(2000)
    outcomes = world.check_end()
    assert outcomes[Outcome.OK] > 20, outcomes


@pytest.mark.long
def test_a_hundred_thousand_events() -> None:
    events, seed, ok = 0, 1000, 0
    while events < 100_000:
        world = World(seed, FAULTS, prefill_pages=18 + seed % 9, decode_pages=24 + seed % 17)
        world.traffic(200, 0.05 + 0.02 * (seed % 5))
        world.run(3000)
        ok += world.check_end()[Outcome.OK]
        events += world.events
        seed += 1
    assert ok > 100


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {"prefill_pages": 16, "decode_pages": 20},
        {"max_num_seqs": 1, "window": 1},
        {"page_size": 16, "prefill_pages": 5, "decode_pages": 6},
    ],
)
def test_tight_worlds_never_stand_still(sizes: dict[str, int]) -> None:
    for seed in range(40):
        world = World(seed, Chances(noise=0.1), **sizes)
        world.traffic(50, 0.03)
        world.run(500)
        assert all_but_the_impossible(world) > 35

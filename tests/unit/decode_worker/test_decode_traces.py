"""Random traces through a decode role, against sequences computed alone.

Arrivals, choices, priorities, lengths, shared prefixes, cancels and stops at random, in pools so
small that somebody is preempted all the time. ``decode_world`` checks on the way: every row sees
its own tokens at its own positions, no page with two users is written, the budget holds, whoever
does not advance has a reason, pages add up after every event.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from unit.decode_worker.decode_traffic import make_options, random_ticket
from unit.decode_worker.decode_world import DecodeWorld, Faults

from protocol.types import Outcome

SETTINGS = (
    {},
    {"host_pages": 40},  # copying is cheaper here: everybody who can leaves that way
    {"host_pages": 3},
    {"host_pages": 40, "page_bytes": 10**12},  # and here it is dearer
    {"reserve_tokens": 0},
    {"reserve_tokens": 1000},
    {"chunked_prefill": False},
    {"hash_root": b""},
    {"max_num_seqs": 5, "max_num_batched_tokens": 9},
)


def trace(seed: int, n_tickets: int, faults: Faults | None = None) -> DecodeWorld:
    """One random trace to its end."""
    rng = random.Random(seed)
    settings = SETTINGS[seed % len(SETTINGS)]
    total = rng.choice((16, 18, 24, 40))
    world = DecodeWorld(seed, total, make_options(**settings), faults)
    spacing = rng.choice((0, 1, 4))
    for number in range(n_tickets):
        world.open(random_ticket(rng, number, total))
        for _ in range(rng.randint(0, 2 * spacing)):
            world.turn()
    world.run(60_000)
    return world


def traces(first: int, last: int, faults: Faults | None = None) -> Counter[str]:
    """Many traces; what happened in all of them together."""
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        world = trace(seed, 25, faults)
        outcomes = world.check_end()
        if faults is None:
            assert outcomes == {Outcome.OK: 25}, seed
        counts.update(outcomes)
        counts.update(world.counts)
    return counts


def test_every_request_ends_with_exactly_its_own_tokens() -> None:
    counts = traces(0, 54)
    assert counts["preemptions recompute"] > 200 and counts["preemptions offload"] > 20
    assert counts["within"] > 300 and counts["to_host"] > 100 and counts["from_host"] > 100


FAULTS = Faults(cancel=0.01, stop=0.02, row=0.003, step=0.005)


def test_ends_of_every_kind_leave_nothing_behind() -> None:
    counts = traces(1000, 1036, FAULTS)
    assert counts[Outcome.OK] > 300 and counts[Outcome.FAILED] > 30
    assert counts[Outcome.CANCELLED] > 30 and counts["preemptions recompute"] > 30


@pytest.mark.long
@pytest.mark.parametrize("batch", range(10))
def test_thousands_of_traces(batch: int) -> None:
    traces(2000 + batch * 150, 2150 + batch * 150)
    traces(6000 + batch * 50, 6050 + batch * 50, FAULTS)

"""The prefill scheduler's micro-benchmark measures what it says, on a small scale."""

from __future__ import annotations

from cluster.bench.prefill_decisions import SITUATIONS, decision_times


def test_it_times_decisions_in_every_situation() -> None:
    times = decision_times(waiting=260, served=(0, 5), steps=2)
    assert [(t.situation, t.served) for t in times] == [
        (s.name, n) for s in SITUATIONS for n in (0, 5)
    ]
    assert all(len(t.plan_s) == 2 and t.plan_ms >= 0 for t in times)
    chunks, *others = [t.rows for t in times[::2]]
    assert chunks in (3, 4) and others == [256, 256, 0]

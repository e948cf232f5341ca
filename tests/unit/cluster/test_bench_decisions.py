"""The scheduler's micro-benchmark measures what it says, on a small scale."""

from __future__ import annotations

from cluster.bench.decisions import decision_times, report


def test_it_times_decisions_with_everybody_running_and_waiting() -> None:
    young, old = decision_times(running=6, waiting=20, served=(0, 30), steps=4)
    assert (young.served, old.served) == (0, 30)
    for one in (young, old):
        assert len(one.plan_s) == len(one.done_s) == 4 and min(one.plan_s) > 0
    text = report([young, old])
    assert "6 running, 20 waiting, 30 served before" in text and "medians of 4" in text

"""``tandem bench scheduler``: both roles are at work, and its verdicts follow its figures."""

import json
from functools import partial

import pytest

from cluster.bench import scheduler_bench
from cluster.bench.scheduler_bench import USUAL, Bench, growth
from cluster.cli.bench_scheduler import targets
from cluster.cli.main import run
from protocol.types import Role


def test_json_of_a_short_run(capsys, monkeypatch):
    monkeypatch.setattr(scheduler_bench, "growth", partial(growth, warm=20))
    arguments = ["--running", "8", "--waiting", "20", "--decisions", "12", "--requests", "100"]
    assert run(["bench", "scheduler", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(d["role"], d["running"], d["waiting"]) for d in report["decisions"]] == [
        ("decode", 8, 20),
        ("prefill", 0, 28),
    ]
    for d in report["decisions"]:
        assert 0 < d["p50_ms"] <= d["p99_ms"] and d["step_done_p50_ms"] > 0
    assert [g["requests"] for g in report["growth"]] == [100, 100]
    assert len(report["targets"]) == 4


def test_every_place_is_taken_when_decoding_is_measured():
    bench = Bench(Role.DECODE, 8, 20, n_prompt=USUAL, max_tokens=50)
    bench.fill()
    rows = [bench.step() for _ in range(20)]
    assert rows[-1] == 8 and bench.done == 0


@pytest.mark.parametrize("role", Role)
def test_requests_are_served_and_more_come(role):
    bench = Bench(role, 4, 6, n_prompt=40, max_tokens=3)
    while bench.done < 50:
        bench.fill()
        assert bench.step() > 0
    bench.check()
    served = growth(role, 4, 6, 20, warm=10)
    assert served["first_ms"] > 0 and served["last_ms"] > 0


def test_targets_follow_the_figures():
    slow = {"role": "decode", "p50_ms": 1.5}
    grown = {"role": "prefill", "requests": 10, "ratio": 1.1}
    met = [t["met"] for t in targets({"decisions": [slow], "growth": [grown]})]
    assert met == [False, True]


def test_strict_says_3(capsys, monkeypatch):
    monkeypatch.setattr("cluster.cli.bench_scheduler.DECISION_MS", 0.0)
    arguments = ["--running", "4", "--waiting", "4", "--decisions", "10", "--requests", "0"]
    assert run(["bench", "scheduler", *arguments, "--strict"]) == 3
    out = capsys.readouterr().out
    assert "Missed: decode: p50 of a decision" in out

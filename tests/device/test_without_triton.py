"""A machine without Triton (and, as in every development install, without FlashAttention) serves.

The import of Triton is made to fail in a process of its own; one step of a tiny model then runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_llama

ROOT = Path(__file__).parents[2]
ONE_STEP = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTriton())
import torch
from kernels.model import load_model
from kernels.runner import Runner
from protocol.step import StepRow
from protocol.types import SamplingParams, TicketId
model = load_model(sys.argv[1])
g = model.geometry(16)
runner = Runner(model, torch.zeros(2, g.layers, 2, 16, g.kv_heads, g.head_dim), 16)
greedy = SamplingParams(max_tokens=1)
row = StepRow(TicketId("a"), [5, 6], 0, (0,), greedy, history=[5, 6], n_prompt=2)
(result,) = runner.run([row]).rows
assert result.error is None and len(result.tokens) == 1 and "triton" not in sys.modules
print(runner.attention)
"""


@pytest.mark.long
def test_a_step_runs_and_says_what_was_passed_over(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "passed over: triton: " in done.stdout and "flash: " in done.stdout

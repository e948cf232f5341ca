"""The prepared script for a GPU machine runs here, every line of it, and can say no."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.attn_cpu import CpuAttention

SCRIPT = Path(__file__).with_name("gpu_check.py")


@pytest.mark.long
def test_every_part_runs_on_a_cpu() -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("oracle", "bandwidth", "plain path", "decode steps", "goes", "mixed", "tiles"):
        assert part in done.stdout
    assert "all answers are right" in done.stdout
    assert "FAILED" not in done.stdout and "nan" not in done.stdout
    assert "nanobind" not in done.stderr


class Wrong(CpuAttention):
    """Off by a little, as a kernel that drops a position would be."""

    def attend(self, *args):
        return super().attend(*args) + 1e-3


def test_a_wrong_backend_is_named_and_decides_the_exit_code(capsys, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    gpu_check = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(gpu_check)
    check = gpu_check.Check(torch.device("cpu"), tiny=True, seconds=60)
    check.table(CpuAttention())
    assert not check.failures
    check.table(Wrong())
    assert len(check.failures) == 1 and "cpu: 2 cases" in check.failures[0]
    with check.part("a part that crashes"):
        raise RuntimeError("no such kernel")
    assert "no such kernel" in check.failures[1]
    assert "WRONG" in capsys.readouterr().out

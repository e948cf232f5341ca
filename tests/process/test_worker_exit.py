"""A worker's process ends without a word on its standard error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIFE = """
import torch._dynamo  # as transformers imports it, and with it Triton where that is installed
from pathlib import Path
from kv_echo import EchoModel
from serving import options_of, small_config
from cluster.worker.process import WorkerProcess

worker = WorkerProcess(options_of(small_config(Path("none")))[0], engine=EchoModel().engine)
worker.start()
worker.stop()
"""


@pytest.mark.long
def test_nothing_is_said_at_the_exit_of_a_worker_with_triton_loaded() -> None:
    """What is frozen for the collector while it works is unfrozen for its end: bindings made with
    nanobind (Triton's) otherwise report every type as leaked."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", LIFE],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

"""What a worker's process tells the libraries that compute with threads."""

from __future__ import annotations

import subprocess
import sys

from cluster.worker.thread_environment import COUNTS, prepare_threads


def test_counts_and_waiting_are_set() -> None:
    environment = {"OMP_NUM_THREADS": "64", "HOME": "/"}
    prepare_threads(environment, 2)
    assert {environment[name] for name in COUNTS} == {"2"}
    assert int(environment["GOMP_SPINCOUNT"]) < 10_000
    assert environment["HOME"] == "/"


def test_the_users_own_waiting_is_kept() -> None:
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        environment = dict(own)
        prepare_threads(environment, 1)
        assert {k: v for k, v in environment.items() if k not in COUNTS} == own


def test_it_comes_before_torch() -> None:
    code = "import sys, cluster.worker.thread_environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""A real ``tandem serve`` in a process of its own, for the tests of whole clusters.

Owns the process and its HOME: records and Ray's token of a test never meet a user's. Nothing
that a test started may be left: ``close`` ends the cluster by its record and checks.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.control.processes import ProcessId, alive, identify
from cluster.control.ray_session import family
from cluster.control.records import RayRecord

ROOT = Path(__file__).parents[2]
START_S = 100.0
END_S = 40.0


def environment(home: Path) -> dict[str, str]:
    """What a command of a test sees: its own HOME, no network, nothing of an outer Ray."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "XDG_", "TANDEM"))}
    return kept | {
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }


def tandem(home: Path, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli.main", *arguments],
        cwd=ROOT,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def write_config(folder: Path, model: Path, name: str, **sections: Any) -> Path:
    """A configuration for a tiny model on any free ports."""
    content = {
        "name": name,
        "model": {"path": str(model), "served_name": "tiny", "max_model_len": 256},
        "pools": {
            "prefill": {"max_num_seqs": 8, "max_num_batched_tokens": 128},
            "decode": {"max_num_seqs": 8, "max_num_batched_tokens": 128},
        },
        "kv": {"memory": "8MiB"},
        "router": {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content | sections))  # JSON is YAML
    return file


def processes_of(record: dict[str, Any]) -> list[ProcessId]:
    """Every process of a cluster's own Ray, its actors included."""
    ray = record["ray"]
    known = (ProcessId(**p) for p in ray["processes"])
    return list(
        family(RayRecord(ray["address"], True, ray["mark"], ray["folder"], known)).members()
    )


def title(process: ProcessId) -> str:
    """The command line that a process shows; empty when it is gone."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return ""


def orphans() -> set[ProcessId]:
    """Ray's agents and workers that no raylet keeps, whoever started them."""
    found = set()
    for folder in Path("/proc").iterdir():
        process = identify(int(folder.name)) if folder.name.isdigit() else None
        if process is None or not title(process).startswith("ray::"):
            continue
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            keeper = Path(f"/proc/{parent}/comm").read_text().strip()
        except OSError:
            keeper = ""
        if keeper != "raylet" and alive(process):
            found.add(process)
    return found


class Served:
    """One ``tandem serve --json``."""

    def __init__(self, home: Path, config: Path, more: Sequence[str] = ()) -> None:
        self.home = home
        self.config = config
        self.name = str(json.loads(config.read_text())["name"])
        self.errors: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._steps = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.main", "serve", str(config), "--json", *more],
            cwd=ROOT,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for reader in (self._read_out, self._read_err):
            threading.Thread(target=reader, daemon=True).start()

    def ready(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Wait for the line that says where it answers; fails with what it said instead."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError("not ready: " + "\n".join(self.errors)) from None
        if not line:
            raise AssertionError("ended: " + "\n".join(self.errors))
        found: dict[str, Any] = json.loads(line)
        return found

    def said(self, words: str, timeout_s: float = START_S) -> None:
        """Wait until a line on stderr holds these words."""
        with self._steps:
            assert self._steps.wait_for(
                lambda: any(words in line for line in self.errors), timeout_s
            ), f"never said {words!r}: {self.errors}"

    def record(self) -> dict[str, Any]:
        """What the command left on disk about this cluster."""
        found: dict[str, Any] = json.loads(self.record_file().read_text())
        return found

    def record_file(self) -> Path:
        """Where that is."""
        return self.home / ".local" / "state" / "tandem" / f"{self.name}.json"

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)

    def close(self) -> None:
        """End whatever there still is."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.record_file().exists():
            tandem(self.home, "down", str(self.config))

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._steps:
                self.errors.append(line.rstrip())
                self._steps.notify_all()

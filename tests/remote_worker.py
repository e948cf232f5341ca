"""A worker as a plain process, spoken to over its standard input and output.

This file owns starting such processes and, always, ending them, by their own process ids. It
must never look at how a worker does its work.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.worker.options import WorkerOptions
from protocol.errors import BY_REASON
from protocol.types import KvGeometry, ModelInfo, Peer, Role, WorkerInfo

ROOT = Path(__file__).resolve().parent.parent
START_S = 90.0
WAIT_S = 30.0


def wait_until(true: Callable[[], bool], timeout_s: float = WAIT_S, *, what: str = "") -> None:
    """Wait for something that can only be asked for, ten times a second; fail with ``what``."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or true}")
        time.sleep(0.05)


class RemoteWorker:
    """A worker in a process of its own, spoken to over its standard input and output."""

    def __init__(self, options: WorkerOptions, log: Path | None = None) -> None:
        self.options = options
        self._log = log.open("ab") if log is not None else None
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.worker.main", "--options", options.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._info: WorkerInfo | None = None

    @property
    def info(self) -> WorkerInfo:
        """Who it is; waits until it is ready."""
        if self._info is None:
            self._info = info_from_json(self._answer(START_S))
        return self._info

    def report(self) -> dict[str, Any]:
        """``WorkerReport`` as JSON has it."""
        return self._ask({"do": "report"})

    def warm(self, peers: Sequence[Peer]) -> None:
        """Have links to these; raises the worker's error."""
        self._ask({"do": "warm", "peers": [asdict(peer) for peer in peers]})

    def kill(self) -> None:
        """SIGKILL: it is gone at once."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End it in order (no drain); returns the exit code."""
        if self.process.poll() is None:
            self.thaw()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(WAIT_S)
        if self._log is not None:
            self._log.close()
        return self.process.returncode

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        _ = self.info
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer(WAIT_S)

    def _answer(self, timeout_s: float) -> Any:
        line = self._lines.get(timeout=timeout_s)
        if not line:
            raise AssertionError(
                f"{self.options.worker_id} ended: exit {self.process.wait(WAIT_S)}"
            )
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise BY_REASON[error["reason"]](error["message"])
        return answer["ok"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def info_from_json(values: dict[str, Any]) -> WorkerInfo:
    """The ``WorkerInfo`` that a worker printed."""
    model = values["model"]
    return WorkerInfo(
        **values
        | {
            "role": Role(values["role"]),
            "model": ModelInfo(
                **model
                | {
                    "eos_token_ids": tuple(model["eos_token_ids"]),
                    "geometry": KvGeometry(**model["geometry"]),
                }
            ),
        }
    )


@contextmanager
def worker_processes(
    options: Sequence[WorkerOptions], log: Path | None = None
) -> Iterator[list[RemoteWorker]]:
    """Start all of them at once, wait until all are ready, end all of them. ``log``: a folder."""
    workers: list[RemoteWorker] = []
    try:
        for one in options:
            workers.append(RemoteWorker(one, log / f"{one.worker_id}.log" if log else None))
        for worker in workers:
            _ = worker.info
        yield workers
    finally:
        for worker in workers:
            worker.stop()

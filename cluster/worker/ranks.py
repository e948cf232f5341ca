"""The further ranks of a tensor-parallel worker: child processes that compute what rank 0 says.

This file owns their processes and the pipes to them. A worker that loses a rank is lost as a whole:
this file finds out and says so, once. It must never restart a rank, and never leave one behind: a
rank ends when its pipe does, so also when rank 0 was killed.

They are children of rank 0, on its host, also under Ray: the worker's actor is given the GPUs of
all its ranks. (Ranks must meet in every layer; further than the links within one host this is no
use.) A pipe carries frames, ``length (8 bytes, little endian), bytes``: first the worker's options
as JSON, then one frame per step. Nothing comes back: results meet in the collective operations.

Life: ``start`` -> ``send`` for every step, before rank 0 runs it -> ``close``: pipes end, processes
are waited for, then killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from cluster.worker.options import WorkerOptions
from protocol.errors import Unavailable

_log = logging.getLogger(__name__)

FRAME = struct.Struct("<Q")
_END_S = 5.0  # a rank whose pipe has ended has so long, then it is killed
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class FollowerRanks:
    """Ranks 1 and up of one worker."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-ranks-"))  # readable by this user only
        self.meeting = self._folder / "meeting"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._closing = False

    def start(self, on_lost: Callable[[str], None]) -> None:
        """Start the processes; they load the model and wait. ``on_lost`` hears, in a thread of its
        own, why a rank ended before ``close``."""
        first = self._options.to_json().encode()
        for rank in range(1, self._options.tensor_parallel):
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster.worker.rank_main", str(rank), str(self.meeting)],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno(),
                env=os.environ | dict.fromkeys(_THREAD_VARIABLES, str(self._options.threads)),
            )
            self._processes.append(process)
            watcher = threading.Thread(
                target=self._watch, args=(rank, process, on_lost), daemon=True, name=f"rank {rank}"
            )
            watcher.start()
            self._watchers.append(watcher)
        self.send(first)

    def send(self, frame: bytes) -> None:
        """Hand every rank the same bytes. Raises ``Unavailable`` when one is gone."""
        for rank, process in enumerate(self._processes, 1):
            pipe = process.stdin
            try:
                if pipe is None:
                    raise BrokenPipeError("it has no pipe")
                pipe.write(FRAME.pack(len(frame)) + frame)
                pipe.flush()
            except (OSError, ValueError) as error:  # ValueError: closed by ``close``
                raise Unavailable(
                    f"rank {rank} of {self._options.worker_id} is gone: {error}"
                ) from error

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, rank 1 first."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """End every rank; returns when all processes are gone."""
        self._closing = True
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # it went first
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watcher in self._watchers:
            watcher.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(
        self, rank: int, process: subprocess.Popen[bytes], on_lost: Callable[[str], None]
    ) -> None:
        code = process.wait()
        if self._closing:
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = f"rank {rank} of {self._options.worker_id} ended with {how}"
        _log.error("%s; the worker is lost", reason)
        on_lost(reason)

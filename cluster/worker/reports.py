"""What a worker says about itself when the controller, a test or a person asks.

This file owns the report's shape and how the process counts its own threads, descriptors and
memory. It must never change anything: asking is free of side effects, but for an integrity check
of the page account when no step is running.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from protocol.lifecycle import WorkerState
from protocol.types import WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker at one moment.

    ``healthy``: it made progress or was idle, by its own clock, and met no fault; else
    ``reason`` says what. ``integrity`` is empty while the page account holds. ``peers_out`` and
    ``peers_in`` are Transfer streams, ``links`` the threads that move pages.
    """

    info: WorkerInfo
    state: WorkerState
    healthy: bool
    reason: str
    idle: bool
    load: WorkerLoad
    integrity: str
    links: int
    peers_out: int
    peers_in: int
    routers: int
    threads: int
    fds: int
    rss_bytes: int
    compute_threads: int


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """What this process holds of the operating system's things."""

    threads: int
    fds: int
    rss_bytes: int

    @staticmethod
    def now() -> ProcessCounts:
        """Count them (Python threads; descriptors and resident memory by /proc, else 0)."""
        fds, rss = Path("/proc/self/fd"), Path("/proc/self/statm")
        pages = int(rss.read_text(encoding="ascii").split()[1]) if rss.is_file() else 0
        return ProcessCounts(
            threads=threading.active_count(),
            fds=len(os.listdir(fds)) if fds.is_dir() else 0,
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )

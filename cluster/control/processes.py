"""Processes of this machine by pid *and* start time, and ending exactly the ones that are ours.

This file owns the question "is that still the same process?" and the way a set of processes is
ended: asked first, killed when they do not go. It must never signal a process that it cannot
prove to be the recorded one, nor search for one by its name.

A group of processes that were started together is found again by a *mark*: a variable that was
put into the environment of the first one and is inherited by everything it starts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for good: pids are used again, a pid with its start time is not."""

    pid: int
    started: int  # clock ticks since boot


def can_identify() -> bool:
    """Whether this system tells start times and environments of processes."""
    return (_PROC / "self" / "stat").exists()


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none, or only its remains."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field is a name in brackets that may itself hold blanks and brackets.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], int(fields[19])
    return None if state in "ZX" else ProcessId(pid, started)


def alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process


def command_name(process: ProcessId) -> str:
    """The name of the program that it runs; empty when it is gone."""
    try:
        return (_PROC / str(process.pid) / "comm").read_text().strip()
    except OSError:
        return ""


def marked(name: str, value: str) -> tuple[ProcessId, ...]:
    """Processes of this user, other than this one, whose environment began with name=value."""
    entry = f"{name}={value}".encode()
    found = []
    for folder in _PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        process = identify(int(folder.name))
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if process is not None and entry in environ.split(b"\0"):
            found.append(process)
    return tuple(found)


def end(processes: Iterable[ProcessId], grace_s: float) -> tuple[ProcessId, ...]:
    """Ask these to end, kill what has not after ``grace_s``; returns the ones that ran.

    Blocks until the last one is gone, at most a few seconds longer than ``grace_s``.
    """
    ran = tuple(p for p in processes if alive(p))
    _signal(ran, signal.SIGTERM)
    left = _wait_gone(ran, grace_s)
    _signal(left, signal.SIGKILL)
    _wait_gone(left, 5.0)
    return ran


def _signal(processes: Iterable[ProcessId], number: signal.Signals) -> None:
    for process in processes:
        if alive(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:  # ended since we looked
                continue


def _wait_gone(processes: Iterable[ProcessId], limit_s: float) -> tuple[ProcessId, ...]:
    until = time.monotonic() + limit_s
    left = tuple(p for p in processes if alive(p))
    while left and time.monotonic() < until:
        time.sleep(_POLL_S)
        left = tuple(p for p in left if alive(p))
    return left

"""Processes of this machine by pid *and* start time, and ending exactly the ones that are ours.

This file owns the question "is that still the same process?" and the way a set of processes is
ended: asked first, killed when they do not go. It must never signal a process that it cannot
prove to be the recorded one, nor search for one by its name.

A *family* is what one program started, with all that those started in turn. No single sign finds
all of it: a process that gives itself a title may overwrite the environment it was marked by, and
one whose parent has ended has no parent to be found by. So every sign counts, and a family is
looked for again and again until nobody is left: its members start others while they end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.05
_KILL_S = 5.0  # for a killed process to be gone


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


def end(processes: Iterable[ProcessId], grace_s: float) -> tuple[ProcessId, ...]:
    """Ask these to end, kill what has not after ``grace_s``; returns the ones that ran.

    Blocks until the last one is gone, at most a few seconds longer than ``grace_s``.
    """
    ran = tuple(p for p in processes if alive(p))
    _signal(ran, signal.SIGTERM)
    left = _wait_gone(ran, grace_s)
    _signal(left, signal.SIGKILL)
    _wait_gone(left, _KILL_S)
    return ran


@dataclass(frozen=True, slots=True)
class Family:
    """The signs of processes that were started together; one sign is enough.

    Known by identity; the mark in the environment they began with; a file in their folder that
    they hold open for writing (whoever only looks at a log there is no member); a parent, or a
    parent's parent, that has one of these.
    """

    mark: str  # NAME=value; empty for none
    folder: str  # absolute; empty for none
    known: frozenset[ProcessId] = frozenset()

    def members(self) -> frozenset[ProcessId]:
        """Who belongs to it and runs now. Never this process."""
        parents: dict[ProcessId, int] = {}
        found: set[ProcessId] = set()
        for folder in _PROC.iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            process = identify(int(folder.name))
            if process is None:
                continue
            parents[process] = _parent(process)
            if process in self.known or self._has_mark(folder) or self._writes(folder):
                found.add(process)
        return frozenset(found | _descendants(found, parents))

    def _has_mark(self, process: Path) -> bool:
        try:
            environ = (process / "environ").read_bytes()
        except OSError:  # gone, or another user's
            return False
        return bool(self.mark) and self.mark.encode() in environ.split(b"\0")

    def _writes(self, process: Path) -> bool:
        if not self.folder:
            return False
        try:
            files = list((process / "fd").iterdir())
        except OSError:  # gone, or another user's
            return False
        return any(
            _target(file).startswith(f"{self.folder}/") and _is_written(process, file.name)
            for file in files
        )


def end_family(family: Family, grace_s: float) -> frozenset[ProcessId]:
    """End a family with all who join it meanwhile; returns the ones that ran.

    As ``end``: asked first, killed after ``grace_s``. Blocks until nobody is left, at most a few
    seconds longer than ``grace_s``.
    """
    began = time.monotonic()
    asked: frozenset[ProcessId] = frozenset()
    looks_in_vain = 0  # one is not enough: a child may be born behind the back of a look
    while looks_in_vain < 2 and time.monotonic() < began + grace_s + _KILL_S:
        members = replace(family, known=family.known | asked).members()
        looks_in_vain = 0 if members else looks_in_vain + 1
        if time.monotonic() >= began + grace_s:
            _signal(members, signal.SIGKILL)
        else:
            _signal(members - asked, signal.SIGTERM)
        asked |= members
        time.sleep(_POLL_S)
    return asked


def _parent(process: ProcessId) -> int:
    try:
        stat = (_PROC / str(process.pid) / "stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _descendants(of: set[ProcessId], parents: dict[ProcessId, int]) -> set[ProcessId]:
    found: set[ProcessId] = set()
    born_to = {p.pid: p for p in of}
    while born_to:
        # Nobody is older than its parent: else the parent's pid has changed hands.
        born = {
            p
            for p, parent in parents.items()
            if parent in born_to and p.started >= born_to[parent].started and p not in found
        }
        found |= born
        born_to = {p.pid: p for p in born}
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _is_written(process: Path, descriptor: str) -> bool:
    try:
        lines = (process / "fdinfo" / descriptor).read_text().splitlines()
    except OSError:
        return False
    flags = next((int(x.split()[1], 8) for x in lines if x.startswith("flags:")), os.O_RDONLY)
    return flags & os.O_ACCMODE != os.O_RDONLY


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

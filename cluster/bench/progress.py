"""A cluster's start as a few plain lines, for commands that start several.

Owns how often a start is spoken of: each step once when it is ready, and what is waited for every
few seconds in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.control.readiness import Progress, StepState

_EVERY_S = 5.0


class StartLines:
    """Turns the progress of one start into lines. ``each``: also a line per step that is ready."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        each: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._each = each
        self._clock = clock
        self._spoke_at = clock()
        self._ready: set[str] = set()

    def show(self, progress: Progress) -> None:
        """Take in the state of a start; says something when it is time to."""
        for step in progress.steps:
            if step.state is StepState.READY and step.name not in self._ready:
                self._ready.add(step.name)
                if self._each:
                    self._speak(f"{step.name} is ready {step.detail}".rstrip())
        waiting = [s for s in progress.steps if s.state not in (StepState.READY, StepState.WAITING)]
        if waiting and self._clock() - self._spoke_at >= _EVERY_S:
            self._speak("waiting for " + ", ".join(f"{s.name} ({s.state})" for s in waiting))

    def _speak(self, line: str) -> None:
        self._say(line)
        self._spoke_at = self._clock()

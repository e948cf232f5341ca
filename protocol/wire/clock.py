"""Time, handed in: the real one, and one that tests and the simulator move by hand.

Owns no timers and starts no threads. Instants are monotonic seconds with no meaning outside the
process.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that knows what time it is."""

    def now(self) -> float:
        """Monotonic seconds."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The instant that it was last moved to."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``; time never goes back."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds

    def move_to(self, instant: float) -> None:
        """Move on to ``instant``; an instant that has passed changes nothing."""
        self._now = max(self._now, instant)

"""The bounded queue of requests that wait in the router for a place on a decode worker.

This file owns the order of the queue (priority, then least slack, then arrival) and its bound.
It is pure: instants are handed in. It must never dispatch; ``router.dispatcher`` asks
``next_try`` who may go. Dead work is dropped by whoever learns of it (``remove``); deadlines and
clients that leave are the dispatcher's events.

A request that fits may overtake one that does not, at most ``MAX_OVERTAKEN`` times: then the one
in front gets the next free pages, however long that takes. So small requests flow and large ones
are not starved.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.errors import Overloaded
from protocol.types import Request

MAX_OVERTAKEN = 16
MAX_TRIES = 16  # requests that get no place before a round ends: bounds the work of one round


@dataclass(slots=True, order=True)
class Waiting:
    """One request in the queue. Compared by its place."""

    priority: int
    order_key: float
    serial: int  # order of arrival
    request: Request = field(compare=False)
    arrival: float = field(compare=False)
    overtaken: int = field(default=0, compare=False)


class WaitQueue:
    """Requests that wait, most urgent first."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiting: Waiting, retry_after_s: float) -> None:
        """Take a place. Raises ``Overloaded`` when the queue is full."""
        if len(self._waiting) >= self._max_queued:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already, the most that "
                "router.limits.max_queued allows",
                retry_after_s=retry_after_s,
            )
        insort(self._waiting, waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Give up a place; whether it was held."""
        for i, other in enumerate(self._waiting):
            if other is waiting:
                del self._waiting[i]
                return True
        return False

    def drain(self, try_one: Callable[[Waiting], bool]) -> None:
        """Offer every request its turn, most urgent first.

        ``try_one`` returns True when the request left the queue (dispatched or refused). One
        that stays is overtaken by each later one that leaves, and ends the round when that has
        happened ``MAX_OVERTAKEN`` times. ``try_one`` must not change the queue itself.
        """
        passed: list[Waiting] = []
        for waiting in list(self._waiting):
            if try_one(waiting):
                self.remove(waiting)
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(waiting)
            starved = any(other.overtaken >= MAX_OVERTAKEN for other in passed)
            if starved or len(passed) >= MAX_TRIES:
                return

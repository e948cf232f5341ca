"""One request under way in the router: its answer buffer and everything known about it.

This file owns the hand-over of pieces from the sessions' side to the client's side: a bounded
buffer with exactly one end. It must never decide how a request goes on; ``router.legs`` does.

Life of an ``Answer``: ``push`` for every piece, then ``end`` once with a ``Complete`` or an error
(a second end is ignored: the first one stands); ``pieces`` by one reader, who gets everything
that was pushed before the end, then the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from protocol.errors import TandemError
from protocol.types import Complete, Delta, Request, StageTiming
from router.admission import Waiting
from router.leg_events import Side
from router.leg_state import Legs
from router.policy import Route
from router.text import IncrementalText


class Answer:
    """What the client has not read yet."""

    def __init__(self) -> None:
        self._pieces: deque[Delta] = deque()
        self._end: Complete | TandemError | None = None
        self._changed = asyncio.Event()
        self.n_unread = 0  # tokens

    @property
    def has_ended(self) -> bool:
        """Its end is there, read or not."""
        return self._end is not None

    def push(self, delta: Delta) -> None:
        """Add a piece; dropped after the end."""
        if self._end is None:
            self._pieces.append(delta)
            self.n_unread += len(delta.token_ids)
            self._changed.set()

    def end(self, end: Complete | TandemError) -> bool:
        """Set the end; whether this call did it."""
        if self._end is not None:
            return False
        self._end = end
        self._changed.set()
        return True

    async def pieces(self) -> AsyncGenerator[Delta | Complete, None]:
        """Everything in order; raises the error that the answer ended with."""
        while True:
            while self._pieces:
                delta = self._pieces.popleft()
                self.n_unread -= len(delta.token_ids)
                yield delta
            if self._end is not None:
                if isinstance(self._end, TandemError):
                    raise self._end
                yield self._end
                return
            self._changed.clear()
            await self._changed.wait()


@dataclass(slots=True, eq=False)
class Flight:
    """One request from its admission until both of its legs are over. Instants in seconds."""

    request: Request
    texts: Sequence[IncrementalText]  # one per choice, or none at all
    arrival: float
    waiting: Waiting
    answer: Answer = field(default_factory=Answer)
    legs: Legs | None = None  # None: not dispatched
    route: Route | None = None
    wait_reason: str = ""
    dispatched_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)  # by choice
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def side_of(self, worker_id: str) -> Side | None:
        """Which leg runs on this worker."""
        if self.legs is None:
            return None
        ticket = self.legs.ticket
        if ticket.receiver.worker_id == worker_id:
            return Side.RECEIVER
        if ticket.sender is not None and ticket.sender.worker_id == worker_id:
            return Side.SENDER
        return None

    def start_timer(self, name: str, seconds: float, then: Callable[[Flight], None]) -> None:
        """Call ``then`` with this flight in ``seconds``; replaces a timer of the same name."""
        self.stop_timer(name)
        if not (name == "deadline" and self.answer.has_ended):
            self.timers[name] = asyncio.get_running_loop().call_later(seconds, then, self)

    def stop_timer(self, name: str) -> None:
        """Cancel one timer, if it runs."""
        timer = self.timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def note_token(self, choice: int, now: float) -> None:
        """A token of this choice was delivered."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at[choice] = now

    def stage_timings(self, by_workers: tuple[StageTiming, ...]) -> tuple[StageTiming, ...]:
        """The stages of an answered request, in order; what a worker has not said in time is
        what the router saw of it."""
        queued = StageTiming("queue", "router", self.dispatched_at - self.arrival)
        timings = (queued, *by_workers)
        if self.legs is None or self.first_token_at is None:
            return timings
        if all(timing.stage != "decode" for timing in timings):
            where = self.legs.ticket.receiver.worker_id
            seen = max(self.last_token_at.values()) - self.first_token_at
            timings = (*timings, StageTiming("decode", where, seen))
        return timings

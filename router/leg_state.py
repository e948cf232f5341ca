"""The state of one request over both of its legs, as frozen values.

This file owns what the router knows of a request between two events. It decides nothing: the
transitions are in ``router.legs``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.types import StageTiming, Ticket
from router.choices import Choice, Choices
from router.leg_events import Side


class LegState(StrEnum):
    """One leg as the router knows it. A leg that was never opened is OVER."""

    OPEN = "open"
    ENDING = "ending"  # Cancel or Stop was sent, Done has not come
    OVER = "over"


class Phase(StrEnum):
    """The request as a whole; see the file's head."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    RUNNING = "running"
    JUDGING = "judging"
    SETTLING = "settling"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Legs:
    """The state of one request."""

    ticket: Ticket
    phase: Phase
    sender: LegState
    receiver: LegState
    choices: Choices = (Choice(),)
    cached_tokens: int = 0
    timings: tuple[StageTiming, ...] = ()
    led_here: str = "begin"  # the event that led to this phase

    @property
    def n_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def has_ended(self) -> bool:
        """The client has had its end."""
        return self.phase in (Phase.COMPLETE, Phase.FAILED)

    @property
    def legs_over(self) -> bool:
        """Nothing of this request runs anywhere any more."""
        return self.sender is LegState.OVER and self.receiver is LegState.OVER

    def leg(self, side: Side) -> LegState:
        """The state of one leg."""
        return self.sender if side is Side.SENDER else self.receiver

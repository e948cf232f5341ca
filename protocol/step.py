"""A step as data: what a role plans, what the device runs, what comes back.

A step is a dictionary from ticket to the number of tokens it advances. Chunked prefill, decode
and recompute are one case; only the numbers differ. This file also owns the token budget rule
and the order keys that both worker kinds share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.errors import ErrorInfo
from protocol.types import SamplingParams, TicketId


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence's part of a step, as the device needs it.

    ``tokens`` (at least one) are computed at positions ``start .. start + len(tokens) - 1``;
    ``pages`` cover every position from 0 to the last of them. ``sample`` set means: draw the
    token that follows the last one; it will have index ``token_index`` within the answer.
    """

    ticket_id: TicketId
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SamplingParams | None = None
    token_index: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``advance`` is in running order; ``reasons`` says why others were passed over."""

    advance: Mapping[TicketId, int]
    rows: tuple[StepRow, ...]
    reasons: Mapping[TicketId, str] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.advance.values())


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: for every row that sampled, one token per choice.

    ``failed`` names rows whose logits were not finite; they have no entry in ``tokens``.
    """

    tokens: Mapping[TicketId, tuple[int, ...]]
    failed: Mapping[TicketId, ErrorInfo] = field(default_factory=dict)
    seconds: float = 0.0

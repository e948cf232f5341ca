"""What happens to a request's legs, and what is then to be done: the words of ``router.legs``.

This file owns the events and effects of one request as frozen dataclasses. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.errors import ErrorInfo
from protocol.messages import TokenItem
from protocol.types import FinishReason, Outcome, StageTiming, TokenLogprobs


class Side(StrEnum):
    """The two legs of a request."""

    SENDER = "sender"
    RECEIVER = "receiver"


# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReceiverQueued:
    """The receiver has no credit for it (yet, or any more)."""


@dataclass(frozen=True, slots=True)
class ReceiverReserved:
    """The receiver holds a credit."""


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """The receiver's next tokens."""

    item: TokenItem


@dataclass(frozen=True, slots=True)
class StopMatched:
    """A stop string is complete: ``n_tokens`` tokens belong to this choice."""

    stop: str
    n_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TextDone:
    """The text of a choice's last token was looked at and no stop string ended it."""

    choice: int = 0


@dataclass(frozen=True, slots=True)
class LegDone:
    """A worker says that its leg is over."""

    side: Side
    outcome: Outcome
    timings: tuple[StageTiming, ...] = ()
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class SenderWasLost:
    """The receiver lost its sender before the commit."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session with a leg's worker is gone: the leg is over, whatever it did."""

    side: Side
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's own deadline, ``seconds`` after its arrival."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReaderStuck:
    """The client lags ``n_tokens`` behind."""

    n_tokens: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The router itself cannot go on with this request: it shuts down, or it has a bug."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class SettleDue:
    """The short timer of ``Settle`` ran out."""


@dataclass(frozen=True, slots=True)
class LingerOver:
    """An ended request's legs have had long enough to say Done."""


Event = (
    ReceiverQueued
    | ReceiverReserved
    | TokensArrived
    | StopMatched
    | TextDone
    | LegDone
    | SenderWasLost
    | WorkerLost
    | ClientGone
    | DeadlinePassed
    | ReaderStuck
    | Broken
    | SettleDue
    | LingerOver
)

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenLeg:
    """Send Open to this leg's worker."""

    side: Side


@dataclass(frozen=True, slots=True)
class CancelLeg:
    """Send Cancel to this leg's worker."""

    side: Side
    cause: str


@dataclass(frozen=True, slots=True)
class StopReceiver:
    """Send Stop: tokens of this choice from ``index`` on are dropped."""

    index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give these tokens to the text layer and on to the client.

    The text layer answers with ``StopMatched`` when a stop string is complete; otherwise, when
    they are the choice's last, with ``TextDone``. Always the last effect of its list.
    """

    index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def last(self) -> bool:
        """No token of this choice follows."""
        return self.finish is not None


@dataclass(frozen=True, slots=True)
class Settle:
    """Start the short timer that ends in ``SettleDue``."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The client's end: success. ``n_tokens`` counts all choices, the reason is the first's."""

    reason: FinishReason
    n_tokens: int
    matched_stop: str | None
    timings: tuple[StageTiming, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """The client's end: failure."""

    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Release:
    """This leg is over: take it off the ledger."""

    side: Side


@dataclass(frozen=True, slots=True)
class Count:
    """Raise the counter of this name."""

    name: str


Effect = OpenLeg | CancelLeg | StopReceiver | Deliver | Settle | Finish | Fail | Release | Count

"""Every message of the Session and Transfer channels, as frozen dataclasses.

This file owns the vocabulary of the hand-off: what a router says to a worker, what a worker says
back, what a sending worker says to a receiving one and the other way. It knows no encoding:
``protocol.wire.convert`` turns these into protobuf and back.

A Session is opened by a router, one per router and worker; a Transfer by the sending worker, one
per ordered pair of workers. Both are ordered streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ErrorInfo
from protocol.types import (
    FinishReason,
    KvGeometry,
    Outcome,
    StageTiming,
    Ticket,
    TicketId,
    TokenLogprobs,
    WorkerLoad,
)

# --- Session, router to worker -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Start one leg of a ticket. The worker finds its role in the ticket's peers."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Stop:
    """The router matched a stop string: end this choice; tokens from ``index`` on are dropped."""

    ticket_id: TicketId
    index: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this leg now; its pages return as soon as nothing can touch them."""

    ticket_id: TicketId
    cause: str


@dataclass(frozen=True, slots=True)
class RouterHeartbeat:
    """The router lives. Sent every ``heartbeat_s``."""


# --- Session, worker to router -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Queued:
    """The receiver cannot reserve pages for this ticket yet; it waits its turn."""

    ticket_id: TicketId
    ahead: int  # tickets before it
    reason: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """The receiver holds ``pages`` pages for this ticket's prompt and choices; the answer grows."""

    ticket_id: TicketId
    pages: int


@dataclass(slots=True, unsafe_hash=True)
class TokenItem:
    """New tokens of one choice. ``index`` is the sequence number of the first, from 0. Never
    changed once it is made (see ``StepRow`` for why it is not frozen).

    ``finish_reason`` is set on the choice's last item only. ``logprobs`` has one entry per token
    if the request asked for them. The first item of each choice also carries ``cached_tokens``,
    the prompt tokens that nobody computed for this ticket, and ``prompt_logprobs``, if asked for,
    one per prompt token from the second on.
    """

    ticket_id: TicketId
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens that one step made for one router: one message per step."""

    items: tuple[TokenItem, ...]


@dataclass(frozen=True, slots=True)
class SenderLost:
    """The receiver lost its sender before the commit: the hand-off cannot complete."""

    ticket_id: TicketId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Done:
    """This leg is over on this worker. ``error`` is set exactly when ``outcome`` is FAILED."""

    ticket_id: TicketId
    outcome: Outcome
    timings: tuple[StageTiming, ...] = ()
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class WorkerHeartbeat:
    """The worker's load by its own clock. Sent every ``heartbeat_s``."""

    worker_id: str
    incarnation: str
    load: WorkerLoad


# --- Transfer, sender to receiver --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a Transfer stream, and the receiver's answer to it.

    Both sides must agree on everything but the ids, or the stream is refused with both values.
    """

    worker_id: str
    incarnation: str
    endpoint: str
    fingerprint: str
    geometry: KvGeometry
    wire_dtype: str
    protocol_version: int
    link_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """The sender has this ticket and will send its pages once granted."""

    ticket_id: TicketId
    n_tokens: int
    predicted_start_s: float


@dataclass(frozen=True, slots=True)
class Announce:
    """One segment is about to cross the link. Announcements and link sends have one order.

    Every announcement is followed by exactly one send of ``n_bytes`` on the link, and the
    receiver makes exactly one receive for it: into pages, or into a sink when the ticket is
    unknown, fenced or aborted. ``first_page`` counts from the start of the sequence.
    """

    ticket_id: TicketId
    segment: int
    first_page: int
    n_pages: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything is sent. The receiver seals only when counts and checksums agree.

    ``first_tokens`` holds one token per choice, ``logprobs`` as many if they were asked for;
    ``checksums`` one per segment, of the wire bytes. ``cached_tokens`` and ``prompt_logprobs``:
    see ``TokenItem``.
    """

    ticket_id: TicketId
    first_tokens: tuple[int, ...]
    n_pages: int
    n_bytes: int
    checksums: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """This transfer is over, both ways. What was announced is still drained."""

    ticket_id: TicketId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class TransferHeartbeat:
    """The transfers that this side still works on. Sent every ``heartbeat_s``, both ways."""

    live: tuple[TicketId, ...] = ()


# --- Transfer, receiver to sender --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """A credit of ``pages``; the receiver already holds ``prefix_tokens`` leading tokens.

    ``window`` is how many segments may be announced and not yet received.
    """

    ticket_id: TicketId
    pages: int
    window: int
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """``segments`` more segments of this ticket may be announced."""

    ticket_id: TicketId
    segments: int


@dataclass(frozen=True, slots=True)
class Sealed:
    """The receiver owns the sequence now; the sender's pages are free to go."""

    ticket_id: TicketId


RouterToWorker = Open | Stop | Cancel | RouterHeartbeat
WorkerToRouter = Queued | Reserved | Tokens | SenderLost | Done | WorkerHeartbeat
SenderToReceiver = Hello | Offer | Announce | Commit | Abort | TransferHeartbeat
ReceiverToSender = Hello | Grant | Window | Sealed | Abort | TransferHeartbeat

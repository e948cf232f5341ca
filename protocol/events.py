"""What goes into a role and what comes out of it, inside one worker process.

A role (prefill or decode) is a pure object: the worker's runtime feeds it the events of this
file together with the instant they happened, and carries out the effects it answers with, in the
order it gave them. Messages of other processes arrive wrapped in ``FromRouter`` or ``FromPeer``.

One order matters above all: a ``SendPages`` or ``ReceivePages`` effect joins its link's queue at
the moment it is carried out, and the runtime carries out effects under one lock. So the order of
announcements on the Transfer stream is the order of bytes on the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ErrorInfo
from protocol.messages import (
    ReceiverToSender,
    RouterToWorker,
    SenderToReceiver,
    WorkerToRouter,
)
from protocol.types import PageRef, Peer, TicketId

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A Session message of a router."""

    router_id: str
    message: RouterToWorker


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's Session ended; nobody reads its requests' tokens any more."""

    router_id: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A Transfer message of another worker (its Hello is the runtime's business)."""

    worker_id: str
    message: SenderToReceiver | ReceiverToSender


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The Transfer stream to or from a worker ended, or it could not be dialled or agreed with.

    No ``FromPeer`` of that incarnation follows. Link operations still outstanding with it are
    reported by ``LinkBroken``.
    """

    worker_id: str
    error: ErrorInfo
    outgoing: bool  # True: the stream on which this worker sends


@dataclass(frozen=True, slots=True)
class SegmentSent:
    """The link no longer reads these pages. ``checksum`` covers the wire bytes."""

    worker_id: str
    ticket_id: TicketId
    segment: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SegmentReceived:
    """The link has written this segment (into pages or sink) and touches them no more."""

    worker_id: str
    ticket_id: TicketId
    segment: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SegmentStale:
    """A page of this segment changed its generation under the reader: the bytes are not to be
    used. The wire stays in order (something of the right length was sent)."""

    worker_id: str
    ticket_id: TicketId
    segment: int


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The link to (``outgoing``) or from a worker failed and is closed.

    Every operation queued or running on it has ended: nothing touches its pages any more, and no
    ``SegmentSent`` or ``SegmentReceived`` for them follows.
    """

    worker_id: str
    error: ErrorInfo
    outgoing: bool


Event = (
    FromRouter
    | RouterLost
    | FromPeer
    | PeerLost
    | SegmentSent
    | SegmentReceived
    | SegmentStale
    | LinkBroken
)

# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToRouter:
    """Say this on a router's Session; dropped when that router is gone."""

    router_id: str
    message: WorkerToRouter


@dataclass(frozen=True, slots=True)
class ToReceiver:
    """Say this on the Transfer stream that this worker opened to ``peer`` (dialled if need be)."""

    peer: Peer
    message: SenderToReceiver


@dataclass(frozen=True, slots=True)
class ToSender:
    """Say this on the Transfer stream that ``worker_id`` opened to this worker."""

    worker_id: str
    message: ReceiverToSender


@dataclass(frozen=True, slots=True)
class SendPages:
    """Queue one segment on the outgoing link. Pages are read until ``SegmentSent``.

    The link checks every generation before and after it reads.
    """

    worker_id: str
    ticket_id: TicketId
    segment: int
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class ReceivePages:
    """Queue one receive on the incoming link. ``pages`` None: into a sink of ``n_bytes``."""

    worker_id: str
    ticket_id: TicketId
    segment: int
    n_bytes: int
    pages: tuple[PageRef, ...] | None


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Close a link whose operations are overdue; ``LinkBroken`` follows."""

    worker_id: str
    outgoing: bool
    cause: str


@dataclass(frozen=True, slots=True)
class Count:
    """Raise a counter of ``protocol.wire.telemetry`` by ``amount``."""

    metric: str
    label: str = ""
    amount: int = 1


Effect = ToRouter | ToReceiver | ToSender | SendPages | ReceivePages | BreakLink | Count

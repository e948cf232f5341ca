"""The states of a worker and of the two ends of a hand-off, as tables.

This file owns the names. A pair of (state, event) that is not in its table is a bug of ours and
raises ``InternalError``: events from outside are judged by the roles before they reach a table.
The transitions of a whole request, over both legs, are the router's (``router/legs.py``).

The life of a request::

    client        router                 D (receiver)                P (sender)
      | request     |                        |                           |
      |------------>| Open(ticket) --------->| reserving                 | queued
      |             | Open(ticket) --------------------------------------> |
      |             |                        |<-- Offer ---------------- |
      |             |<-- Queued / Reserved --| credit                    | prefilling
      |             |                        |--- Grant ---------------> |
      |             |                        |<-- Announce, pages ------ | sending(k of n)
      |             |                        |--- Window --------------> |   while it computes
      |             |                        |<-- Commit(token 0) ------ | committed
      |             |                        | counts, generations and   |
      |             |                        | checksums agree           |
      |             |                        |--- Sealed --------------> | done
      |<-- token 0 -|<-- Tokens -------------| running                   |
      |             |<------------------------------------- Done(OK) --- |
      |<-- tokens --|<-- Tokens, each step --|
      |             |<-- Done(OK) -----------| done

    A failure on either leg: Abort to the other end, Done(FAILED) to the router; pages return
    when no link operation and no running step touches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from protocol.errors import InternalError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def follow(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The state after ``event``; ``InternalError`` if the table does not have the pair."""
    try:
        return table[state, event]
    except KeyError:
        kind = type(state).__name__
        raise InternalError(f"{kind} {state} cannot take {type(event).__name__} {event}") from None


class WorkerState(StrEnum):
    """What a worker process is doing as a whole."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class WorkerEvent(StrEnum):
    """What changes a worker's state."""

    LOADED = "loaded"
    DRAIN = "drain"
    DRAINED = "drained"
    STOP = "stop"
    DIED = "died"


WORKER_TABLE: Mapping[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (WorkerState.STARTING, WorkerEvent.LOADED): WorkerState.READY,
    (WorkerState.STARTING, WorkerEvent.STOP): WorkerState.STOPPED,
    (WorkerState.READY, WorkerEvent.DRAIN): WorkerState.DRAINING,
    (WorkerState.READY, WorkerEvent.STOP): WorkerState.STOPPED,
    (WorkerState.DRAINING, WorkerEvent.DRAINED): WorkerState.STOPPED,
    (WorkerState.DRAINING, WorkerEvent.STOP): WorkerState.STOPPED,
    (WorkerState.STARTING, WorkerEvent.DIED): WorkerState.LOST,
    (WorkerState.READY, WorkerEvent.DIED): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerEvent.DIED): WorkerState.LOST,
}


class SendState(StrEnum):
    """The sending end of a hand-off."""

    OFFERED = "offered"  # computing, not granted: droppable
    SENDING = "sending"
    COMMITTED = "committed"
    SEALED = "sealed"
    ABORTED = "aborted"


class SendEvent(StrEnum):
    """What changes the sending end."""

    GRANT = "grant"
    COMMIT = "commit"
    SEAL = "seal"
    ABORT = "abort"


SEND_TABLE: Mapping[tuple[SendState, SendEvent], SendState] = {
    (SendState.OFFERED, SendEvent.GRANT): SendState.SENDING,
    (SendState.SENDING, SendEvent.COMMIT): SendState.COMMITTED,
    (SendState.COMMITTED, SendEvent.SEAL): SendState.SEALED,
    (SendState.OFFERED, SendEvent.ABORT): SendState.ABORTED,
    (SendState.SENDING, SendEvent.ABORT): SendState.ABORTED,
    (SendState.COMMITTED, SendEvent.ABORT): SendState.ABORTED,
}


class ReceiveState(StrEnum):
    """The receiving end of a hand-off."""

    RESERVING = "reserving"  # no credit yet
    RESERVED = "reserved"  # a credit, and no offer yet
    GRANTED = "granted"  # credit and offer met; nothing announced yet
    LAPSED = "lapsed"  # the credit went unused for too long and returned to the pool
    RECEIVING = "receiving"
    COMMITTED = "committed"  # the sender said all; receives may still be running
    SEALED = "sealed"
    ABORTED = "aborted"


class ReceiveEvent(StrEnum):
    """What changes the receiving end."""

    CREDIT = "credit"
    GRANT = "grant"
    LAPSE = "lapse"
    REQUEUE = "requeue"
    ANNOUNCE = "announce"
    COMMIT = "commit"
    SEAL = "seal"
    ABORT = "abort"


RECEIVE_TABLE: Mapping[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (ReceiveState.RESERVING, ReceiveEvent.CREDIT): ReceiveState.RESERVED,
    (ReceiveState.RESERVED, ReceiveEvent.GRANT): ReceiveState.GRANTED,
    (ReceiveState.RESERVED, ReceiveEvent.LAPSE): ReceiveState.LAPSED,
    (ReceiveState.GRANTED, ReceiveEvent.LAPSE): ReceiveState.LAPSED,
    (ReceiveState.LAPSED, ReceiveEvent.REQUEUE): ReceiveState.RESERVING,
    (ReceiveState.LAPSED, ReceiveEvent.GRANT): ReceiveState.GRANTED,
    (ReceiveState.GRANTED, ReceiveEvent.ANNOUNCE): ReceiveState.RECEIVING,
    (ReceiveState.GRANTED, ReceiveEvent.COMMIT): ReceiveState.COMMITTED,  # all was here already
    (ReceiveState.RECEIVING, ReceiveEvent.ANNOUNCE): ReceiveState.RECEIVING,
    (ReceiveState.RECEIVING, ReceiveEvent.COMMIT): ReceiveState.COMMITTED,
    (ReceiveState.COMMITTED, ReceiveEvent.SEAL): ReceiveState.SEALED,
    **{
        (state, ReceiveEvent.ABORT): ReceiveState.ABORTED
        for state in ReceiveState
        if state not in (ReceiveState.SEALED, ReceiveState.ABORTED)
    },
}

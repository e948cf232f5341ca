"""The parts that wire messages share: ids, peers, failures, timings, loads.

Owns the protobuf form of every small value that more than one message carries, and the checks
that every decoder uses (``need``, ``known``, ``number``). Rules and errors as in ``convert``,
which is built on this file; tickets are in ``convert_ticket``, tokens in ``convert_tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from protocol.errors import ErrorInfo, MalformedFrame
from protocol.types import (
    FinishReason,
    Outcome,
    Peer,
    Role,
    StageTiming,
    TicketId,
    WorkerLoad,
)
from protocol.wire import common_pb2 as c
from protocol.wire import session_pb2 as s

FINISH_TO_WIRE = {
    FinishReason.STOP: c.FINISH_REASON_STOP,
    FinishReason.LENGTH: c.FINISH_REASON_LENGTH,
}
FINISH_FROM_WIRE = {number: reason for reason, number in FINISH_TO_WIRE.items()}
ROLE_TO_WIRE = {Role.PREFILL: c.ROLE_PREFILL, Role.DECODE: c.ROLE_DECODE}
ROLE_FROM_WIRE = {number: role for role, number in ROLE_TO_WIRE.items()}
OUTCOME_TO_WIRE = {
    Outcome.OK: s.OUTCOME_OK,
    Outcome.FAILED: s.OUTCOME_FAILED,
    Outcome.CANCELLED: s.OUTCOME_CANCELLED,
}
OUTCOME_FROM_WIRE = {number: outcome for outcome, number in OUTCOME_TO_WIRE.items()}


# --- parts -------------------------------------------------------------------------------------


def need(message: Any, field: str) -> Any:
    """The sub-message ``field``; ``MalformedFrame`` when it is not there."""
    if not message.HasField(field):
        raise MalformedFrame(f"{type(message).__name__} without {field}", field=field)
    return getattr(message, field)


def known(table: Mapping[Any, Any], number: int, field: str) -> Any:
    """The meaning of an enum's number; ``MalformedFrame`` when it has none."""
    if number not in table:
        raise MalformedFrame(f"{field} {number} is unknown", field=field)
    return table[number]


def number(value: Any, field: str) -> Any:
    """A number that can be compared; ``MalformedFrame`` for NaN."""
    if math.isnan(value):
        raise MalformedFrame(f"{field} is not a number", field=field)
    return value


def encode_ticket_id(value: TicketId) -> c.TicketId:
    """One attempt's key."""
    return c.TicketId(request_id=value.request_id, attempt=value.attempt)


def decode_ticket_id(message: c.TicketId) -> TicketId:
    """One attempt's key; needs a request id and an attempt from 1."""
    return ticket_id(message.request_id, message.attempt)


def ticket_id(request_id: str, attempt: int) -> TicketId:
    """One attempt's key of its two parts."""
    if not request_id or attempt < 1:
        raise MalformedFrame("a ticket id needs a request id and an attempt", field="ticket_id")
    return TicketId(request_id, attempt)


def encode_failure(value: ErrorInfo) -> c.Failure:
    """A failure as a message carries it."""
    return c.Failure(
        reason=value.reason,
        message=value.message,
        field=value.field,
        retry_after_s=value.retry_after_s,
    )


def decode_failure(message: c.Failure) -> ErrorInfo:
    """A failure as a message carries it."""
    return ErrorInfo(
        message.reason,
        message.message,
        message.field if message.HasField("field") else None,
        (
            number(message.retry_after_s, "retry_after_s")
            if message.HasField("retry_after_s")
            else None
        ),
    )


def encode_timings(values: tuple[StageTiming, ...]) -> list[c.StageTiming]:
    """Stage timings in their order."""
    return [c.StageTiming(stage=v.stage, worker_id=v.worker_id, seconds=v.seconds) for v in values]


def decode_timings(messages: Any) -> tuple[StageTiming, ...]:
    """Stage timings in their order."""
    return tuple(StageTiming(v.stage, v.worker_id, number(v.seconds, "seconds")) for v in messages)


_LOAD_FIELDS = tuple(WorkerLoad.__dataclass_fields__)


def encode_load(value: WorkerLoad) -> c.WorkerLoad:
    """A worker's load."""
    return c.WorkerLoad(**{name: getattr(value, name) for name in _LOAD_FIELDS})


def decode_load(message: c.WorkerLoad) -> WorkerLoad:
    """A worker's load."""
    return WorkerLoad(**{name: number(getattr(message, name), name) for name in _LOAD_FIELDS})


def encode_peer(value: Peer | None) -> c.Peer | None:
    """A worker's address, or nothing."""
    if value is None:
        return None
    return c.Peer(worker_id=value.worker_id, incarnation=value.incarnation, endpoint=value.endpoint)


def decode_peer(message: c.Peer) -> Peer:
    """A worker's address."""
    return Peer(message.worker_id, message.incarnation, message.endpoint)

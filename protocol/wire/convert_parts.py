"""The parts that wire messages share: ids, failures, loads, tickets, token batches.

Owns the protobuf form of every value that more than one message carries, and the two checks that
every decoder uses (``need``, ``known``). Rules and errors as in ``convert``, which is built on
this file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from protocol import messages as m
from protocol.errors import ErrorInfo, MalformedFrame
from protocol.types import (
    FinishReason,
    Outcome,
    Peer,
    Role,
    SamplingParams,
    StageTiming,
    Ticket,
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
    return _ticket_id(message.request_id, message.attempt)


def _ticket_id(request_id: str, attempt: int) -> TicketId:
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


def _encode_peer(value: Peer | None) -> c.Peer | None:
    if value is None:
        return None
    return c.Peer(worker_id=value.worker_id, incarnation=value.incarnation, endpoint=value.endpoint)


def _decode_peer(message: c.Peer) -> Peer:
    return Peer(message.worker_id, message.incarnation, message.endpoint)


# --- tickets and tokens ------------------------------------------------------------------------


def encode_ticket(value: Ticket) -> s.Ticket:
    """One attempt at one request."""
    sampling = value.sampling
    return s.Ticket(
        id=encode_ticket_id(value.id),
        sender=_encode_peer(value.sender),
        receiver=_encode_peer(value.receiver),
        tokens=value.tokens,
        n_prompt=value.n_prompt,
        sampling=s.Sampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
        n_delivered=value.n_delivered,
        n_choices=value.n_choices,
        priority=value.priority,
        order_key=value.order_key,
        ttft_target_s=value.ttft_target_s,
        remaining_s=value.remaining_s,
        salt=value.salt,
    )


def decode_ticket(message: s.Ticket) -> Ticket:
    """One attempt at one request; its prompt is at least one token."""
    sampling = need(message, "sampling")
    if not 1 <= message.n_prompt <= len(message.tokens):
        raise MalformedFrame(
            f"n_prompt {message.n_prompt} is not within 1..{len(message.tokens)} tokens",
            field="n_prompt",
        )
    return Ticket(
        id=decode_ticket_id(need(message, "id")),
        sender=_decode_peer(message.sender) if message.HasField("sender") else None,
        receiver=_decode_peer(need(message, "receiver")),
        tokens=tuple(message.tokens),
        n_prompt=message.n_prompt,
        sampling=SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=number(sampling.temperature, "temperature"),
            top_p=number(sampling.top_p, "top_p"),
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
        n_delivered=message.n_delivered,
        n_choices=message.n_choices,
        priority=message.priority,
        order_key=number(message.order_key, "order_key"),
        ttft_target_s=(
            number(message.ttft_target_s, "ttft_target_s")
            if message.HasField("ttft_target_s")
            else None
        ),
        remaining_s=number(message.remaining_s, "remaining_s"),
        salt=message.salt,
    )


def encode_tokens(value: m.Tokens) -> s.TokenBatch:
    """One step's tokens by column; a column that says the same for every row is left out."""
    items = value.items
    batch = s.TokenBatch(
        request_ids=[i.ticket_id.request_id for i in items], indexes=[i.index for i in items]
    )
    if any(i.ticket_id.attempt != 1 for i in items):
        batch.attempts.extend([i.ticket_id.attempt for i in items])
    if any(len(i.token_ids) != 1 for i in items):
        batch.counts.extend([len(i.token_ids) for i in items])
    for item in items:
        batch.token_ids.extend(item.token_ids)
    if any(i.finish_reason is not None for i in items):
        batch.finish_reasons.extend(
            [
                c.FINISH_REASON_UNSPECIFIED
                if i.finish_reason is None
                else FINISH_TO_WIRE[i.finish_reason]
                for i in items
            ]
        )
    if any(i.choice for i in items):
        batch.choices.extend([i.choice for i in items])
    return batch


def _column(values: Any, n: int, default: int, name: str) -> list[int]:
    if not values:
        return [default] * n
    if len(values) != n:
        raise MalformedFrame(f"{name} has {len(values)} rows, not {n}", field=name)
    return list(values)


def decode_tokens(message: s.TokenBatch) -> m.Tokens:
    """One step's tokens; columns of unequal length are malformed."""
    n = len(message.request_ids)
    if len(message.indexes) != n:
        raise MalformedFrame(f"indexes has {len(message.indexes)} rows, not {n}", field="indexes")
    counts = _column(message.counts, n, 1, "counts")
    token_ids = tuple(message.token_ids)
    if sum(counts) != len(token_ids):
        raise MalformedFrame(f"{len(token_ids)} tokens, not {sum(counts)}", field="token_ids")
    rows = zip(
        message.request_ids,
        _column(message.attempts, n, 1, "attempts"),
        message.indexes,
        counts,
        _column(message.finish_reasons, n, 0, "finish_reasons"),
        _column(message.choices, n, 0, "choices"),
        strict=True,
    )
    items = []
    at = 0
    for request_id, attempt, index, count, finish, choice in rows:
        reason = None if finish == 0 else known(FINISH_FROM_WIRE, finish, "finish_reasons")
        ids = token_ids[at : at + count]
        at += count
        items.append(m.TokenItem(_ticket_id(request_id, attempt), index, ids, reason, choice))
    return m.Tokens(tuple(items))

"""What a step made, tokens and their logprobs, to protobuf and back: the hot message.

Owns the columns of ``TokenBatch`` and ``LogprobColumns``. A step without logprobs and cached
tokens costs nothing for them, neither bytes nor a pass over the rows. Rules and errors as in
``convert``: every count is checked against what is there before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from protocol import messages as m
from protocol.errors import MalformedFrame
from protocol.types import TokenLogprobs
from protocol.wire import common_pb2 as c
from protocol.wire import session_pb2 as s
from protocol.wire.convert_parts import FINISH_FROM_WIRE, FINISH_TO_WIRE, known, number, ticket_id


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
    if any([i.logprobs or i.cached_tokens or i.prompt_logprobs for i in items]):
        _add_riches(batch, items)
    return batch


def _add_riches(batch: s.TokenBatch, items: Sequence[m.TokenItem]) -> None:
    """The columns that few steps have."""
    if any(i.cached_tokens for i in items):
        batch.cached_tokens.extend([i.cached_tokens for i in items])
    if any(i.logprobs for i in items):
        batch.logprob_counts.extend([len(i.logprobs) for i in items])
        _fill(batch.logprobs, [entry for i in items for entry in i.logprobs])
    if any(i.prompt_logprobs for i in items):
        batch.prompt_logprob_counts.extend([len(i.prompt_logprobs) for i in items])
        _fill(batch.prompt_logprobs, [entry for i in items for entry in i.prompt_logprobs])


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
        items.append(m.TokenItem(ticket_id(request_id, attempt), index, ids, reason, choice))
    if message.cached_tokens or message.logprob_counts or message.prompt_logprob_counts:
        items = _with_riches(message, items)
    return m.Tokens(tuple(items))


def _with_riches(message: s.TokenBatch, items: list[m.TokenItem]) -> list[m.TokenItem]:
    n = len(items)
    logprobs = _by_row(message.logprobs, message.logprob_counts, n, "logprobs")
    prompts = _by_row(message.prompt_logprobs, message.prompt_logprob_counts, n, "prompt_logprobs")
    cached = _column(message.cached_tokens, n, 0, "cached_tokens")
    return [
        replace(item, logprobs=own, prompt_logprobs=prompt, cached_tokens=n_cached)
        for item, own, prompt, n_cached in zip(items, logprobs, prompts, cached, strict=True)
    ]


def _by_row(
    columns: c.LogprobColumns, counts: Any, n: int, name: str
) -> list[tuple[TokenLogprobs, ...]]:
    """The entries of each of ``n`` rows."""
    per_row = _column(counts, n, 0, f"{name}_counts")
    entries = decode_logprobs(columns)
    if sum(per_row) != len(entries):
        raise MalformedFrame(f"{len(entries)} {name}, not {sum(per_row)}", field=name)
    rows, at = [], 0
    for count in per_row:
        rows.append(entries[at : at + count])
        at += count
    return rows


def encode_logprobs(entries: Sequence[TokenLogprobs]) -> c.LogprobColumns | None:
    """Logprobs by column; None, which takes no byte, where there are none."""
    if not entries:
        return None
    columns = c.LogprobColumns()
    _fill(columns, entries)
    return columns


def _fill(columns: c.LogprobColumns, entries: Sequence[TokenLogprobs]) -> None:
    columns.token_ids.extend([e.token_id for e in entries])
    columns.logprobs.extend([e.logprob for e in entries])
    columns.ranks.extend([e.rank for e in entries])
    if any(e.top for e in entries):
        columns.top_counts.extend([len(e.top) for e in entries])
        columns.top_ids.extend([token_id for e in entries for token_id, _ in e.top])
        columns.top_logprobs.extend([logprob for e in entries for _, logprob in e.top])


def decode_logprobs(columns: c.LogprobColumns) -> tuple[TokenLogprobs, ...]:
    """Logprobs by column; columns of unequal length and NaN are malformed."""
    n = len(columns.token_ids)
    for name in ("logprobs", "ranks"):
        if len(getattr(columns, name)) != n:
            raise MalformedFrame(f"{name} has {len(getattr(columns, name))} rows, not {n}")
    if len(columns.top_ids) != len(columns.top_logprobs):
        raise MalformedFrame("top_ids and top_logprobs differ in length", field="top_ids")
    counts = _column(columns.top_counts, n, 0, "top_counts")
    if sum(counts) != len(columns.top_ids):
        raise MalformedFrame(f"{len(columns.top_ids)} top_ids, not {sum(counts)}", field="top_ids")
    logprobs, top_logprobs = list(columns.logprobs), list(columns.top_logprobs)
    for values in (logprobs, top_logprobs):
        number(sum(values), "logprobs")
    top = list(zip(columns.top_ids, top_logprobs, strict=True))
    entries, at = [], 0
    for token_id, logprob, rank, count in zip(
        columns.token_ids, logprobs, columns.ranks, counts, strict=True
    ):
        entries.append(TokenLogprobs(token_id, logprob, rank, tuple(top[at : at + count])))
        at += count
    return tuple(entries)

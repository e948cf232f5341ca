"""Tensor parallelism: the ranks of one worker, each with a slice of every layer.

This file owns the process group of a worker's ranks, the refusal of models that cannot be cut, and
the encoding of a step that rank 0 sends to the others (plain integers: nothing that is received is
ever executed). The model's cutting is transformers' own (``DistributedConfig``). It must never
decide what a step holds, and no other code knows ranks: a runner on a rank sees a model with fewer
heads.

All ranks must run the same steps in the same order, for every layer is a meeting of all of them.
Sampling is rank 0's; the others compute the same logits and take the greedy token, to drop it.

Life: ``join`` in every rank, before the model is loaded -> ``load_model`` meets the others -> steps
-> ``leave``. A rank that dies fails the others' meeting at once, a frozen one when the group's
timeout has passed; the group is unusable after either.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from kernels.model_info import Described
from protocol.errors import ConfigError, InternalError
from protocol.step import CopyKind, PageCopy, StepRow
from protocol.types import SamplingParams, TicketId

_GREEDY = SamplingParams(max_tokens=1)
_COPY_KINDS = tuple(CopyKind)
_HEADER = 2
_PER_ROW = 9
_PER_COPY = 3


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of a worker's ranks this process is."""

    rank: int
    size: int


def check_divisible(described: Described, size: int) -> None:
    """Raise ``ConfigError`` with the numbers if ``size`` ranks cannot share this model."""
    text = described.config.get_text_config()
    kind, kv_heads = text.model_type, described.geometry(1).kv_heads
    heads = int(text.num_attention_heads)
    if heads % size or kv_heads % size:
        raise ConfigError(
            f"tensor_parallel {size}: {kind} has {heads} heads and {kv_heads} KV heads here, and "
            f"{size} ranks must get equal whole numbers of both",
            field="tensor_parallel",
        )
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"tensor_parallel {size}: transformers has no plan for cutting {kind}",
            field="tensor_parallel",
        )


def join(place: RankPlace, meeting: Path, device_type: str, timeout_s: float) -> None:
    """Meet the worker's other ranks; ``meeting`` is a file in a folder that only this user reads.

    Ranks share a host, so a CPU's sockets stay on its loopback interface. Raises
    ``InternalError`` when this process is in a group already, ``ConfigError`` when the others do
    not come within ``timeout_s``.
    """
    if dist.is_initialized():
        raise InternalError("this process is a rank of another worker already")
    backend = "nccl" if device_type == "cuda" else "gloo"
    os.environ["LOCAL_RANK"] = str(place.rank)  # transformers takes the device of this number
    if device_type == "cuda":
        torch.cuda.set_device(place.rank)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    store = dist.FileStore(str(meeting), place.size)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"rank {place.rank} of {place.size} did not meet the others: "
            f"{str(error).splitlines()[0]}"
        ) from error


def bound_waits(timeout_s: float) -> None:
    """From now on no meeting of ranks waits longer than this for one that does not come."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def smallest_of_ranks(count: int, device_type: str) -> int:
    """The smallest ``count`` of all ranks; they meet here."""
    smallest = torch.tensor([count], device=device_type)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


def leave() -> None:
    """Leave the group; nothing is waited for."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _loopback_interface() -> str:
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            return name
    raise ConfigError("this machine has no loopback interface for the ranks of a worker")


def encode_step(rows: Sequence[StepRow], copies: Sequence[PageCopy]) -> bytes:
    """A step as 64-bit integers: what the other ranks need to compute the same layers.

    The history of a row travels only where prompt logprobs need it.
    """
    numbers: list[int] = [len(rows), len(copies)]
    for row in rows:
        history = row.history if row.prompt_logprobs is not None else ()
        asked = -1 if row.prompt_logprobs is None else row.prompt_logprobs
        sampled = int(row.sample is not None)
        numbers += (len(row.tokens), len(row.pages), len(history), len(row.choices))
        numbers += (row.start, row.token_index, row.n_prompt, sampled, asked)
    for copy in copies:
        numbers += (_COPY_KINDS.index(copy.kind), copy.source, copy.target)
    for row in rows:
        numbers += row.tokens
        numbers += row.pages
        if row.prompt_logprobs is not None:
            numbers += row.history
    return np.array(numbers, dtype="<i8").tobytes()


def decode_step(data: bytes) -> tuple[list[StepRow], list[PageCopy]]:
    """The step that ``encode_step`` wrote; ``InternalError`` for anything else."""
    if len(data) % 8 or len(data) < 8 * _HEADER:
        raise InternalError(f"{len(data)} bytes are no step")
    numbers = np.frombuffer(data, dtype="<i8").tolist()
    n_rows, n_copies = numbers[:_HEADER]
    first_copy = _HEADER + n_rows * _PER_ROW
    at = first_copy + n_copies * _PER_COPY
    if n_rows < 0 or n_copies < 0 or at > len(numbers):
        raise InternalError(f"{len(data)} bytes are no step of {n_rows} rows, {n_copies} copies")
    copies = [
        PageCopy(_COPY_KINDS[kind], source, target)
        for kind, source, target in _fields(numbers[first_copy:at], _PER_COPY)
    ]
    rows: list[StepRow] = []
    for fields in _fields(numbers[_HEADER:first_copy], _PER_ROW):
        n_tokens, n_pages, n_history, n_choices, start, index, n_prompt, sampled, asked = fields
        end = at + n_tokens + n_pages + n_history
        if min(n_tokens, n_pages, n_history) < 0 or end > len(numbers):
            raise InternalError(f"a row of {n_tokens} tokens and {n_pages} pages is not whole")
        rows.append(
            StepRow(
                TicketId("row", len(rows) + 1),
                numbers[at : at + n_tokens],
                start,
                numbers[at + n_tokens : at + n_tokens + n_pages],
                _GREEDY if sampled else None,
                index,
                tuple(range(n_choices)),
                numbers[at + n_tokens + n_pages : end],
                n_prompt,
                None if asked < 0 else asked,
            )
        )
        at = end
    if at != len(numbers):
        raise InternalError(f"{len(numbers) - at} numbers too many for a step")
    return rows, copies


def _fields(numbers: list[int], each: int) -> Iterator[tuple[int, ...]]:
    return (tuple(numbers[i : i + each]) for i in range(0, len(numbers), each))

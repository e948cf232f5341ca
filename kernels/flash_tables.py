"""A step's tables in the form that FlashAttention's paged kernels take.

This file owns that form: rows of one token at the head of the step are one call (the kernel then
packs the heads that share a KV head), the other rows a second. It must never look into the pool.
The new tokens' KV is written before, by ``kv_write``; those writes know no padding rows, which is
why these backends are not declared safe in CUDA graphs.

Shape suffixes: T packed tokens, R rows of one call, W pages of the widest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import Plan
from kernels.batch import Batch
from kernels.kv_write import cells_T
from kernels.staging import host_plan
from protocol.types import KvGeometry

PAGE_MULTIPLE = 256  # csrc/flash_attn/flash_api.cpp, mha_varlen_fwd, also in torch's copy
HEAD_DIMS = frozenset(range(8, 257, 8))
_TENSORS_PER_CALL = 4
_NUMBERS_PER_CALL = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call over consecutive rows; all tensors int32 on the device."""

    tokens: slice  # its tokens within the step
    max_q: int
    max_k: int
    cu_q: torch.Tensor  # [R + 1]
    cu_k: torch.Tensor  # [R + 1]
    kv_len_R: torch.Tensor
    table_RW: torch.Tensor


def plan(batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
    """Tensors: cells (int64), then four per call. Numbers: four per call."""
    cells = cells_T(batch.page_T, batch.offset_T, geometry.layers, geometry.page_size)
    n_rows = len(batch.q_len_R)
    several = batch.q_len_R > 1
    n_single = int(several.argmax()) if several.any() else n_rows
    parts: list[np.ndarray] = [cells]
    numbers: list[int] = []
    for rows in (slice(0, n_single), slice(n_single, n_rows)):
        if rows.start < rows.stop:
            q_len, kv_len = batch.q_len_R[rows], batch.kv_len_R[rows]
            width = int(batch.n_pages_R[rows].max())
            parts += [_cumulative(q_len), _cumulative(kv_len), kv_len, _table(batch, rows, width)]
            first = int(batch.q_start_R[rows.start])
            numbers += [first, first + int(q_len.sum()), int(q_len.max()), int(kv_len.max())]
    there = host_plan(parts, numbers).to(device)
    return Plan([there.tensors[0].long(), *there.tensors[1:]], numbers)


def calls(plan: Plan) -> Iterator[Call]:
    """The calls of a plan, in the order of their tokens, which together are all of the step's."""
    tensors, numbers = plan.tensors[1:], plan.numbers
    for i in range(len(numbers) // _NUMBERS_PER_CALL):
        first, end, max_q, max_k = numbers[i * _NUMBERS_PER_CALL :][:_NUMBERS_PER_CALL]
        own = tensors[i * _TENSORS_PER_CALL :][:_TENSORS_PER_CALL]
        yield Call(slice(first, end), max_q, max_k, *own)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _table(batch: Batch, rows: slice, width: int) -> np.ndarray:
    """``[R, W]``, padded with page 0, which no row's length reaches."""
    n_pages_R = batch.n_pages_R[rows]
    first_R = batch.first_page_R[rows]
    own_RW = np.arange(width) < n_pages_R[:, None]
    table_RW = np.zeros(own_RW.shape, dtype=np.int64)
    table_RW[own_RW] = batch.table[first_R[0] : first_R[-1] + n_pages_R[-1]]
    return table_RW

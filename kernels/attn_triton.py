"""Our Triton paged attention: any page size, everything a model may ask, safe in CUDA graphs.

This file owns how a mixed batch becomes launches: one over the rows of one token, one over the
rows of several, each followed by a join when the contexts are long and the programs few (then
every context is cut into parts). It must never import Triton before a kernel is to run: the
kernels stand in ``triton_kernels``. New keys and values are written by the kernel that attends.

Shape suffixes: T packed tokens, H query heads, N key-value heads, D head size, I work items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from kernels.staging import HostPlan, host_plan
from protocol.types import KvGeometry

BLOCK_QS = (8, 16, 32, 64, 128)  # tokens per item; which one fits depends on the heads per KV head
MAX_PARTS = 32  # a power of two


@dataclass(frozen=True, slots=True)
class Tile:
    """How large a piece one program takes: query lines, key positions; and how it is compiled."""

    lines: int
    positions: int
    warps: int
    stages: int


def tile(one_token: bool, dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile for rows of one token or of several. Must fit registers and shared memory of
    sm_80 and later; test_triton_compile prints what each takes on sm_90."""
    wide = head_dim > 128
    if dtype == torch.float32:
        return Tile(16 if one_token or wide else 32, 32 if one_token and not wide else 16, 8, 2)
    if one_token:
        return Tile(16, 32 if wide else 64, 4, 3)
    return Tile(128, 32 if wide else 64, 8, 2 if wide else 3)


def _missing() -> str | None:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None


class TritonAttention:
    """Stateless; see the file's head."""

    declaration = Declaration(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        head_dims=frozenset(range(1, 257)),
        window=True,
        softcap=True,
        sinks=True,
        graph_safe=True,
        launches_per_step=4,  # and layer: rows of one token, rows of several, a join for each
        missing=_missing,
    )

    def __init__(
        self,
        programs: int | None = None,
        tiles: Callable[[bool, torch.dtype, int], Tile] = tile,
    ) -> None:
        """``programs`` is how many keep the device busy; None asks the device."""
        self._programs = programs
        self._tiles = tiles

    def host_plan(self, batch: Batch, geometry: KvGeometry) -> HostPlan:
        """Parts: rows, items of one token, items for each of ``BLOCK_QS``, page table.

        Numbers: the longest row's bound on positions.
        """
        # A padding row counts as one of one token, so captured shapes do not depend on it.
        rows = np.stack([batch.q_start_R, batch.q_len_R, batch.kv_len_R, batch.first_page_R], 1)
        single = np.flatnonzero(batch.q_len_R == 1)
        several = np.flatnonzero(batch.q_len_R > 1)
        parts = [rows, np.stack([single, np.zeros_like(single)], 1)]
        parts += [_items(batch, several, block_q) for block_q in BLOCK_QS]
        return host_plan([*parts, batch.table], [batch.kv_bound])

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """See ``host_plan``; one copy."""
        return self.host_plan(batch, geometry).to(device)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """At most four launches; see the file's head."""
        rows, single, *several, table = plan.tensors
        group = q_THD.shape[1] // k_TND.shape[1]
        out_THD = torch.empty_like(q_THD)
        work = _Layer(q_THD, k_TND, v_TND, kv, out_THD, rows, table, call)
        programs = self._programs or _programs(q_THD.device)
        if len(single):
            t = self._tiles(True, kv.dtype, kv.shape[5])
            block_g = max(t.lines, _power(group))
            _launch(work, single, 1, block_g, t, plan.numbers[0], programs)
        if len(several[0]):
            t = self._tiles(False, kv.dtype, kv.shape[5])
            block_g = _power(group)
            block_q = min(max(t.lines // block_g, BLOCK_QS[0]), BLOCK_QS[-1])
            items = several[BLOCK_QS.index(block_q)]
            _launch(work, items, block_q, block_g, t, plan.numbers[0], programs)
        return out_THD


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call's tensors."""

    q_THD: torch.Tensor
    k_TND: torch.Tensor
    v_TND: torch.Tensor
    kv: torch.Tensor
    out_THD: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    call: LayerCall


def _items(batch: Batch, rows: np.ndarray, block_q: int) -> np.ndarray:
    """``[I, 2]``: row and first token of every block, those with the longest context first."""
    blocks = -(-batch.q_len_R[rows] // block_q)
    row_I = np.repeat(rows, blocks)
    first_I = (np.arange(len(row_I)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block_q
    seen_I = batch.kv_len_R[row_I] - batch.q_len_R[row_I] + first_I
    return np.stack([row_I, first_I], 1)[np.argsort(-seen_I, kind="stable")]


@cache
def _programs(device: torch.device) -> int:
    """Programs that keep ``device`` busy: two for each of its processors."""
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power(n: int) -> int:
    """The power of two at or above ``n``."""
    return 1 << (n - 1).bit_length()


def n_parts(programs: int, wanted: int, positions: int, block: int) -> int:
    """Into how many parts contexts of up to ``positions`` are cut so that ``programs`` of them
    become about ``wanted``, none of less than four blocks."""
    return max(1, min(-(-wanted // programs), positions // (4 * block), MAX_PARTS))


def _launch(
    work: _Layer, items: torch.Tensor, block_q: int, block_g: int, t: Tile, bound: int, wanted: int
) -> None:
    """One launch of ``attend`` over ``items``, and the join of its parts."""
    from kernels.triton_kernels import attend, join  # not before a kernel is to run

    kv, call, q, out = work.kv, work.call, work.q_THD, work.out_THD
    layers, page, kv_heads, head_dim = kv.shape[1], *kv.shape[3:]
    heads = q.shape[1]
    block_d = max(16, _power(head_dim))
    parts = n_parts(len(items) * kv_heads, wanted, bound, t.positions)
    n_tokens = len(items) * block_q
    part_acc, part_ml = out, out  # not touched by a launch without parts
    if parts > 1:
        part_acc = torch.empty(parts, n_tokens, heads, head_dim, device=q.device)
        part_ml = torch.empty(2, parts, n_tokens, heads, device=q.device)
    attend[(len(items), kv_heads, parts)](
        q,
        work.k_TND,
        work.v_TND,
        kv,
        out,
        part_acc,
        part_ml,
        items,
        work.rows,
        work.table,
        out if call.sinks_H is None else call.sinks_H,
        *q.stride()[:2],
        *work.k_TND.stride()[:2],
        *work.v_TND.stride()[:2],
        *out.stride()[:2],
        call.layer,
        call.scale,
        call.softcap,
        call.window,
        parts,
        n_tokens,
        LAYERS=layers,
        PAGE=page,
        KV=kv_heads,
        GROUP=heads // kv_heads,
        HEAD=head_dim,
        BLOCK_Q=block_q,
        BLOCK_G=block_g,
        BLOCK_N=t.positions,
        BLOCK_D=block_d,
        WINDOW=call.window > 0,
        SOFTCAP=call.softcap > 0,
        SINKS=call.sinks_H is not None,
        SPLIT=parts > 1,
        num_warps=t.warps,
        num_stages=t.stages,
        enable_fp_fusion=True,
    )
    if parts > 1:
        join[(n_tokens, heads)](
            out,
            part_acc,
            part_ml,
            items,
            work.rows,
            *out.stride()[:2],
            parts,
            n_tokens,
            HEADS=heads,
            HEAD=head_dim,
            BLOCK_Q=block_q,
            BLOCK_D=block_d,
            BLOCK_S=MAX_PARTS,
            num_warps=4,
            enable_fp_fusion=True,
        )

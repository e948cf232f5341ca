"""Attention on a CPU that reads the pages of the pool where they lie.

This file owns how a step's rows become flat tables for ``attn_rows`` and ``attn_prompts`` and how
several threads enter their functions. Nothing is gathered, and within a layer no Python runs per
row. It must never import numba before it is asked to compute: where numba is broken, the choice of
a backend passes this one over and says so.

Threads are torch's own: its OpenMP runtime runs our function in a team of
``torch.get_num_threads()``, so that no second pool competes for the cores. Where that runtime is
not found, one thread does the work.

Shape suffixes: T packed tokens, H query heads, N key-value heads, D head size, R rows.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch

from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from kernels.kv_write import cells_T
from protocol.types import KvGeometry

_PIECES_PER_THREAD = 4  # enough to share rows out evenly, few enough to join
_SMALLEST_PIECE = 128  # positions
# Below these one thread is done before a team has met.
_TOO_LITTLE = 2**18  # bytes of keys and values
_TOO_FEW = 2**20  # multiplications per query head of a KV head


def _missing() -> str | None:
    try:
        import kernels.attn_compiled  # noqa: F401
    except Exception as e:  # a broken numba raises more than ImportError
        return f"numba cannot be used: {(str(e).splitlines() or [type(e).__name__])[0]}"
    return None


class NumbaAttention:
    """Stateless; see the file's head."""

    declaration = Declaration(
        name="numba",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        window=True,
        softcap=True,
        sinks=True,
        launches_per_step=2,
        missing=_missing,
    )

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """Tensors (int64): the table as far as it is known, then what it points to.

        Numbers: partial results, threads for rows of one token, threads for others.
        """
        from kernels import attn_table as at

        row_threads = prompt_threads = torch.get_num_threads()
        number = getattr(torch, geometry.dtype).itemsize
        cell = geometry.kv_heads * geometry.head_dim * number
        half = geometry.page_size * cell
        cells = cells_T(batch.page_T, batch.offset_T, geometry.layers, geometry.page_size) * cell
        first_page_R = batch.first_page_R
        one = batch.q_len_R == 1
        if int(batch.kv_len_R[one].sum()) * 2 * cell < _TOO_LITTLE:
            row_threads = 1
        pieces, merges, n_partials = _pieces(batch, first_page_R, row_threads)
        many = np.flatnonzero(~one)
        products = int((batch.q_len_R[many] * batch.kv_len_R[many]).sum())
        if products * geometry.kv_heads * geometry.head_dim < _TOO_FEW:
            prompt_threads = 1
        prompts = np.array(
            [batch.q_start_R[many], batch.q_len_R[many], batch.kv_len_R[many], first_page_R[many]]
        ).T
        tables = (cells, pieces, prompts, merges, batch.table)
        tensors = [torch.from_numpy(np.ascontiguousarray(table)) for table in tables]
        at_cells, at_pieces, at_prompts, at_merges, at_pages = (x.data_ptr() for x in tensors)
        table = np.zeros(at.TABLE, np.int64)
        table[: at.CALL] = (
            *(0, 0, 0, 0, len(cells), at_cells, len(pieces), at_pieces, len(prompts), at_prompts),
            *(len(merges), at_merges, at_pages, geometry.page_size, 2 * geometry.layers * half),
            *(half, geometry.kv_heads, geometry.head_dim, geometry.head_dim * number),
        )
        return Plan([torch.from_numpy(table), *tensors], [n_partials, row_threads, prompt_threads])

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """Write, then all rows of one token, then all others."""
        from kernels import attn_table as at
        from kernels.attn_compiled import compiled

        kv_heads, head_dim = kv.shape[4:]
        heads = q_THD.shape[1]
        n_partials, row_threads, prompt_threads = plan.numbers
        threads = max(row_threads, prompt_threads)
        code = compiled(heads // kv_heads, head_dim, kv.dtype)
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD.float(), k_TND, v_TND))
        out = torch.empty(q_THD.shape, dtype=torch.float32)
        own = -(-code.scratch(kv_heads) // at.CACHE_LINE) * at.CACHE_LINE
        partials = n_partials * heads * (head_dim + 2) * 4
        scratch = torch.empty(threads * own + at.CACHE_LINE + partials, dtype=torch.uint8)
        at_scratch = -(-scratch.data_ptr() // at.CACHE_LINE) * at.CACHE_LINE
        sinks = None if call.sinks_H is None else call.sinks_H.float().contiguous()
        number = kv.element_size()
        table_tensor = plan.tensors[0].clone()
        table = table_tensor.numpy()
        table[at.CALL :] = (
            kv.data_ptr() + call.layer * kv.stride(1) * number,
            call.window,
            0,
            0,
            0 if sinks is None else sinks.data_ptr(),
            heads,
            *(q.data_ptr(), 4 * q.stride(0), 4 * q.stride(1), out.data_ptr()),
            *(at_scratch, own, at_scratch + threads * own),
            *(k.data_ptr(), number * k.stride(0), number * k.stride(1)),
            *(v.data_ptr(), number * v.stride(0), number * v.stride(1)),
        )
        floats = table.view(np.float32)
        floats[2 * at.CAP], floats[2 * at.SCALE] = call.softcap, call.scale
        address = table_tensor.data_ptr()
        _call(code.store, address)
        if table[at.N_PIECES]:
            _team(code.rows, address, row_threads)
        if table[at.N_MERGES]:
            _call(code.merge, address)
        if table[at.N_PROMPTS]:
            _team(code.prompts, address, prompt_threads)
        return out.to(q_THD.dtype)


def _pieces(
    batch: Batch, first_page_R: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of one token, cut where that keeps every thread busy; longest first."""
    from kernels import attn_table as at

    rows = np.flatnonzero(batch.q_len_R == 1)
    length_R = batch.kv_len_R[rows]
    longest = length_R.max(initial=1)
    piece = longest
    if threads > 1:
        share = -(-int(length_R.sum()) // (threads * _PIECES_PER_THREAD))
        piece = min(piece, max(_SMALLEST_PIECE, share))
    if piece == longest:  # none is cut: the same with less to do, in most steps
        order = np.argsort(-length_R, kind="stable")
        r = rows[order]
        whole = np.full((len(r), at.PIECE), -1, dtype=np.int64)
        whole[:, 0], whole[:, 1], whole[:, 2] = batch.q_start_R[r], first_page_R[r], 0
        whole[:, 3] = whole[:, 4] = batch.kv_len_R[r]
        return whole, np.empty((0, at.MERGE), dtype=np.int64), 0
    count_R = -(-length_R // piece)
    at_R = np.cumsum(count_R) - count_R
    row_P = np.repeat(np.arange(len(rows)), count_R)
    index_P = np.arange(len(row_P)) - at_R[row_P]
    own = -(-length_R // count_R)[row_P]
    start = index_P * own
    end = np.minimum(start + own, length_R[row_P])
    cut_R = count_R > 1
    partial_P = np.where(cut_R[row_P], np.cumsum(cut_R[row_P]) - 1, -1)
    order = np.argsort(start - end, kind="stable")
    r = rows[row_P]
    pieces = np.stack(
        [batch.q_start_R[r], first_page_R[r], start, end, batch.kv_len_R[r], partial_P], axis=1
    )
    cut = np.flatnonzero(cut_R)
    firsts = np.cumsum(count_R[cut]) - count_R[cut]
    merges = np.stack([batch.q_start_R[rows[cut]], firsts, count_R[cut]], axis=1)
    return pieces[order], merges, int(count_R[cut].sum())


@cache
def _function(address: int) -> Any:
    """A compiled ``void f(int64)``; the call releases the GIL."""
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)


def _call(function: int, table: int) -> None:
    _function(function)(table)


def _team(function: int, table: int, threads: int) -> None:
    """Run ``function`` in ``threads`` threads of torch's pool, this one included."""
    start = _openmp() if threads > 1 else None
    if start is None:
        _call(function, table)
    else:
        start(function, table, threads, 0)


@cache
def _openmp() -> Any:
    """``GOMP_parallel(function, argument, threads, flags)``, or None."""
    from kernels.host_code import team

    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    return kind(address) if (address := team()) else None

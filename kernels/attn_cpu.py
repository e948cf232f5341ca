"""Attention on a CPU with torch's own kernels: gathers pages, then batched SDPA.

This file owns how a mixed batch is cut into few large calls. Rows that advance one token are
grouped by length and attend together, each group padded to its longest row; rows that advance
more attend one by one. Query heads of one key-value head form a group dimension, so shared heads
are never copied. It must never let a cell beyond a row's length reach a sum: 0 * NaN is NaN, so
such cells are overwritten in the gathered copy, not only masked.

Shape suffixes: T packed tokens, B rows of a group, P pages of its longest row, L = P * page_size
positions, N key-value heads, G query heads per key-value head, H = N * G, D head size,
Q tokens of a prompt row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from kernels.kv_write import cells_T, write_kv
from protocol.types import KvGeometry

# A group may gather this much more than its rows' own pages before a new group pays.
_MAX_PADDING = 1.25
_TENSORS_PER_DECODE_GROUP = 5


class CpuAttention:
    """Stateless; see the file's head."""

    declaration = Declaration(
        name="cpu",
        devices=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        window=True,
        softcap=True,
        sinks=True,
    )

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """Tensors: cells, then five per decode group, then page rows and mask per prompt row.

        Numbers: decode groups, prompt rows, then ``q_start, q_len, kv_len`` per prompt row.
        """
        cells = cells_T(batch.page_T, batch.offset_T, geometry.layers, geometry.page_size)
        tensors = [torch.from_numpy(cells)]
        one_token = np.flatnonzero(batch.q_len_R == 1)
        groups = list(_groups(batch, one_token))
        for rows in groups:
            tensors += _decode_group(batch, rows, geometry)
        prompts = np.flatnonzero(batch.q_len_R > 1)
        numbers = [len(groups), len(prompts)]
        for r in prompts.tolist():
            n_q, n_kv = int(batch.q_len_R[r]), int(batch.kv_len_R[r])
            tensors.append(_page_rows(batch.pages_R[r][None], geometry.layers))
            dtype = getattr(torch, geometry.dtype)
            tensors.append(_mask_QL(n_q, n_kv, 0, dtype) if n_q < n_kv else torch.empty(0))
            numbers += [int(batch.q_start_R[r]), n_q, n_kv]
        return Plan(tensors, numbers)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """Write, then one call per decode group and per prompt row."""
        tensors, numbers = iter(plan.tensors), iter(plan.numbers)
        write_kv(kv, next(tensors), call.layer, k_TND, v_TND)
        out_THD = torch.empty_like(q_THD)
        n_groups, n_prompts = next(numbers), next(numbers)
        for _ in range(n_groups):
            at_B, page_rows, stale, kv_len_B, mask_BL = (
                next(tensors) for _ in range(_TENSORS_PER_DECODE_GROUP)
            )
            keys, values = _gather(kv, page_rows, call.layer, len(at_B), stale)
            out_THD[at_B] = _decode(q_THD[at_B], keys, values, mask_BL, kv_len_B, call)
        for _ in range(n_prompts):
            page_rows, causal_QL = next(tensors), next(tensors)
            q_start, q_len, kv_len = next(numbers), next(numbers), next(numbers)
            own = slice(q_start, q_start + q_len)
            if q_len == kv_len:  # nothing before this chunk: its own tensors are all it sees
                keys, values = k_TND[own], v_TND[own]
            else:
                keys, values = (x[0, :kv_len] for x in _gather(kv, page_rows, call.layer, 1, None))
            out_THD[own] = _prompt(q_THD[own], keys, values, causal_QL, call)
        return out_THD


def _groups(batch: Batch, rows: np.ndarray) -> Iterator[list[int]]:
    """Rows in groups of similar page counts, so that padding stays below ``_MAX_PADDING``."""
    order = sorted(rows.tolist(), key=lambda r: -len(batch.pages_R[r]))
    group: list[int] = []
    own_pages = 0
    for r in order:
        n_pages = len(batch.pages_R[r])
        longest = len(batch.pages_R[group[0]]) if group else n_pages
        if group and longest * (len(group) + 1) > _MAX_PADDING * (own_pages + n_pages):
            yield group
            group, own_pages = [], 0
        group.append(r)
        own_pages += n_pages
    if group:
        yield group


def _page_rows(pages_BP: np.ndarray, layers: int) -> torch.Tensor:
    """Layer-0 key rows, then value rows, of pages in the pool seen as ``[pages*layers*2, ...]``."""
    keys = pages_BP.reshape(-1) * (layers * 2)
    return torch.from_numpy(np.concatenate([keys, keys + 1]))


def _decode_group(batch: Batch, rows: list[int], geometry: KvGeometry) -> list[torch.Tensor]:
    """``at_B``, page rows, stale cells of the gathered copy, ``kv_len_B``, additive ``mask_BL``."""
    kv_len_B = batch.kv_len_R[rows]
    n_pages = len(batch.pages_R[rows[0]])
    pages_BP = np.empty((len(rows), n_pages), dtype=np.int64)
    for b, r in enumerate(rows):
        own = batch.pages_R[r]
        pages_BP[b, : len(own)] = own
        pages_BP[b, len(own) :] = own[0]  # padding; all its cells are stale
    seen_BL = np.arange(n_pages * geometry.page_size) < kv_len_B[:, None]
    stale = np.flatnonzero(~seen_BL)
    mask_BL = np.where(seen_BL, 0.0, -np.inf)
    return [
        torch.from_numpy(batch.q_start_R[rows]),
        _page_rows(pages_BP, geometry.layers),
        torch.from_numpy(np.concatenate([stale, stale + seen_BL.size])),
        torch.from_numpy(kv_len_B),
        torch.from_numpy(mask_BL).to(getattr(torch, geometry.dtype)),
    ]


def _gather(
    kv: torch.Tensor, page_rows: torch.Tensor, layer: int, n_rows: int, stale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, L, N, D]`` of one layer, with stale cells set to zero."""
    kv_heads, head_dim = kv.shape[4:]
    pages = kv.view(-1, kv.shape[3] * kv_heads * head_dim).index_select(0, page_rows + 2 * layer)
    if stale is not None:
        pages.view(-1, kv_heads * head_dim).index_fill_(0, stale, 0.0)
    keys, values = pages.view(2, n_rows, -1, kv_heads, head_dim).unbind(0)
    return keys, values


def _decode(
    q_BHD: torch.Tensor,
    k_BLND: torch.Tensor,
    v_BLND: torch.Tensor,
    mask_BL: torch.Tensor,
    kv_len_B: torch.Tensor,
    call: LayerCall,
) -> torch.Tensor:
    """One token per row over all its positions; ``[B, H, D]``. A group's heads act as queries."""
    rows, heads, head_dim = q_BHD.shape
    kv_heads = k_BLND.shape[2]
    if call.window:
        position_L = torch.arange(mask_BL.shape[1])
        outside_BL = position_L < (kv_len_B - call.window)[:, None]
        mask_BL = mask_BL.masked_fill(outside_BL, float("-inf"))
    q_BNGD = q_BHD.view(rows, kv_heads, heads // kv_heads, head_dim)
    sinks = None
    if call.sinks_H is not None:
        sinks = call.sinks_H.view(1, kv_heads, -1, 1)
    out = _softmax_attention(
        q_BNGD, k_BLND.transpose(1, 2), v_BLND.transpose(1, 2), mask_BL[:, None, None], sinks, call
    )
    return out.reshape(rows, heads, head_dim)


def _prompt(
    q_QHD: torch.Tensor,
    k_LND: torch.Tensor,
    v_LND: torch.Tensor,
    causal_QL: torch.Tensor,
    call: LayerCall,
) -> torch.Tensor:
    """A row of several tokens over its positions, each seeing up to itself; ``[Q, H, D]``."""
    n_q, heads, head_dim = q_QHD.shape
    n_kv, kv_heads, _ = k_LND.shape
    shape = (kv_heads, heads // kv_heads)
    q_NGQD = q_QHD.view(n_q, *shape, head_dim).permute(1, 2, 0, 3)
    k_NGLD = k_LND.transpose(0, 1)[:, None].expand(*shape, n_kv, head_dim)
    v_NGLD = v_LND.transpose(0, 1)[:, None].expand(*shape, n_kv, head_dim)
    sinks = None if call.sinks_H is None else call.sinks_H.view(*shape, 1, 1)
    mask_QL: torch.Tensor | None = causal_QL
    if call.window:
        mask_QL = _mask_QL(n_q, n_kv, call.window, q_QHD.dtype)
    elif n_q == n_kv:
        plain = not call.softcap and sinks is None  # SDPA knows this case without a mask
        mask_QL = None if plain else _mask_QL(n_q, n_kv, 0, q_QHD.dtype)
    out_NGQD = _softmax_attention(q_NGQD, k_NGLD, v_NGLD, mask_QL, sinks, call)
    return out_NGQD.permute(2, 0, 1, 3).reshape(n_q, heads, head_dim)


def _mask_QL(n_q: int, n_kv: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where the last ``n_q`` of ``n_kv`` positions may look, else minus infinity."""
    ahead_QL = torch.arange(n_kv) - torch.arange(n_kv - n_q, n_kv)[:, None]
    hidden_QL = ahead_QL > 0
    if window:
        hidden_QL |= ahead_QL <= -window
    return torch.zeros(n_q, n_kv, dtype=dtype).masked_fill_(hidden_QL, float("-inf"))


def _softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    call: LayerCall,
) -> torch.Tensor:
    """SDPA, or its formula written out where torch's kernel lacks the feature.

    ``mask`` None means causal. ``sinks`` has one logit per query head, broadcastable to the
    logits with a last dimension of 1.
    """
    if not call.softcap and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=call.scale
        )
    logits = torch.matmul(q, k.transpose(-1, -2)).float() * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if mask is not None:
        logits = logits + mask
    if sinks is not None:
        column = sinks.float().expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights.to(v.dtype), v)

"""The oracle: paged attention one token at a time, obvious and slow.

This file owns what "right" means for every other backend. It must never be made clever: it
copies a row's cells position by position, in float64, and applies the textbook formula.

Shape suffixes: T packed tokens, H query heads, N key-value heads, D head size, L positions seen.
"""

from __future__ import annotations

import torch

from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from protocol.types import KvGeometry


class ReferenceAttention:
    """Plain torch on any device; see the file's head."""

    declaration = Declaration(
        name="reference",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        window=True,
        softcap=True,
        sinks=True,
    )

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """Numbers: page size, then per row ``q_start, q_len, kv_len, pages...``; no tensors."""
        numbers = [geometry.page_size, len(batch.pages_R)]
        for r, pages in enumerate(batch.pages_R):
            numbers += [int(batch.q_start_R[r]), int(batch.q_len_R[r]), int(batch.kv_len_R[r])]
            numbers += [len(pages), *pages.tolist()]
        return Plan([], numbers)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """Write, then attend, one token after another."""
        out_THD = torch.empty_like(q_THD)
        numbers = iter(plan.numbers)
        page_size = next(numbers)
        for _ in range(next(numbers)):
            q_start, q_len, kv_len = next(numbers), next(numbers), next(numbers)
            pages = [next(numbers) for _ in range(next(numbers))]

            def cell(position: int, pages: list[int] = pages) -> tuple[int, int]:
                return pages[position // page_size], position % page_size

            for i in range(q_len):
                page, offset = cell(kv_len - q_len + i)
                kv[page, call.layer, 0, offset] = k_TND[q_start + i]
                kv[page, call.layer, 1, offset] = v_TND[q_start + i]
            for i in range(q_len):
                position = kv_len - q_len + i
                first = max(0, position + 1 - call.window) if call.window else 0
                cells = [cell(p) for p in range(first, position + 1)]
                k_LND = torch.stack([kv[p, call.layer, 0, o] for p, o in cells]).double()
                v_LND = torch.stack([kv[p, call.layer, 1, o] for p, o in cells]).double()
                out_THD[q_start + i] = _one(q_THD[q_start + i], k_LND, v_LND, call)
        return out_THD


def _one(
    q_HD: torch.Tensor, k_LND: torch.Tensor, v_LND: torch.Tensor, call: LayerCall
) -> torch.Tensor:
    """Attention of one token over the positions it sees."""
    group = q_HD.shape[0] // k_LND.shape[1]
    outs = []
    for head in range(q_HD.shape[0]):
        n = head // group
        logits_L = k_LND[:, n] @ q_HD[head].double() * call.scale
        if call.softcap:
            logits_L = call.softcap * torch.tanh(logits_L / call.softcap)
        if call.sinks_H is not None:
            logits_L = torch.cat([logits_L, call.sinks_H[head].double().view(1)])
        weights_L = torch.softmax(logits_L, dim=0)[: k_LND.shape[0]]
        outs.append(weights_L @ v_LND[:, n])
    return torch.stack(outs).to(q_HD.dtype)

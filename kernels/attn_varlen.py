"""torch's own ``varlen_attn`` over our pages, read in place: needs no package beside torch.

This file owns the one call into ``torch.nn.attention.varlen``. It has FlashAttention's rule of
pages of a multiple of 256 tokens, windows, and neither soft cap nor sinks. Only ``num_splits=1``
is right: with more, paged rows after the first are not written (pytorch#194167).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kernels import flash_tables
from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from kernels.kv_write import write_kv
from protocol.types import KvGeometry

_NEEDED = ("enable_gqa", "seqused_k", "block_table", "num_splits")


def _missing() -> str | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    known = inspect.signature(varlen_attn).parameters
    if lacking := [name for name in _NEEDED if name not in known]:
        return f"varlen_attn of torch {torch.__version__} has no {', '.join(lacking)}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None


class VarlenAttention:
    """Stateless; see the file's head."""

    declaration = Declaration(
        name="varlen",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        page_multiple=flash_tables.PAGE_MULTIPLE,
        head_dims=flash_tables.HEAD_DIMS,
        window=True,
        launches_per_step=7,  # and layer: 4 for the write, 2 calls, 1 to join them
        missing=_missing,
    )

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """See ``flash_tables.plan``."""
        return flash_tables.plan(batch, geometry, device)

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """Write, then one call for the leading rows of one token and one for the others."""
        from torch.nn.attention.varlen import varlen_attn  # torch < 2.10 has no such module

        write_kv(kv, plan.tensors[0], call.layer, k_TND, v_TND)
        keys, values = kv[:, call.layer, 0], kv[:, call.layer, 1]
        outs: list[torch.Tensor] = []
        for c in flash_tables.calls(plan):
            sees_all = c.max_q == 1 and not call.window  # lets the kernel pack shared heads
            out: Any = varlen_attn(
                q_THD[c.tokens],
                keys,
                values,
                c.cu_q,
                c.cu_k,
                c.max_q,
                c.max_k,
                scale=call.scale,
                window_size=(-1, -1) if sees_all else (call.window - 1, 0),
                enable_gqa=q_THD.shape[1] != k_TND.shape[1],
                seqused_k=c.kv_len_R,
                block_table=c.table_RW,
                num_splits=1,
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

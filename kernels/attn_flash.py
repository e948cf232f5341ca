"""FlashAttention 2 (the extra ``gpu``) over our pages, read in place.

This file owns the one call into ``flash_attn``. It must never import that package before a kernel
is to run. Its paged form wants pages of a multiple of 256 tokens; it has windows and a soft cap,
but no sinks. Signature and demands: flash_attn 2.8, ``flash_attn_varlen_func`` and
``csrc/flash_attn/flash_api.cpp``; tests/device/test_attention_gpu_calls.py holds each call
against them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kernels import flash_tables
from kernels.attention import Declaration, LayerCall, Plan
from kernels.batch import Batch
from kernels.kv_write import write_kv
from protocol.types import KvGeometry


def _missing() -> str | None:
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None


class FlashAttention:
    """Stateless; see the file's head."""

    declaration = Declaration(
        name="flash",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"bfloat16", "float16"}),
        page_multiple=flash_tables.PAGE_MULTIPLE,
        head_dims=flash_tables.HEAD_DIMS,
        window=True,
        softcap=True,
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
        from flash_attn import flash_attn_varlen_func  # not before a kernel is to run

        write_kv(kv, plan.tensors[0], call.layer, k_TND, v_TND)
        keys, values = kv[:, call.layer, 0], kv[:, call.layer, 1]
        outs = [
            flash_attn_varlen_func(
                q_THD[c.tokens],
                keys,
                values,
                cu_seqlens_q=c.cu_q,
                cu_seqlens_k=c.cu_k,
                max_seqlen_q=c.max_q,
                max_seqlen_k=c.max_k,
                softmax_scale=call.scale,
                causal=True,
                window_size=(call.window - 1, 0) if call.window else (-1, -1),
                softcap=call.softcap,
                block_table=c.table_RW,
            )
            for c in flash_tables.calls(plan)
        ]
        out: torch.Tensor = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out

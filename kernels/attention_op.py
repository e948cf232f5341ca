"""The one ``torch.library`` operator through which a model's layers reach our attention.

This file owns the operator ``tandem::paged_attention`` and the function that transformers calls
instead of its own attention. The operator declares the pool as mutated, so that a compiler or a
CUDA graph sees one opaque node with an honest signature. It must never hold state about a step:
the step travels as the keyword argument ``tandem_step`` of the model's forward. (Measured on a CPU:
the operator adds about 35 µs to a layer, 1 ms to a decode step of SmolLM2-135M of 71 ms or more.)

Shape suffixes: T packed tokens, H query heads, N key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from kernels.attention import AttentionBackend, LayerCall, Plan
from kernels.attn_cpu import CpuAttention
from kernels.attn_flash import FlashAttention
from kernels.attn_numba import NumbaAttention
from kernels.attn_reference import ReferenceAttention
from kernels.attn_triton import TritonAttention
from kernels.attn_varlen import VarlenAttention
from protocol.errors import InternalError

NAME = "tandem_paged"  # what transformers knows us by; no mask function has this name

# Best first. ``choose`` takes the first that can serve.
BACKENDS: tuple[AttentionBackend, ...] = (
    TritonAttention(),
    FlashAttention(),
    VarlenAttention(),
    NumbaAttention(),
    CpuAttention(),
    ReferenceAttention(),
)
_BY_NAME = MappingProxyType({b.declaration.name: b for b in BACKENDS})

_LIBRARY: Any = torch.library.Library("tandem", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor[] plan, int[] numbers, "
    "str backend, int layer, float scale, int window, float softcap, Tensor? sinks) -> Tensor"
)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    plan: list[torch.Tensor],
    numbers: list[int],
    backend: str,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    call = LayerCall(layer, scale, window, softcap, sinks)
    return _BY_NAME[backend].attend(q, k, v, kv, Plan(plan, numbers), call)


def _shape_only(q: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(q)


_LIBRARY.impl("paged_attention", _run, "CPU")
_LIBRARY.impl("paged_attention", _run, "CUDA")
torch.library.register_fake("tandem::paged_attention", _shape_only, lib=_LIBRARY)


class Step(Protocol):
    """What a forward pass hands to each of its attention layers."""

    def attend(
        self, q_THD: torch.Tensor, k_TND: torch.Tensor, v_TND: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Attention output ``[T, H, D]`` of one layer."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A real step: the pool, and the step's plan by one backend."""

    kv: torch.Tensor
    plan: Plan
    backend: str

    def attend(
        self, q_THD: torch.Tensor, k_TND: torch.Tensor, v_TND: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Run the operator."""
        out: torch.Tensor = torch.ops.tandem.paged_attention(
            q_THD,
            k_TND,
            v_TND,
            self.kv,
            self.plan.tensors,
            self.plan.numbers,
            self.backend,
            call.layer,
            call.scale,
            call.window,
            call.softcap,
            call.sinks_H,
        )
        return out


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tandem_step: Step | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: tensors ``[1, heads, T, D]`` in, ``[1, T, H, D]`` out."""
    if tandem_step is None:
        raise InternalError("the model did not pass the step on to its attention")
    if attention_mask is not None:
        raise InternalError("the model built an attention mask of its own")
    if not getattr(module, "is_causal", True):
        raise InternalError("its tokens also see the tokens after them")
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks_H=s_aux,
    )
    q_THD, k_TND, v_TND = (x[0].transpose(0, 1) for x in (query, key, value))
    return tandem_step.attend(q_THD, k_TND, v_TND, call)[None], None


AttentionInterface.register(NAME, _attention)

"""What an attention backend declares and offers, and how one is chosen.

This file owns the interface between the model and the kernels that read the paged KV pool. It
must never compute. Backends are stateless: ``plan`` turns a ``Batch`` into tensors and numbers
once per step, ``attend`` uses them in every layer. Both halves of a plan are flat so that the
pair crosses a ``torch.library`` operator unchanged.

Shape suffixes: T packed tokens, H query heads, N key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kernels.batch import Batch
from protocol.errors import ConfigError
from protocol.types import KvGeometry


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a backend can do. The choice is made by this and printed at start."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[str]
    page_multiple: int = 1  # page_size must be a multiple of this
    head_dims: frozenset[int] | None = None  # None: any
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    graph_safe: bool = False
    launches_per_step: int | None = None  # per layer of a mixed step; None: grows with its rows
    missing: Callable[[], str | None] | None = None  # what keeps it from running on this machine


@dataclass(frozen=True, slots=True)
class Needs:
    """What a model asks of its attention, found by one probing pass over all layers.

    ``windows`` are the sizes, in tokens, of the layers that have one; they decide nothing.
    """

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    windows: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's settings. ``window`` 0 means all positions, ``softcap`` 0.0 means none.

    With a window a query sees itself and the ``window - 1`` positions before it. ``sinks_H`` adds
    one logit per head to the softmax's denominator.
    """

    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A step as one backend wants it: built once, handed to every layer."""

    tensors: list[torch.Tensor]
    numbers: list[int]


class AttentionBackend(Protocol):
    """Attention over the pages of a mixed batch, with the write of the new tokens' KV."""

    @property
    def declaration(self) -> Declaration:
        """What this backend supports."""
        ...

    def plan(self, batch: Batch, geometry: KvGeometry, device: torch.device) -> Plan:
        """Everything about the step that does not depend on the layer."""
        ...

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TND: torch.Tensor,
        v_TND: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        call: LayerCall,
    ) -> torch.Tensor:
        """Write ``k``, ``v`` into the pool, then attend; returns ``[T, H, D]``.

        Cells beyond a row's length may hold anything, NaN included, and change nothing.
        """
        ...


def why_not(
    declaration: Declaration, needs: Needs, geometry: KvGeometry, device_type: str
) -> str | None:
    """The first reason why a backend cannot serve this model here, or None."""
    if device_type not in declaration.devices:
        return f"runs on {', '.join(sorted(declaration.devices))}, not on {device_type}"
    if geometry.dtype not in declaration.dtypes:
        return f"no dtype {geometry.dtype}"
    if geometry.page_size % declaration.page_multiple:
        return f"pages must be a multiple of {declaration.page_multiple} tokens"
    if declaration.head_dims is not None and geometry.head_dim not in declaration.head_dims:
        return f"no head size {geometry.head_dim}"
    for feature in ("window", "softcap", "sinks"):
        if getattr(needs, feature) and not getattr(declaration, feature):
            return f"no {feature}"
    return declaration.missing() if declaration.missing else None  # last: asking may import


def choose(
    backends: Sequence[AttentionBackend], needs: Needs, geometry: KvGeometry, device_type: str
) -> tuple[AttentionBackend, str]:
    """The first of ``backends`` (best first) that can serve, and a line that says why.

    Raises ``ConfigError`` naming every backend's reason when none can.
    """
    refused: list[str] = []
    for backend in backends:
        name = backend.declaration.name
        reason = why_not(backend.declaration, needs, geometry, device_type)
        if reason is None:
            passed_over = f" (passed over: {'; '.join(refused)})" if refused else ""
            return backend, f"attention: {name}{passed_over}"
        refused.append(f"{name}: {reason}")
    raise ConfigError(f"no attention backend can serve this model: {'; '.join(refused)}")

"""Loads a transformers model once, with our attention plugged in.

This file owns the loaded weights and the proof that every layer of the model really goes through
our attention with KV of one shape. It must never contain model code: that is transformers' own.
A ``LoadedModel`` lives as long as its worker process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kernels.attention import Needs
from kernels.attention_op import NAME, ProbeStep
from kernels.model_info import Described, describe, fingerprint
from protocol.errors import ConfigError
from protocol.types import KvGeometry, ModelInfo


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory and what it is."""

    module: Any  # a transformers causal LM
    device: torch.device
    needs: Needs
    described: Described
    fingerprint: str

    def geometry(self, page_size: int) -> KvGeometry:
        """The KV cache's shape with pages of ``page_size`` tokens."""
        return self.described.geometry(page_size)

    def info(self, page_size: int) -> ModelInfo:
        """What router and peers must agree on; equals ``read_model_info`` of the folder."""
        return ModelInfo(
            fingerprint=self.fingerprint,
            vocab_size=self.described.vocab_size,
            max_model_len=self.described.max_model_len,
            eos_token_ids=self.described.eos_token_ids,
            geometry=self.geometry(page_size),
        )


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    threads: int = 1,
    device: str = "cpu",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load the folder ``path``. ``threads`` is set for the whole process.

    Weights come memory-mapped from safetensors, never from pickles. Raises ``ConfigError``
    naming the folder and the feature that cannot be served.
    """
    torch.set_num_threads(threads)
    described = describe(path, dtype, max_model_len, device)
    digest = fingerprint(path)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            config=described.config,
            dtype=getattr(torch, described.dtype),
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, KeyError, OSError, RuntimeError) as e:
        raise ConfigError(f"model.path {path}: cannot be loaded: {str(e).splitlines()[0]}") from e
    module: Any = loaded
    module = module.to(device).eval().requires_grad_(False)
    needs = _probe(path, module, described, torch.device(device))
    return LoadedModel(module, torch.device(device), needs, described, digest)


def forward(module: Any, tokens_T: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """One packed forward pass: logits ``[S, vocab]`` of the tokens in ``logits_to_keep``."""
    logits: torch.Tensor = module(input_ids=tokens_T[None], use_cache=False, **kwargs).logits
    return logits[0]


@torch.inference_mode()
def _probe(path: str | Path, module: Any, described: Described, device: torch.device) -> Needs:
    """One pass over two tokens that records which layers reach our attention, and how."""
    probe = ProbeStep()
    tokens_T = torch.zeros(2, dtype=torch.int64, device=device)
    positions_T = torch.arange(2, device=device)
    kind = described.config.model_type
    try:
        forward(
            module,
            tokens_T,
            position_ids=positions_T[None],
            logits_to_keep=tokens_T[:1],
            tandem_step=probe,
        )
    except (TypeError, ValueError, RuntimeError, AttributeError) as e:
        raise ConfigError(
            f"model.path {path}: {kind} does not run with paged attention: {str(e).splitlines()[0]}"
        ) from e
    geometry = described.geometry(1)
    if [c.layer for c in probe.calls] != list(range(geometry.layers)):
        raise ConfigError(
            f"model.path {path}: {kind} has {geometry.layers} layers but "
            f"{len(probe.calls)} of them reach paged attention, which needs all"
        )
    if probe.kv_shapes != {(geometry.kv_heads, geometry.head_dim, geometry.head_dim)}:
        shapes = ", ".join(str(s) for s in sorted(probe.kv_shapes))
        raise ConfigError(
            f"model.path {path}: {kind} has layers of unequal or odd KV shape ({shapes}), which "
            f"paged attention does not support"
        )
    return probe.needs()

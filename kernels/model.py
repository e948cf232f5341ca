"""Loads a transformers model once, with our attention plugged in.

This file owns the loaded weights; ``probe`` proves that they can be served in packed chunks. It
must never contain model code: that is transformers' own.
A ``LoadedModel`` lives as long as its worker process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from kernels.attention import Needs
from kernels.attention_op import NAME
from kernels.gguf_folder import model_folder
from kernels.linear_cpu import speed_up
from kernels.model_info import Described, describe, fingerprint
from kernels.norm_cpu import speed_up_norms
from kernels.parallel import RankPlace, check_divisible
from kernels.probe import probe, reason
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
    ranks: int = 1
    path: Path | None = None  # the folder it came from
    linear: str = ""  # how its linear layers and norms are computed: a line for the start-up log

    def geometry(self, page_size: int) -> KvGeometry:
        """The shape of this rank's part of the KV cache, with pages of ``page_size`` tokens."""
        whole = self.described.geometry(page_size)
        return replace(whole, kv_heads=whole.kv_heads // self.ranks)

    def info(self, page_size: int) -> ModelInfo:
        """What router and peers must agree on; equals ``read_model_info`` of the folder."""
        return ModelInfo(
            fingerprint=self.fingerprint,
            vocab_size=self.described.vocab_size,
            max_model_len=self.described.max_model_len,
            eos_token_ids=self.described.eos_token_ids,
            geometry=self.described.geometry(page_size),
        )


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    threads: int = 1,
    device: str = "cpu",
    max_model_len: int | None = None,
    place: RankPlace | None = None,
) -> LoadedModel:
    """Load the folder or GGUF file ``path``. ``threads`` is set for the whole process.

    ``place``: load this rank's slice; the process has joined the other ranks, and all of them
    load now.

    Weights come memory-mapped from safetensors, never from pickles. Raises ``ConfigError``
    naming the folder and the feature that cannot be served.
    """
    torch.set_num_threads(threads)
    digest = fingerprint(path)
    path = model_folder(path)  # a GGUF file is loaded as what it was converted to
    described = describe(path, dtype, max_model_len, device)
    ranks = 1 if place is None else place.size
    if ranks > 1:
        check_divisible(described, ranks)
    module = _weights(path, described, ranks).to(device).eval().requires_grad_(False)
    linear = f"{speed_up(module)}; {speed_up_norms(module)}"
    try:
        needs = probe(forward, module, described, torch.device(device), ranks)
    except ConfigError as e:
        raise ConfigError(f"model.path {path}: {e.message}") from e
    return LoadedModel(
        module=module,
        device=torch.device(device),
        needs=needs,
        described=described,
        fingerprint=digest,
        ranks=ranks,
        path=Path(path),
        linear=linear,
    )


def _weights(path: str | Path, described: Described, ranks: int) -> Any:
    """The model with its weights. transformers would fill a missing tensor with noise."""
    kind = described.config.model_type
    cut = {"distributed_config": DistributedConfig(tp_size=ranks)} if ranks > 1 else {}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=described.config,
            dtype=getattr(torch, described.dtype),
            attn_implementation=NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **cut,
        )
    except Exception as e:  # foreign model code: whatever it raises means the same
        why = "it takes no attention but its own" if NAME in str(e) else reason(e)
        raise ConfigError(f"model.path {path}: {kind} cannot be loaded: {why}") from e
    module, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model.path {path}: {len(missing)} weights of {kind} are not in its files, "
            f"{missing[0]} for one"
        )
    return module


def forward(module: Any, tokens_T: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """One packed forward pass: logits ``[S, vocab]`` of the tokens in ``logits_to_keep``."""
    logits: torch.Tensor = module(input_ids=tokens_T[None], use_cache=False, **kwargs).logits
    return logits[0]

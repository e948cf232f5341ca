"""Tiny random models on disk, and what plain transformers makes of them: shared by all tests.

This file owns the folders that tests hand to ``model.path`` (config, weights, tokenizer with a
chat template, generation config) and the reference answers to compare with. It must never reach
the network. A folder is written once by ``tiny_llama`` and only read afterwards.

The tokenizer is byte-level: ids 0-3 are special, 4-259 the bytes, the rest two-letter merges. A
random model therefore emits broken UTF-8 now and then, as a good detokenizer test needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

PAD, BOS, EOS, END_OF_TURN = 0, 1, 2, 3
SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>")
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
NO_TOKEN = 1 << 40  # an id that no vocabulary has
MIN_VOCAB = len(SPECIAL) + 256
_ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2}
_ALL_HEADS = {"num_key_value_heads": 4}  # families without shared key-value heads

# Families that must be served, with the settings that bring out what is special about each in a
# model of two layers: window, soft cap, sinks, partial or missing rope, multipliers, experts.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True} | _ALTERNATING,
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 9},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 1.0}
    | _ALTERNATING,
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 40} | _ALTERNATING,
    "phi3": {"sliding_window": 9, "partial_rotary_factor": 0.5},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "starcoder2": {"sliding_window": 9},
    "mixtral": {"sliding_window": 9, "num_local_experts": 4} | _EXPERTS,
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32} | _EXPERTS,
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    | _EXPERTS
    | _ALTERNATING,
    "gpt2": _ALL_HEADS,
    "gpt_neox": _ALL_HEADS,
    "smollm3": {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0]},
    "exaone4": _ALTERNATING,
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "cohere2": {"logit_scale": 0.5} | _ALTERNATING,
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64} | _ALL_HEADS,
}


def tiny_llama(
    folder: Path,
    *,
    vocab: int = 320,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    max_position_embeddings: int = 512,
) -> Path:
    """Write a random llama of this shape with a working tokenizer; returns ``folder``."""
    return tiny_model(
        folder,
        "llama",
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        seed=seed,
        max_position_embeddings=max_position_embeddings,
    )


def tiny_model(
    folder: Path,
    family: str,
    *,
    vocab: int = 320,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    seed: int = 0,
    max_position_embeddings: int = 512,
    max_shard_bytes: int = 10**9,
    **more: object,
) -> Path:
    """Write a random model of any transformers ``model_type``.

    ``more`` goes into its config, over what ``FAMILIES`` says of the family. Without ``kv_heads``
    there are 2, or as many as the family must have.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"a byte-level vocabulary needs at least {MIN_VOCAB} ids, not {vocab}")
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, object] = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        # Wide weights: a narrow start makes all logits equal and every comparison a near tie.
        "initializer_range": 0.25,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    settings |= FAMILIES.get(family, {}) | more
    if kv_heads is not None:
        settings["num_key_value_heads"] = kv_heads
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, END_OF_TURN], pad_token_id=PAD
    )
    model.save_pretrained(folder, max_shard_size=max_shard_bytes)
    _write_tokenizer(folder, vocab, max_position_embeddings)
    return folder


def _write_tokenizer(folder: Path, vocab: int, max_len: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = ((a, b) for a in letters for b in letters)
    while len(ids) < vocab and (pair := next(pairs, None)) is not None:
        ids[pair[0] + pair[1]] = len(ids)
        merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))


@lru_cache(maxsize=4)
def _reference(folder: Path, attention: str, dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    return model.eval()


def reference_generate(
    folder: Path,
    prompt_ids: Sequence[int],
    max_new: int,
    *,
    ignore_eos: bool = True,
    attention: str = "eager",
    dtype: str = "float32",
) -> list[int]:
    """Greedy continuation by transformers' own ``generate``: the new tokens only.

    With ``ignore_eos`` exactly ``max_new`` of them; else an end token, if any, is the last.
    """
    model = _reference(folder, attention, dtype)
    # An id that no token has: with None, or with min_new_tokens, generate would take the end ids
    # of the model's own generation config and forbid them.
    ends = [NO_TOKEN] if ignore_eos else model.generation_config.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=max_new, do_sample=False, eos_token_id=ends, pad_token_id=PAD
    )
    ids = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return out[0, len(prompt_ids) :].tolist()


def reference_logits(
    folder: Path, ids: Sequence[int], attention: str = "eager", dtype: str = "float32"
) -> torch.Tensor:
    """Logits of one plain forward pass over ``ids``: ``[len(ids), vocab]``, float32."""
    with torch.inference_mode():
        return (
            _reference(folder, attention, dtype)(torch.tensor([list(ids)]), use_cache=False)
            .logits[0]
            .float()
        )

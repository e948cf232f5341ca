"""Every model family through packed chunks, against transformers' own generate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny
import torch
from stepping import Sequence, new_runner, step

from cluster.bench.agreement import agree
from kernels.attention import Needs
from kernels.model import LoadedModel, load_model
from kernels.model_info import fingerprint, read_model_info
from protocol.errors import ConfigError

NEW = 10
# What a family's tiny model must ask of its attention; without it the case would show nothing.
NEEDS = {
    **dict.fromkeys(("qwen2", "mistral", "gemma3_text", "phi3", "starcoder2"), Needs(window=True)),
    **dict.fromkeys(("mixtral", "smollm3", "exaone4", "cohere2"), Needs(window=True)),
    "gemma2": Needs(window=True, softcap=True),
    "gpt_oss": Needs(window=True, sinks=True),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.5,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def answers(model: LoadedModel, seed: int = 1) -> list[Sequence]:
    """Two prompts in chunks across page boundaries; the second joins when the first is half way.

    Their steps mix prompt chunks of both, prompt with decode, and decode with decode; the first
    is several windows long.
    """
    rng = random.Random(seed)
    pages = rng.sample(range(64), 24)
    long = Sequence("long", rng.choices(range(4, 320), k=27), pages[:12])
    short = Sequence("short", rng.choices(range(4, 320), k=10), pages[12:])
    runner = new_runner(model)
    for sizes in ((7,), (5,), (1, 3), (14, 6)):
        step(runner, dict(zip((long, short), sizes, strict=False)))
    while live := {s: 1 for s in (long, short) if len(s.output) < NEW}:
        step(runner, live)
    return [long, short]


def check(folder: Path, model: LoadedModel, dtype: str = "float32") -> None:
    """Every answer of the model agrees with transformers' in the same dtype."""
    for s in answers(model):
        prompt = s.tokens[: s.n_prompt]
        want = tiny.reference_generate(folder, prompt, NEW, dtype=dtype)
        verdict = agree(
            prompt,
            s.output,
            want,
            lambda ids: tiny.reference_logits(folder, ids, dtype=dtype),
            dtype=dtype,
        )
        assert verdict, (s.id, verdict.reason)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_family_agrees_with_transformers(tmp_path: Path, family: str) -> None:
    folder = tiny.tiny_model(tmp_path / family, family)
    model = load_model(folder)
    assert model.needs == NEEDS.get(family, Needs())
    check(folder, model)


def test_hybrid_family_without_a_recurrent_layer_is_served(tmp_path: Path) -> None:
    folder = tiny.tiny_model(
        tmp_path / "granite4",
        "granitemoehybrid",
        layer_types=["attention", "attention"],
        num_local_experts=0,
        shared_intermediate_size=64,
    )
    check(folder, load_model(folder))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_family_agrees_in_half_precision(tmp_path: Path, family: str, dtype: str) -> None:
    folder = tiny.tiny_model(tmp_path / family, family)
    check(folder, load_model(folder, dtype=dtype), dtype)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda r: r["rope_type"])
def test_rope_that_is_the_same_at_every_length(tmp_path: Path, rope: dict[str, object]) -> None:
    folder = tiny.tiny_model(tmp_path / "llama", "llama", rope_parameters=rope)
    check(folder, load_model(folder))


def test_longrope_is_served_as_far_as_it_stands_still(tmp_path: Path) -> None:
    own = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    folder = tiny.tiny_model(tmp_path / "phi3", "phi3", **own)
    sentence = r"'longrope' is not supported beyond 64 positions: set model.max_model_len"
    for too_long in (None, 65):
        with pytest.raises(ConfigError, match=sentence):
            load_model(folder, max_model_len=too_long)
        with pytest.raises(ConfigError, match=sentence):
            read_model_info(folder, "auto", 16, too_long)
    check(folder, load_model(folder, max_model_len=64))


def test_weights_in_two_files(tmp_path: Path) -> None:
    whole = tiny.tiny_model(tmp_path / "whole", "llama")
    size = (whole / "model.safetensors").stat().st_size
    parts = tiny.tiny_model(tmp_path / "parts", "llama", max_shard_bytes=size * 2 // 3)
    assert len(list(parts.glob("*.safetensors"))) == 2
    assert (parts / "model.safetensors.index.json").is_file()
    model = load_model(parts)
    check(whole, model)
    assert model.info(16) == read_model_info(parts, "auto", 16, None)
    before = fingerprint(parts)
    second = max(parts.glob("*.safetensors"))
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    assert fingerprint(parts) != before
    second.unlink()
    with pytest.raises(ConfigError, match=f"{second.name} is missing"):
        load_model(parts)

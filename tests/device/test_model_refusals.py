"""Models that cannot be served, though they may load: each says why in one sentence at load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kernels.model import load_model
from kernels.model_info import read_model_info
from protocol.errors import ConfigError

OTHERWISE = "depends on its neighbours otherwise than by attention"
MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
LLAMA4 = {
    "head_dim": 16,
    "attention_chunk_size": 8,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
}
PHIMOE = {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
BART = {"kv_heads": 4, "decoder_layers": 2, "decoder_attention_heads": 4}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def refusal(folder: Path, **settings: object) -> str:
    """The sentence of ``load_model``, which must be one line that names folder and field."""
    with pytest.raises(ConfigError) as e:
        load_model(folder, **settings)
    assert e.value.message.startswith(f"model.path {folder}: ") and e.value.exit_code == 2
    assert "\n" not in e.value.message
    return e.value.message.removeprefix(f"model.path {folder}: ")


def config_only(folder: Path, family: str, **settings: object) -> Path:
    """A folder with a config of ``family`` and weights that nobody should get to read."""
    AutoConfig.for_model(family, **settings).save_pretrained(folder)
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("family", "complaint"),
    [
        ("t5", "t5 is an encoder-decoder, not supported"),
        ("bart", "bart is an encoder-decoder, not supported"),
        ("deepseek_v3", "deepseek_v3 uses multi-head latent attention, not supported"),
        ("mamba", "the config of mamba has no num_attention_heads"),
    ],
)
def test_refused_by_its_config_alone(tmp_path: Path, family: str, complaint: str) -> None:
    """Also by ``read_model_info``, so a router says it before a worker reads any weights."""
    folder = config_only(tmp_path / family, family)
    assert refusal(folder) == complaint
    with pytest.raises(ConfigError, match=complaint):
        read_model_info(folder, "auto", 16, 64)


@pytest.mark.parametrize(
    ("family", "settings", "complaint"),
    [
        # Loads, pages and answers wrongly, if it is let.
        ("bert", {"kv_heads": 4}, "its tokens also see the tokens after them"),
        ("bart", BART, OTHERWISE),
        ("falcon_h1", MAMBA, "keeps a recurrent state besides its KV"),
        ("llama4_text", LLAMA4, "'chunked_attention' over 8 positions that reach .* over all"),
        ("phimoe", PHIMOE, "'sliding_attention' over 8 positions that reach .* over all"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"was reached by \[1\]"),
        # Does not reach our attention, or not as it must.
        ("mamba", {"num_attention_heads": 4}, "keeps a recurrent state besides its KV"),
        ("bloom", {"kv_heads": 4}, "which needs each of them once and in order, was reached by no"),
        ("falcon", {"kv_heads": 4}, "it takes no attention but its own"),
        ("diffllama", {}, r"was reached by \[0, 0, 1, 1\]"),
        ("nemotron", {}, "did not pass the step on to its attention"),
        ("doge", {}, "built an attention mask of its own"),
        ("gpt_bigcode", {"kv_heads": 4}, r"unequal or odd KV shape \(\(1, 16, 16\)\)"),
        (
            "whisper",
            BART | {"d_model": 64},
            r"outputs of shape \(2, 320\) for one token",
        ),
    ],
)
def test_refused_after_a_look_at_the_model(
    tmp_path: Path, family: str, settings: dict[str, object], complaint: str
) -> None:
    folder = tiny.tiny_model(tmp_path / family, family, **settings)
    sentence = refusal(folder)
    assert family in sentence and re.search(complaint, sentence), sentence


def test_mask_as_wide_as_the_longest_sequence_is_no_obstacle(tmp_path: Path) -> None:
    for family, settings in (("llama4_text", LLAMA4), ("phimoe", PHIMOE)):
        folder = tiny.tiny_model(tmp_path / family, family, **settings)
        assert load_model(folder, max_model_len=8).described.max_model_len == 8


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("")
    assert refusal(other) == "a file, where a Hugging Face folder or a .gguf file is needed"


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    """transformers would fill them with noise and only warn."""
    folder = tiny.tiny_llama(tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    complaint = "2 weights of llama are not in its files, lm_head.weight for one"
    assert refusal(folder) == complaint


def test_weights_of_another_shape(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 60}))
    assert refusal(folder).startswith("llama cannot be loaded: ")


def test_config_that_its_own_class_refuses(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": "four"}))
    assert "its config is damaged" in refusal(folder)

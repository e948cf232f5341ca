"""What a model folder says about itself, and the sentences for folders that cannot be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from kernels.model import load_model
from kernels.model_info import fingerprint, read_model_info
from protocol.errors import ConfigError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_info_from_headers_equals_info_of_the_loaded_model(llama: Path) -> None:
    info = read_model_info(llama, "auto", 16, None)
    assert info == load_model(llama).info(16)
    assert info.vocab_size == 320 and info.max_model_len == 512
    assert info.eos_token_ids == (tiny.EOS, tiny.END_OF_TURN)
    g = info.geometry
    assert (g.layers, g.kv_heads, g.head_dim, g.page_size, g.dtype) == (2, 2, 16, 16, "float32")


def test_fingerprint_ignores_the_place_and_sees_the_weights(llama: Path, copy: Path) -> None:
    edit(copy, _name_or_path="elsewhere", transformers_version="9.9")
    assert fingerprint(copy) == fingerprint(llama)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert fingerprint(copy) != fingerprint(llama)


def test_fingerprint_sees_the_config(llama: Path, copy: Path) -> None:
    edit(copy, rms_norm_eps=1e-5)
    assert fingerprint(copy) != fingerprint(llama)


def test_dtype_and_length(llama: Path) -> None:
    info = read_model_info(llama, "bfloat16", 16, 100)
    assert info.geometry.dtype == "bfloat16" and info.max_model_len == 100
    assert read_model_info(llama, "auto", 16, None, "cuda").geometry.dtype == "float32"
    with pytest.raises(ConfigError, match=r"1000 is longer than the 512 positions"):
        read_model_info(llama, "auto", 16, 1000)
    with pytest.raises(ConfigError, match="float8"):
        read_model_info(llama, "float8", 16, None)


def test_half_precision_model_runs(llama: Path) -> None:
    model = load_model(llama, dtype="bfloat16")
    assert next(model.module.parameters()).dtype == torch.bfloat16


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder") as e:
        load_model(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in e.value.message and e.value.exit_code == 2


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [("config.json", "no config.json"), ("model.safetensors", "no .safetensors weights")],
)
def test_missing_file(copy: Path, missing: str, complaint: str) -> None:
    (copy / missing).unlink()
    with pytest.raises(ConfigError, match=complaint):
        read_model_info(copy, "auto", 16, None)


@pytest.mark.parametrize("cut", [1, 4000, 10**9])
def test_half_a_weights_file(copy: Path, cut: int) -> None:
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(ConfigError, match=r"cut short|not a whole"):
        read_model_info(copy, "auto", 16, None)


def test_missing_shard(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"model-00002\.safetensors is missing"):
        read_model_info(copy, "auto", 16, None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
    ],
)
def test_unsupported_model(copy: Path, changes: dict[str, object], complaint: str) -> None:
    edit(copy, **changes)
    with pytest.raises(ConfigError, match=complaint):
        read_model_info(copy, "auto", 16, None)


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        read_model_info(copy, "auto", 16, None)


def test_model_whose_layers_do_not_reach_paged_attention(tmp_path: Path) -> None:
    """A recurrent model loads in transformers but has no KV to page."""
    folder = tiny.tiny_model(
        tmp_path / "mamba", "mamba", state_size=4, num_attention_heads=4, expand=2
    )
    with pytest.raises(ConfigError, match="mamba"):
        load_model(folder)

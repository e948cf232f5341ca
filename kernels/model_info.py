"""What a model folder says about itself, read without loading a weight.

This file owns the reading of config, generation config and safetensors headers, the fingerprint
over them, and the plain sentences for folders that cannot be served. It must never allocate
weights: routers and the command line read models through here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.gguf_folder import gguf_file, gguf_fingerprint, model_folder
from protocol.errors import ConfigError
from protocol.types import DTYPE_BYTES, KvGeometry, ModelInfo

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class Described:
    """A folder's config (transformers' object) and what was derived from it."""

    config: Any
    dtype: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]

    def geometry(self, page_size: int) -> KvGeometry:
        """The KV cache's shape with pages of ``page_size`` tokens."""
        text = self.config.get_text_config()
        heads = int(text.num_attention_heads)
        return KvGeometry(
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            page_size=page_size,
            dtype=self.dtype,
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return int(self.config.get_text_config().vocab_size)


def read_model_info(
    path: str | Path,
    dtype: str,
    page_size: int,
    max_model_len: int | None,
    device: str = "cpu",
) -> ModelInfo:
    """The ``ModelInfo`` of a folder, from its config and headers only.

    ``dtype`` and ``max_model_len`` as in the configuration's ``model`` section. Raises
    ``ConfigError`` naming the folder and what is wrong with it.
    """
    described = describe(path, dtype, max_model_len, device)
    return ModelInfo(
        fingerprint=fingerprint(path),
        vocab_size=described.vocab_size,
        max_model_len=described.max_model_len,
        eos_token_ids=described.eos_token_ids,
        geometry=described.geometry(page_size),
    )


def describe(
    path: str | Path, dtype: str, max_model_len: int | None, device: str = "cpu"
) -> Described:
    """Read and check the config of a folder. Raises ``ConfigError``."""
    folder = model_folder(path)
    weight_files(folder)
    raw = _read_json(folder / "config.json")
    config = _transformers_config(folder, raw)
    text = config.get_text_config()
    _refuse_unsupported(folder, raw, text)
    length = _max_model_len(folder, text, max_model_len)
    _refuse_moving_rope(folder, text, length)
    return Described(
        config=config,
        dtype=_dtype(folder, dtype, raw, device),
        max_model_len=length,
        eos_token_ids=_eos_token_ids(folder, raw),
    )


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files. Raises ``ConfigError`` when it is no model folder."""
    if folder.is_file():
        raise ConfigError(
            f"model.path {folder}: a file, where a Hugging Face folder or a .gguf file is needed"
        )
    if not folder.is_dir():
        raise ConfigError(f"model.path {folder}: no such folder")
    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path {folder}: no config.json, so not a Hugging Face folder")
    if not files:
        raise ConfigError(f"model.path {folder}: no .safetensors weights (pickles are not read)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(_read_json(index).get("weight_map", {}).values())
        missing = sorted(named - {f.name for f in files})
        if missing:
            raise ConfigError(f"model.path {folder}: {missing[0]} is missing")
    return files


def fingerprint(path: str | Path) -> str:
    """SHA-256 (32 hex digits of it) over config, headers, sizes and sampled bytes of weights; of
    a GGUF file over itself, whatever it was converted to."""
    if (source := gguf_file(path)) is not None:
        return gguf_fingerprint(source)
    folder = Path(path)
    files = weight_files(folder)
    config = _read_json(folder / "config.json")
    for name in ("_name_or_path", "transformers_version"):  # says where and who, not what
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as f:
            digest.update(_header(file, f.read(8), size))
            for i in range(_SAMPLES_PER_FILE):
                f.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES_PER_FILE - 1))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _header(file: Path, length_bytes: bytes, size: int) -> bytes:
    """A file's safetensors header, after checking that all its tensors are in the file."""
    n = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or n > size - 8:
        raise ConfigError(f"{file}: not a whole safetensors file")
    with file.open("rb") as f:
        f.seek(8)
        raw = f.read(n)
    try:
        tensors = {k: v for k, v in json.loads(raw).items() if k != "__metadata__"}
        end = max((int(t["data_offsets"][1]) for t in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{file}: its safetensors header cannot be read") from e
    if size != 8 + n + end:
        raise ConfigError(f"{file}: {size} bytes instead of {8 + n + end}: cut short or damaged")
    return raw


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file}: not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return value


def _transformers_config(folder: Path, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = raw.get("model_type", "(none)")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # foreign code: each config class checks itself in its own way
        raise ConfigError(
            f"model.path {folder}: transformers does not know model type {kind!r} or its config "
            f"is damaged: {' '.join(str(e).split())[:200]}"
        ) from e


def _refuse_unsupported(folder: Path, raw: dict[str, Any], text: Any) -> None:
    kind = raw.get("model_type", "(none)")
    if raw.get("quantization_config"):
        raise ConfigError(f"model.path {folder}: quantised checkpoints are not supported")
    if raw.get("is_encoder_decoder") or getattr(text, "is_encoder_decoder", False):
        raise ConfigError(f"model.path {folder}: {kind} is an encoder-decoder, not supported")
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            f"model.path {folder}: {kind} uses multi-head latent attention, not supported"
        )
    try:
        shape = {n: getattr(text, n, None) for n in (*_NEEDED, "head_dim", "num_key_value_heads")}
    except RuntimeError as e:  # transformers' way to say that the layers differ in one of them
        raise ConfigError(
            f"model.path {folder}: the layers of {kind} differ in shape, not supported"
        ) from e
    for name in _NEEDED:
        if not isinstance(shape[name], int):
            raise ConfigError(f"model.path {folder}: the config of {kind} has no {name}")


def _refuse_moving_rope(folder: Path, text: Any, max_model_len: int) -> None:
    """Refuse a rope that is another one in a long batch; a short limit keeps longrope still."""
    rope = getattr(text, "rope_parameters", None) or {}
    for settings in [rope, *rope.values()]:  # some families have one rope per kind of layer
        variant = settings.get("rope_type") if isinstance(settings, dict) else None
        if variant == "dynamic":
            raise ConfigError(f"model.path {folder}: rope variant 'dynamic' is not supported")
        if variant == "longrope":
            still = int(settings.get("original_max_position_embeddings") or 0)
            if max_model_len > still:
                raise ConfigError(
                    f"model.path {folder}: rope variant 'longrope' is not supported beyond "
                    f"{still} positions: set model.max_model_len to at most that"
                )


def _dtype(folder: Path, dtype: str, raw: dict[str, Any], device: str) -> str:
    if dtype == "auto":
        if device == "cpu":
            return "float32"
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"model.path {folder}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
        )
    return dtype


def _max_model_len(folder: Path, text: Any, asked: int | None) -> int:
    own = getattr(text, "max_position_embeddings", None)
    if own is None and asked is None:
        raise ConfigError(f"model.path {folder}: set model.max_model_len, the config has no limit")
    if own is not None and asked is not None and asked > own:
        raise ConfigError(
            f"model.max_model_len {asked} is longer than the {own} positions that {folder} knows"
        )
    return int(asked or own or 0)


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The generation config's end tokens and the config's, in that order, each once."""
    generation = folder / "generation_config.json"
    sources = [_read_json(generation)] if generation.is_file() else []
    ids: list[int] = []
    for source in [*sources, raw]:
        found = source.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(int(i) for i in ids))

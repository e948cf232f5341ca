"""Turns one GGUF file into a safetensors folder that transformers loads by itself.

Runs as a process of its own (``python -m kernels.gguf_convert GGUF FOLDER``), because it
needs the whole model in memory twice and prints progress bars that nobody asked for. It must
never decide where a model lives or whether a folder is complete: ``gguf_folder`` and
``cluster.cli.model_store`` do.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write config, float32 weights, tokenizer and generation config of ``gguf`` to ``folder``.

    The head's weights are left out when they are the embedding's (tied). Raises what
    transformers raises for a file that it cannot read.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    _split_digits_if_asked(gguf, tokenizer)

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    config = model.config
    del config.quantization_config  # the weights written are plain float32
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits_if_asked(gguf: Path, tokenizer: object) -> None:
    """SmolLM reads every digit as a token of its own; transformers' GGUF reader drops that."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    kind = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm":
        backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

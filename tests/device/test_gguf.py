"""A GGUF file as ``model.path``: converted once, then served like any folder."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from stepping import Sequence, new_runner, step
from tiny_gguf import write_gguf

from cluster.cli.main import run
from cluster.control.checks import check_model, missing_model, with_real_paths
from kernels.gguf_folder import CACHE_VARIABLE, gguf_file, gguf_fingerprint, model_folder
from kernels.model import load_model
from kernels.model_info import fingerprint, read_model_info
from protocol.config import ModelConfig, TandemConfig
from protocol.errors import ConfigError
from router.text import TextCodec


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny")


@pytest.fixture(scope="module")
def file(llama: Path) -> Path:
    return write_gguf(llama, llama.parent / "tiny-F32.gguf")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))


def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder / "gguf"


def write(file: Path, folder: Path) -> None:
    """Stands in for the conversion where only the copy's life is looked at."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"of": file.name}))


def test_weights_tokens_and_answers_are_the_folders(llama: Path, file: Path) -> None:
    folder = model_folder(file)
    ours, theirs = (load_file(f / "model.safetensors") for f in (folder, llama))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    text = "The rest of it <|end|> twice"
    codec = TextCodec(file)
    assert codec.encode(text) == TextCodec(llama).encode(text)

    model = load_model(file)
    prompt = [5, 77, 200, 31, 9]
    seq = Sequence("a", prompt, list(range(8)))
    runner = new_runner(model)
    step(runner, {seq: len(prompt)})
    for _ in range(7):
        step(runner, {seq: 1})
    assert seq.output == tiny.reference_generate(llama, prompt, 8)


def test_fingerprint_is_the_files(llama: Path, file: Path, cache: Path) -> None:
    assert fingerprint(file) == gguf_fingerprint(file) == load_model(file).info(4).fingerprint
    assert read_model_info(file, "auto", 4, None) == load_model(file).info(4)
    assert fingerprint(file) != fingerprint(llama)
    assert len(list((cache / "gguf").glob("tiny-F32-*"))) == 1


def test_a_folder_with_one_gguf(file: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(file)
    assert gguf_file(tmp_path) == tmp_path / "model.gguf"
    assert fingerprint(tmp_path) == fingerprint(file)


def test_the_command_line_takes_it(file: Path, tmp_path: Path, capsys) -> None:
    config = TandemConfig(model=ModelConfig(path=str(file)))
    assert missing_model(config) == ""
    check_model(config)
    assert with_real_paths(config).model.served_name == "tiny-F32"
    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"model: {{path: {file}}}\n")
    assert run(["config", "check", str(yaml)]) == 0
    out, err = capsys.readouterr()
    assert "valid" in out and "note" not in err


@pytest.mark.long
def test_it_is_converted_once_however_many_start(file: Path, tmp_path: Path, monkeypatch) -> None:
    cache = own_cache(monkeypatch, tmp_path)
    program = (
        "import sys; from kernels.gguf_folder import model_folder; print(model_folder(sys.argv[1]))"
    )
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(file)], stdout=-1, stderr=-1, text=True
        )
        for _ in range(3)
    ]
    said = [p.communicate(timeout=120) for p in starts]
    assert [p.returncode for p in starts] == [0, 0, 0]
    assert len({out for out, _ in said}) == 1
    assert sum("converting" in err for _, err in said) == 1
    assert [f.name for f in cache.iterdir() if f.is_dir()] == [Path(said[0][0].strip()).name]


def test_what_a_killed_conversion_left_is_cleared(file: Path, tmp_path: Path, monkeypatch) -> None:
    cache = own_cache(monkeypatch, tmp_path)
    name = model_folder(file, convert=write).name
    (cache / name / "config.json").unlink()
    (cache / name).rename(cache / f".{name}-halfdone")
    assert model_folder(file, convert=write) == cache / name
    assert not (cache / f".{name}-halfdone").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_cannot_be_written(code: int, file: Path, tmp_path: Path, monkeypatch) -> None:
    cache = own_cache(monkeypatch, tmp_path)

    def full(_file: Path, folder: Path) -> None:
        folder.mkdir()
        raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError) as e:
        model_folder(file, convert=full)
    assert os.strerror(code) in e.value.message and CACHE_VARIABLE in e.value.message
    assert e.value.field == "model.path"
    assert not [f for f in cache.iterdir() if f.is_dir()]


def test_a_cache_that_is_a_file(file: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "gguf").write_text("")
    own_cache(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=CACHE_VARIABLE):
        model_folder(file)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["a.gguf", "b.gguf"], r"2 GGUF files \(a.gguf, b.gguf\): name one"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "part of a split GGUF file"),
    ],
)
def test_folders_of_several(names: list[str], complaint: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ConfigError, match=complaint):
        load_model(tmp_path)


def test_not_a_gguf_file_and_a_damaged_one(file: Path, tmp_path: Path, monkeypatch) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + bytes(100))
    with pytest.raises(ConfigError, match="not a GGUF file"):
        load_model(other)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ConfigError, match=r"cut.gguf: this GGUF file cannot be served: "):
        load_model(cut)
    assert not list((tmp_path / "cache" / "gguf").glob("[!.]*"))

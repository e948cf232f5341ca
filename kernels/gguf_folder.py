"""Which folder serves a ``model.path``: itself, or the converted copy of a GGUF file.

This file owns the cache of converted models. A GGUF file holds quantised blocks that no matrix
product reads; it is turned once into plain float32 safetensors, which every worker of a host maps
into memory and shares, and which a later start finds ready. It must never show half a copy under a
final name, never change the GGUF file, and never import torch: the conversion runs in a process of
its own.

Life of a copy:
 1. Its name says what it is of: the file's name and its fingerprint (size and sampled bytes), so
    another file never finds it.
 2. Whoever needs it first takes the lock beside it and converts into a temporary folder; the
    others wait for the lock and find it done.
 3. The temporary folder is renamed: the one step that makes it visible. It stays until somebody
    deletes it, which is safe while no worker is starting.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from protocol.errors import ConfigError

CACHE_VARIABLE = "TANDEM_CACHE_DIR"
_MAGIC = b"GGUF"
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_FORM = 1  # of what the conversion writes; a new one makes new copies
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")

_log = logging.getLogger(__name__)

Convert = Callable[[Path, Path], None]  # (GGUF file, folder that is written)


def gguf_file(path: str | Path) -> Path | None:
    """The GGUF file that ``path`` means: itself, or the only one of a folder without safetensors.

    None for everything else. Raises ``ConfigError`` where a folder holds several, or a part of a
    split one.
    """
    place = Path(path).expanduser()
    if place.is_file():
        found = [place] if place.suffix == ".gguf" else []
    elif place.is_dir() and not any(place.glob("*.safetensors")):
        found = sorted(place.glob("*.gguf"))
    else:
        found = []
    if not found:
        return None
    if any(_SPLIT.search(f.stem) for f in found):
        raise ConfigError(
            f"model.path {place}: {found[0].name} is a part of a split GGUF file, which is not "
            f"supported: merge the parts first",
            field="model.path",
        )
    if len(found) > 1:
        names = ", ".join(f.name for f in found)
        raise ConfigError(
            f"model.path {place}: holds {len(found)} GGUF files ({names}): name one of them",
            field="model.path",
        )
    return found[0]


def gguf_fingerprint(file: Path) -> str:
    """SHA-256 (32 hex digits of it) over size and sampled bytes. Raises ``ConfigError``."""
    digest = hashlib.sha256()
    try:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as f:
            if f.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"{file}: not a GGUF file", field="model.path")
            for i in range(_SAMPLES):
                f.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(f.read(_SAMPLE_BYTES))
    except OSError as e:
        raise ConfigError(f"{file}: cannot be read: {e.strerror}", field="model.path") from e
    return digest.hexdigest()[:32]


def cache_folder() -> Path:
    """Where converted models are kept: ``TANDEM_CACHE_DIR``, else the user's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser() / "gguf"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tandem" / "gguf"


def model_folder(
    path: str | Path,
    say: Callable[[str], None] = _log.warning,
    convert: Convert | None = None,
) -> Path:
    """The Hugging Face folder to load for ``path``; a GGUF file is converted if need be.

    ``say`` is told of what takes long. Safe to call from several processes at once. Raises
    ``ConfigError`` for a file that cannot be converted and a cache that cannot be written.
    """
    file = gguf_file(path)
    if file is None:
        return Path(path).expanduser()
    cache = cache_folder()
    final = cache / f"{file.stem}-{gguf_fingerprint(file)[:16]}-{_FORM}"
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{final.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():
                _make(file, final, convert or _convert_in_process, say)
    except OSError as e:
        raise ConfigError(
            f"model.path {file}: its converted copy cannot be written to {cache}: "
            f"{e.strerror or e}; set {CACHE_VARIABLE} to a folder with room",
            field="model.path",
        ) from e
    return final


def _make(file: Path, final: Path, convert: Convert, say: Callable[[str], None]) -> None:
    for old in final.parent.glob(f".{final.name}-*"):  # left by a process that was killed
        shutil.rmtree(old)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        say(f"converting {file.name} to {final}: once, about a minute per GB")
        convert(file, work / "model")
        (work / "model").rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert_in_process(file: Path, folder: Path) -> None:
    """Run ``gguf_convert``; the last line that it wrote is the cause of a failure."""
    command = [sys.executable, "-m", "kernels.gguf_convert", str(file.resolve()), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (root, os.environ.get("PYTHONPATH")) if p
    )
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    if "No space left" in done.stderr:
        raise OSError(28, "no space left on the device")
    if "ModuleNotFoundError" in done.stderr or "ImportError" in done.stderr:
        last = f"{last}: reading GGUF needs 'pip install tandem-serve[gguf]'"
    raise ConfigError(
        f"model.path {file}: this GGUF file cannot be served: {last[:300]}", field="model.path"
    )

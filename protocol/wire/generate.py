"""Makes the checked-in protobuf and gRPC code of this folder from its ``.proto`` files.

Owns the pin of the generator: the oldest grpcio-tools whose code the declared minimum of grpcio
and protobuf can run. It never generates with the project's own environment, whose newer tools
would write code that the minimum cannot load. The environment is made under ``.tools`` on first
use. Run as ``python -m protocol.wire.generate [FOLDER]``; FOLDER defaults to the repository.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

GRPCIO_TOOLS = "grpcio-tools==1.76.0"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def repository() -> Path:
    """The folder that holds ``protocol/``."""
    return Path(__file__).resolve().parents[2]


def generator(root: Path) -> Path:
    """The pinned environment's interpreter; made when it is not there."""
    home = root / ".tools" / "protoc-venv"
    python = home / "bin" / "python"
    ready = home / f"{GRPCIO_TOOLS}.ready"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", GRPCIO_TOOLS], check=True)
        ready.touch()
    return python


def generate(target: Path) -> list[Path]:
    """Write ``protocol/wire/*_pb2*`` under ``target``; returns the files written.

    The import path inside protoc is the repository, so that generated modules import each other
    as ``protocol.wire.x_pb2`` and need no correction afterwards.
    """
    root = repository()
    protos = sorted(str(p.relative_to(root)) for p in (root / "protocol" / "wire").glob("*.proto"))
    outputs = (f"--python_out={target}", f"--pyi_out={target}", f"--grpc_python_out={target}")
    subprocess.run(
        [generator(root), "-m", "grpc_tools.protoc", "-I.", *outputs, *protos],
        cwd=root,
        check=True,
    )
    folder = target / "protocol" / "wire"
    return sorted(p for p in folder.iterdir() if p.name.endswith(SUFFIXES))


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else repository())

"""The checked-in protobuf code is what the pinned generator makes of the protos."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from protocol.wire.generate import GRPCIO_TOOLS, generate, generator, repository


def test_every_proto_has_its_code_from_the_pinned_generator() -> None:
    folder = repository() / "protocol" / "wire"
    version = GRPCIO_TOOLS.split("==")[1]
    for proto in folder.glob("*.proto"):
        code = (folder / f"{proto.stem}_pb2_grpc.py").read_text()
        assert f"GRPC_GENERATED_VERSION = '{version}'" in code
        assert (folder / f"{proto.stem}_pb2.pyi").exists()


def test_the_declared_minimum_can_run_the_generated_code() -> None:
    """Code of grpcio-tools x needs grpcio >= x and a protobuf no older than its own."""
    declared = dict(
        match.groups()
        for line in requires("tandem-serve") or ()
        if (match := re.match(r"(grpcio|protobuf)[^>]*>=([\d.]+)", line))
    )
    assert GRPCIO_TOOLS.split("==")[1].startswith(f"{declared['grpcio']}.")
    code = (repository() / "protocol" / "wire" / "session_pb2.py").read_text()
    made_by = re.search(r"# Protobuf Python Version: ([\d.]+)", code)
    assert made_by is not None

    def parts(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    assert parts(made_by[1]) <= parts(declared["protobuf"])


@pytest.mark.long
def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    for made in generate(tmp_path):
        kept = repository() / "protocol" / "wire" / made.name
        assert made.read_bytes() == kept.read_bytes(), f"{made.name}: run `make proto`"


@pytest.mark.long
def test_the_generated_code_loads_with_the_oldest_supported_versions(tmp_path: Path) -> None:
    """In the generator's own environment, pinned back to the declared minimum."""
    oldest = tmp_path / "oldest"
    subprocess.run([generator(repository()), "-m", "venv", oldest], check=True)
    python = oldest / "bin" / "python"
    pins = ["grpcio==1.76.0", "protobuf==6.33.5"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins], check=True)
    modules = [p.stem for p in (repository() / "protocol" / "wire").glob("*_pb2*.py")]
    code = "; ".join(f"import protocol.wire.{module}" for module in modules)
    subprocess.run([python, "-W", "error", "-c", code], check=True, cwd=repository())
    assert sys.version_info[:2] >= (3, 11)

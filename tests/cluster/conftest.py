"""One HOME, one tiny model and one served cluster for a whole module of tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import Served, write_config
from tiny import tiny_llama


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HOME that only the tests of one module know."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def served(home: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A cluster of one prefill and one decode worker, ready."""
    name = "m" + request.module.__name__.rpartition("_")[2]
    cluster = Served(home, write_config(home, model, name))
    try:
        cluster.where = cluster.ready()
        yield cluster
    finally:
        cluster.close()

"""Random requests through a tiny model whose pool holds little more than one of them: every answer
is the plain model's, every page comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from random_requests import POOL, Reference, Spec, Storm, complaint, make_specs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.tiny_llama(tmp_path_factory.mktemp("storm") / "tiny", vocab=320)


@pytest.fixture(scope="module")
def specs(folder: Path) -> Callable[[int], list[Spec]]:
    reference = Reference(folder, (tiny.EOS, tiny.END_OF_TURN))
    return cache(lambda n: make_specs(reference, random.Random(7), n))


def weather(folder: Path, specs: list[Spec], n: int, seed: int, host_pages: int) -> Storm:
    """Everything that must hold after a storm."""
    storm = Storm(folder, seed, host_pages)
    storm.run(specs, n)
    assert len(storm.ended) == n
    wrong = [c for asked in storm.ended if (c := complaint(asked))]
    assert not wrong, f"{len(wrong)} of {n} are wrong, the first: {wrong[0]}"
    storm.role.check_integrity()
    storm.pages.check_integrity()
    load = storm.role.load(storm.now)
    assert storm.role.is_idle() and load.free_pages == load.total_pages == POOL
    # It was a storm: nothing of what it is about stayed away.
    assert storm.counts["steps"] > n
    assert any(a.cached for a in storm.ended), "no prefix was found"
    assert sum(v for k, v in storm.counts.items() if k.startswith("preemptions")) > n / 50
    assert bool(storm.counts["preemptions offload"]) == bool(host_pages)
    assert any(a.refused for a in storm.ended) and any(a.cancelled for a in storm.ended)
    return storm


def test_three_hundred_requests(folder, specs):
    weather(folder, specs(24), 300, 3, 40)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_requests(folder, specs):
    weather(folder, specs(150), 10_000, 11, 0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_thousand_requests_with_pages_in_host_memory(folder, specs):
    weather(folder, specs(80), 2_000, 12, 40)

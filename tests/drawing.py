"""Draws from rows of logits by hand, with the compiled backend or with torch. For device tests.

This file owns the shortest way to a ``Sampler``. It must never judge what was drawn.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.grammar import TokenTable
from kernels.sampling import Drawn, Sampler
from kernels.settings import Draw
from protocol.types import SamplingParams

BACKENDS = {"compiled": True, "torch": False}
CPU = torch.device("cpu")


def params(**settings) -> SamplingParams:
    return SamplingParams(max_tokens=10, **settings)


def drawn(**settings) -> SamplingParams:
    return params(**({"temperature": 1.0} | settings))


def logits(rows: int, seed: int = 0, vocab: int = 5000) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def in_order(draws: list[Draw]) -> list[Draw]:
    """Each draw from the row of its own place."""
    return [replace(d, row=i) for i, d in enumerate(draws)]


def draw(
    x: torch.Tensor,
    draws: list[Draw],
    backend: str = "compiled",
    eos: tuple[int, ...] = (),
    tokens: TokenTable | None = None,
) -> list[Drawn]:
    """One draw from each row, by a new sampler."""
    sampler = Sampler(x.shape[1], CPU, eos, tokens, compiled=BACKENDS[backend])
    return sampler.sample(x, in_order(draws))


def sample(x: torch.Tensor, draws: list[Draw], backend: str = "compiled") -> list[int | None]:
    """The tokens alone; None for a row that failed."""
    return [None if d.error else d.token for d in draw(x, draws, backend)]

"""min_p, top_k and top_p: compiled, by torch, as transformers cuts, and by a plain float64 rule."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from drawing import BACKENDS, draw, drawn, logits, sample
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import draw_cpu, draw_torch
from kernels.settings import Draw, settings_of
from protocol.types import SamplingParams

both = pytest.mark.parametrize("backend", BACKENDS)
SHAPES = ("flat", "peaked", "tied")


def row_of(shape: str, vocab: int, seed: int) -> torch.Tensor:
    """Logits as a random model gives them, as a sure one does, and with many equal ones."""
    x = logits(1, seed, vocab)[0]
    if shape == "flat":
        return x / 10
    if shape == "peaked":
        x[: vocab // 50] += 12
        return x
    return (x * 2).round() / 2


def some_params(rng: random.Random, seed: int) -> SamplingParams:
    return drawn(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=rng.choice([1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.99]),
        top_k=rng.choice([0, 0, 1, 5, 50, 100, 5000, 10**6]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        seed=seed,
    )


@pytest.mark.parametrize("vocab", [1, 7, 256, 1000, 9999])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_draws_as_torch_does(shape: str, vocab: int) -> None:
    """Every combination of cuts, and rows whose cut lies beyond the first candidates."""
    rng = random.Random(f"{shape}{vocab}")
    n = 60
    x = torch.stack([row_of(shape, vocab, i) for i in range(n)])
    settings = settings_of([Draw(some_params(rng, i), i) for i in range(n)])
    rows = np.array(rng.choices(range(n), k=n))
    got, got_status = draw_cpu.draw_tokens(x, rows, settings)
    want, want_status = draw_torch.draw_tokens(x, rows, settings)
    assert got.tolist() == want.tolist()
    assert got_status.tolist() == want_status.tolist() == [0] * n


def kept_by_rule(x: torch.Tensor, p: SamplingParams) -> set[int]:
    """The survivors by definition, in double: a token stays while what is larger is too little."""
    probability = torch.softmax(x.double() / p.temperature, -1)
    kept = probability >= p.min_p * probability.max() * (1 - 1e-9)
    larger = (x[:, None] < x[None, :]).sum(-1)
    if p.top_k:
        kept &= larger < p.top_k
    left = probability * kept
    mass_above = ((x[:, None] < x[None, :]) * left[None, :]).sum(-1)
    if p.top_p < 1:
        kept &= (mass_above < p.top_p * left.sum()) | (larger == 0)
    return set(kept.nonzero().flatten().tolist())


def kept_by_transformers(x: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Probabilities after transformers' own processors, min_p first as in vLLM."""
    warpers = [TemperatureLogitsWarper(p.temperature)]
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    scores = x[None]
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores.double(), -1)[0]


CUTS = [
    {"min_p": 0.1},
    {"min_p": 0.02, "temperature": 1.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.85, "temperature": 0.6},
    {"top_k": 12, "top_p": 0.9},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.97, "temperature": 1.3},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_same_survivors_and_distribution_as_transformers(cut: dict[str, float]) -> None:
    """Chi-square over 20,000 draws, each with a seed of its own, at the 1e-4 level."""
    x, n = logits(1, 3, 60)[0], 20_000
    want = kept_by_transformers(x, drawn(**cut))
    assert set(want.nonzero().flatten().tolist()) == kept_by_rule(x, drawn(**cut))
    tokens = []
    for first in range(0, n, 2000):
        draws = [Draw(drawn(seed=s, **cut), 0) for s in range(first, first + 2000)]
        tokens += sample(x.expand(2000, -1), draws)
    counts = Counter(tokens)
    assert all(want[t] > 0 for t in counts), "a token that was cut was drawn"
    likely = [t for t in range(len(x)) if want[t] * n >= 5]
    rest = float(1 - want[likely].sum()) * n
    chi = sum((counts[t] - float(want[t]) * n) ** 2 / (float(want[t]) * n) for t in likely)
    if rest >= 5:
        chi += (n - sum(counts[t] for t in likely) - rest) ** 2 / rest
    freedom = len(likely) - (rest < 5)
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi < bound, (chi, bound)  # Wilson and Hilferty's approximation of the quantile


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_survivors_by_the_rule_in_double(shape: str, backend: str) -> None:
    """Which tokens can come at all, found by drawing with a noise as strong as the logits."""
    x = row_of(shape, 300, 1)
    rng = random.Random(shape)
    for _ in range(6):
        p = some_params(rng, 0)
        if p.temperature == 0:
            continue
        want = kept_by_rule(x, p)
        draws = [Draw(drawn(**_settings(p), seed=s), 0) for s in range(800)]
        got = set(sample(x.expand(800, -1), draws, backend))
        assert got <= want
        if shape == "flat" and len(want) < 20:
            assert got == want


def _settings(p: SamplingParams) -> dict[str, float]:
    return {n: getattr(p, n) for n in ("temperature", "top_p", "top_k", "min_p")}


@both
def test_min_p_counts_before_top_p(backend: str) -> None:
    """Of 5 + 3 + 2 tenths min_p 0.5 leaves 5 and 3; top_p 0.6 of those 8 keeps only the first."""
    x = torch.tensor([0.5, 0.3, 0.2]).log()
    one = [Draw(drawn(min_p=0.5, top_p=0.6, seed=s), 0) for s in range(200)]
    assert set(sample(x.expand(200, -1), one, backend)) == {0}
    two = [Draw(drawn(min_p=0.5, top_p=0.7, seed=s), 0) for s in range(200)]
    assert set(sample(x.expand(200, -1), two, backend)) == {0, 1}


@both
def test_both_zeros_are_one_value(backend: str) -> None:
    """-0.0 equals 0.0, so a cut between them would cut a tie."""
    x = torch.tensor([0.0, -0.0, -5.0])
    draws = [Draw(drawn(top_k=1, seed=s), 0) for s in range(64)]
    assert set(sample(x.expand(64, -1), draws, backend)) == {0, 1}


@both
def test_extreme_logits_do_not_overflow(backend: str) -> None:
    x = torch.tensor([[3e38, -3e38, 2.9e38, 0.0], [-3e38, -3e38, -3e38, -3.1e38]])
    for p in (drawn(), drawn(top_p=0.9), drawn(temperature=1e-4), drawn(min_p=0.5, top_k=2)):
        got = draw(x, [Draw(p, 0), Draw(p, 0)], backend)
        assert got[0].token == 0 and got[1].token in (0, 1, 2)

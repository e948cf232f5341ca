"""Greedy and seeded sampling: exact distribution, same bits in any batch, rows fail alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from drawing import BACKENDS, drawn, logits, sample

from kernels.settings import Draw
from protocol.types import SamplingParams

VOCAB = 5000
both = pytest.mark.parametrize("backend", BACKENDS)


def frequencies(row: torch.Tensor, params: SamplingParams, n: int = 20_000) -> dict[int, float]:
    """How often each token is drawn at ``n`` consecutive places of an answer."""
    counts: Counter[int | None] = Counter()
    for first in range(0, n, 1000):
        draws = [Draw(params, i) for i in range(first, first + 1000)]
        counts.update(sample(row.expand(1000, -1), draws))
    return {token: count / n for token, count in counts.items() if token is not None}


def assert_distribution(got: dict[int, float], want: torch.Tensor, n: int = 20_000) -> None:
    """Every frequency within 4.5 standard deviations of its probability."""
    assert all(want[t] > 0 for t in got), "a token that was cut was drawn"
    for token, p in enumerate(want.tolist()):
        bound = 4.5 * math.sqrt(max(p * (1 - p), 1e-9) / n) + 1e-4
        assert abs(got.get(token, 0.0) - p) < bound, (token, p, got.get(token))


ROW = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -3.0, 0.5])


@both
def test_greedy_takes_the_largest(backend: str) -> None:
    x = logits(6)
    tokens = sample(x, [Draw(SamplingParams(max_tokens=1), 0)] * 6, backend)
    assert tokens == x.argmax(-1).tolist()


@both
def test_tiny_temperature_is_greedy_and_finite(backend: str) -> None:
    x = logits(2)
    assert sample(x, [Draw(drawn(temperature=1e-30), 0)] * 2, backend) == x.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    got = frequencies(ROW, drawn(temperature=temperature, seed=7))
    assert_distribution(got, torch.softmax(ROW / temperature, -1))


def test_top_k_keeps_the_k_largest() -> None:
    want = torch.softmax(ROW, -1)
    want[[3, 4, 5, 6, 7]] = 0
    assert_distribution(frequencies(ROW, drawn(top_k=3, seed=1)), want / want.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p = torch.softmax(ROW, -1)
    want = p.clone()
    want[[3, 4, 5, 6, 7]] = 0
    between = float(p[:2].sum() + p[:3].sum()) / 2  # the third token is the one that reaches it
    assert_distribution(frequencies(ROW, drawn(top_p=between, seed=2)), want / want.sum())


def test_top_p_counts_what_top_k_left() -> None:
    """Of the two best, the first alone holds 62 %: top_p 0.6 keeps only it."""
    assert frequencies(ROW, drawn(top_k=2, top_p=0.6), 2000) == {0: 1.0}
    assert set(frequencies(ROW, drawn(top_k=2, top_p=0.65), 2000)) == {0, 1}


@both
def test_top_p_zero_and_top_k_one_are_greedy(backend: str) -> None:
    x = logits(2)
    draws = [Draw(drawn(top_p=0.0), 3), Draw(drawn(top_k=1), 3)]
    assert sample(x, draws, backend) == x.argmax(-1).tolist()


def test_ties_at_the_cut_stay_together() -> None:
    got = frequencies(ROW, drawn(top_k=4, temperature=5.0), 2000)
    assert {3, 7} <= set(got) and not {4, 5, 6} & set(got)


@both
def test_wide_nucleus_beyond_the_first_candidates(backend: str) -> None:
    """Flat logits: the nucleus is 2,500 tokens, far more than are looked at first."""
    row = torch.linspace(0, -1, VOCAB)
    top_p = float(torch.softmax(row.double(), -1)[:2500].sum())
    drawn_tokens = sample(
        row.expand(300, -1), [Draw(drawn(top_p=top_p), i) for i in range(300)], backend
    )
    assert 2300 < max(drawn_tokens) <= 2500
    k_tokens = sample(
        row.expand(300, -1), [Draw(drawn(top_k=2000), i) for i in range(300)], backend
    )
    assert 1800 < max(k_tokens) < 2000


@both
def test_no_cut_equals_a_cut_that_cuts_nothing(backend: str) -> None:
    x = logits(8)
    plain = sample(x, [Draw(drawn(seed=i), i) for i in range(8)], backend)
    assert plain == sample(x, [Draw(drawn(seed=i, top_k=VOCAB), i) for i in range(8)], backend)
    assert plain == sample(x, [Draw(drawn(seed=i, top_k=10 * VOCAB), i) for i in range(8)], backend)


@both
def test_same_token_alone_and_in_any_batch(backend: str) -> None:
    x = logits(24)
    kinds = [{}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 0.0}, {"top_k": 2000, "top_p": 0.99}]
    draws = [Draw(drawn(seed=i * 31, **kinds[i % len(kinds)]), i) for i in range(24)]
    together = sample(x, draws, backend)
    assert together == [sample(x[i : i + 1], [draws[i]], backend)[0] for i in range(24)]
    back = sample(x.flip(0), draws[::-1], backend)[::-1]
    assert together == back


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_row_of_bad_logits_fails_alone(bad: float, backend: str) -> None:
    x = logits(4)
    draws = [Draw(drawn(seed=i, top_p=0.9), i) for i in range(3)]
    draws.append(Draw(SamplingParams(max_tokens=1), 0))
    good = sample(x, draws, backend)
    for broken in range(4):
        y = x.clone()
        y[broken, 17] = bad
        got = sample(y, draws, backend)
        assert got[broken] is None
        assert [t for i, t in enumerate(got) if i != broken] == [
            t for i, t in enumerate(good) if i != broken
        ]


@both
def test_half_precision_logits(backend: str) -> None:
    x = logits(3).to(torch.bfloat16)
    assert (
        sample(x, [Draw(SamplingParams(max_tokens=1), 0)] * 3, backend)
        == x.float().argmax(-1).tolist()
    )

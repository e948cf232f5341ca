"""Greedy and seeded sampling: exact distribution, same bits in any batch, rows fail alone."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from kernels.sampling import Draw, gumbel_noise, sample
from protocol.types import SamplingParams

CPU = torch.device("cpu")
VOCAB = 5000


def drawn(**settings) -> SamplingParams:
    return SamplingParams(max_tokens=10, **({"temperature": 1.0} | settings))


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


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


def test_greedy_takes_the_largest() -> None:
    x = logits(6)
    tokens = sample(x, [Draw(SamplingParams(max_tokens=1), 0)] * 6)
    assert tokens == x.argmax(-1).tolist()


def test_tiny_temperature_is_greedy_and_finite() -> None:
    x = logits(2)
    assert sample(x, [Draw(drawn(temperature=1e-30), 0)] * 2) == x.argmax(-1).tolist()


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


def test_top_p_zero_and_top_k_one_are_greedy() -> None:
    x = logits(2)
    draws = [Draw(drawn(top_p=0.0), 3), Draw(drawn(top_k=1), 3)]
    assert sample(x, draws) == x.argmax(-1).tolist()


def test_ties_at_the_cut_stay_together() -> None:
    got = frequencies(ROW, drawn(top_k=4, temperature=5.0), 2000)
    assert {3, 7} <= set(got) and not {4, 5, 6} & set(got)


def test_wide_nucleus_beyond_the_first_candidates() -> None:
    """Flat logits: the nucleus is 2,500 tokens, far more than are looked at first."""
    row = torch.linspace(0, -1, VOCAB)
    top_p = float(torch.softmax(row.double(), -1)[:2500].sum())
    drawn_tokens = sample(row.expand(300, -1), [Draw(drawn(top_p=top_p), i) for i in range(300)])
    assert 2300 < max(drawn_tokens) <= 2500
    k_tokens = sample(row.expand(300, -1), [Draw(drawn(top_k=2000), i) for i in range(300)])
    assert 1800 < max(k_tokens) < 2000


def test_no_cut_equals_a_cut_that_cuts_nothing() -> None:
    x = logits(8)
    plain = sample(x, [Draw(drawn(seed=i), i) for i in range(8)])
    assert plain == sample(x, [Draw(drawn(seed=i, top_k=VOCAB), i) for i in range(8)])
    assert plain == sample(x, [Draw(drawn(seed=i, top_k=10 * VOCAB), i) for i in range(8)])


def test_same_token_alone_and_in_any_batch() -> None:
    x = logits(24)
    kinds = [{}, {"top_p": 0.7}, {"top_k": 5}, {"temperature": 0.0}, {"top_k": 2000, "top_p": 0.99}]
    draws = [Draw(drawn(seed=i * 31, **kinds[i % len(kinds)]), i) for i in range(24)]
    together = sample(x, draws)
    assert together == [sample(x[i : i + 1], [draws[i]])[0] for i in range(24)]
    back = sample(x.flip(0), draws[::-1])[::-1]
    assert together == back


def test_noise_depends_on_seed_choice_and_index() -> None:
    base = Draw(drawn(seed=1), 4)
    others = [
        Draw(drawn(seed=2), 4),
        Draw(drawn(seed=1), 5),
        Draw(drawn(seed=1), 4, choice=1),
        Draw(drawn(seed=1 + (1 << 40)), 4),
        Draw(drawn(seed=-1), 4),
    ]
    noise = gumbel_noise([base, *others, base], 1000, CPU)
    assert torch.equal(noise[0], noise[-1])
    for i in range(1, 6):
        correlation = torch.corrcoef(noise[[0, i]])[0, 1].abs()
        assert correlation < 0.12


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_noise([Draw(drawn(seed=s), s) for s in range(20)], 50_000, CPU).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert noise.max() > 11  # the tail that lets improbable tokens win


KNOWN_NOISE = [-0.6786652, -0.8877347, 1.8029860, -0.1445848]


def test_known_bits() -> None:
    """A stored value: a change of the hash would change answers across versions and failovers."""
    row = gumbel_noise([Draw(drawn(seed=1234), 5)], 4, CPU)[0]
    assert row.tolist() == pytest.approx(KNOWN_NOISE, abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_row_of_bad_logits_fails_alone(bad: float) -> None:
    x = logits(4)
    draws = [Draw(drawn(seed=i, top_p=0.9), i) for i in range(3)]
    draws.append(Draw(SamplingParams(max_tokens=1), 0))
    good = sample(x, draws)
    for broken in range(4):
        y = x.clone()
        y[broken, 17] = bad
        got = sample(y, draws)
        assert got[broken] is None
        assert [t for i, t in enumerate(got) if i != broken] == [
            t for i, t in enumerate(good) if i != broken
        ]


def test_half_precision_logits() -> None:
    x = logits(3).to(torch.bfloat16)
    assert sample(x, [Draw(SamplingParams(max_tokens=1), 0)] * 3) == x.float().argmax(-1).tolist()

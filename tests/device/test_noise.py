"""The noise of sampling: known bits, independence of seed, choice and index, Gumbel's shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernels.noise import LARGEST, bits, gumbel, keys

CPU = torch.device("cpu")

# Stored values. A change of the hash would change answers across versions and failovers, and the
# two sides of a hand-off would not draw alike: such a change needs a new protocol version.
PLACES = ([1234, -1, 1 << 70], [0, 3, 1], [5, 0, 100_000])  # seeds, choices, token indices
KNOWN_KEYS = [0xB4E7D2FD44411D1E, 0x7F6C46FDBCAAA37C, 0x2AAE22549B20D949]
KNOWN_BITS = [
    [1549266098, 1769224399, -1494898470, 795078959],
    [638394367, -2067065958, 1664846835, -1400524080],
    [1032168807, 337909999, -1186962176, -1708263380],
]
KNOWN_NOISE = [-0.6786652, -0.8877347, 1.8029860, -0.1445848]


def test_known_bits() -> None:
    key_Q = keys(*PLACES)
    assert key_Q.tolist() == KNOWN_KEYS
    assert bits(key_Q, 4, CPU).tolist() == KNOWN_BITS
    assert gumbel(key_Q[:1], 4, CPU)[0].tolist() == pytest.approx(KNOWN_NOISE, abs=1e-6)


def test_compiled_bits_and_noise_are_the_same() -> None:
    from kernels.draw_loops import noise_of

    key_Q = keys(*PLACES)
    want = gumbel(key_Q, 3000, CPU)
    got = [[noise_of(np.uint32(t), key) for t in range(3000)] for key in key_Q]
    assert torch.allclose(want.double(), torch.tensor(got, dtype=torch.float64), atol=2e-6)


def test_seeds_are_64_bits() -> None:
    same = keys([-1, (1 << 64) - 1, 5, 5 + (1 << 64)], [0] * 4, [0] * 4).tolist()
    assert same[0] == same[1] and same[2] == same[3] and same[0] != same[2]


def test_noise_depends_on_seed_choice_and_index() -> None:
    base, others = (1, 0, 4), [(2, 0, 4), (1, 0, 5), (1, 1, 4), (1 + (1 << 40), 0, 4), (-1, 0, 4)]
    key_Q = keys(*zip(*[base, *others, base], strict=True))
    noise = gumbel(key_Q, 1000, CPU)
    assert torch.equal(noise[0], noise[-1])
    for i in range(1, 6):
        correlation = torch.corrcoef(noise[[0, i]])[0, 1].abs()
        assert correlation < 0.12


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel(keys(range(20), [0] * 20, range(20)), 50_000, CPU).double()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert 11 < noise.max() < LARGEST  # the tail that lets improbable tokens win

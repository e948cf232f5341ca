"""The noise of sampling: a pure function of (seed, choice, token index, token id).

This file owns the bits. They are the same on every device, in any batch, before and after a
failover; a change here changes answers between versions, so a test knows some of them. It must
never hold state or use a random generator.

Shape suffixes: Q draws, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MASK_64 = (1 << 64) - 1
FACTORS = (0x7FEB352D, 0x846CA68B)  # of the 32-bit finaliser
ID_FACTOR = 0x9E3779B1
LARGEST = 22.9  # no noise is above: -log(2^-33), rounded up


def keys(
    seed_Q: Sequence[int], choice_Q: Sequence[int], index_Q: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """64 well-mixed bits per draw (splitmix64's finaliser over each number in turn).

    Any integer is a seed; its lowest 64 bits count.
    """
    key_Q = np.zeros(len(seed_Q), dtype=np.uint64)
    seed = np.array([s & MASK_64 for s in seed_Q], dtype=np.uint64)
    others = (np.array(numbers, dtype=np.int64) for numbers in (choice_Q, index_Q))
    for number_Q in (seed, *(o.astype(np.uint64) for o in others)):
        key_Q += number_Q + np.uint64(0x9E3779B97F4A7C15)
        key_Q = (key_Q ^ (key_Q >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key_Q = (key_Q ^ (key_Q >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key_Q ^= key_Q >> np.uint64(31)
    return key_Q


def bits(key_Q: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """32 random bits ``[Q, V]`` as int32, which wraps around on every device."""
    halves = key_Q.astype("<u8").view(np.int32).reshape(-1, 2)
    low_high = torch.from_numpy(halves).to(device, non_blocking=True)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device) * signed(ID_FACTOR)
    bits_QV = ids[None] ^ low_high[:, :1]
    scratch_QV = torch.empty_like(bits_QV)
    return _mix_(_mix_(bits_QV, scratch_QV).add_(low_high[:, 1:]), scratch_QV)


def gumbel(key_Q: np.ndarray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise ``[Q, V]``, float32.

    (bits + 2^31 + 0.5) / 2^32 lies in (0, 1). In double, because small values need all 32 bits:
    they are the large noises. Rounded up to 1 in float32 it would give minus infinity.
    """
    uniform_QV = bits(key_Q, vocab_size, device).double()
    uniform_QV = uniform_QV.add_(2147483648.5).mul_(2.0**-32).float()
    uniform_QV.clamp_(max=1 - 2.0**-24)
    return uniform_QV.neg_().log1p_().neg_().log_().neg_()


def signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift, multiply; twice) on int32.

    In place: a fresh tensor per operation costs 15 times as much here, in page faults.
    """
    for shift, factor in ((16, FACTORS[0]), (15, FACTORS[1]), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x ^= scratch.bitwise_and_((1 << (32 - shift)) - 1)  # the shift copies the sign; cut it off
        x *= signed(factor)
    return x

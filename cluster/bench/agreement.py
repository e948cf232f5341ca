"""The agreement rule: when two greedy or seeded token sequences count as the same answer.

This file owns the one comparison that every test and benchmark uses. It must never be loosened
by a caller: the bounds are constants here.

The rule: tokens are equal. Where they first differ, the reference's scores of the two tokens lie
within ``t`` (a near tie: two correct computations may round it either way); from there on the
reference is asked about the prefix that was actually written. Near ties are counted, and only so
many are allowed. For sampled answers a score is logit / temperature + noise, and ``t`` is divided
by the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
TOKENS_PER_EXTRA_NEAR_TIE = {"float32": 2000, "bfloat16": 20, "float16": 20}

Logits = Callable[[Sequence[int]], object]
"""Token ids -> array-like ``[len(ids), vocab]`` of the reference's logits after each of them."""
Noise = Callable[[int], object]
"""Token index within the answer -> array-like ``[vocab]`` of that token's sampling noise."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The verdict. ``near_ties`` are positions within the answer; ``reason`` is a sentence."""

    ok: bool
    reason: str
    tokens: int
    near_ties: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


def allowed_near_ties(tokens: int, dtype: str) -> int:
    """How many near ties an answer, or a suite of answers, of ``tokens`` tokens may have."""
    return 1 + tokens // TOKENS_PER_EXTRA_NEAR_TIE[dtype]


def agree(
    prompt: Sequence[int],
    got: Sequence[int],
    want: Sequence[int],
    logits: Logits,
    *,
    dtype: str = "float32",
    temperature: float = 0.0,
    noise: Noise | None = None,
) -> Agreement:
    """Whether ``got`` is the reference's answer ``want`` to ``prompt``, by the rule.

    ``logits`` is asked only if they differ, once, about ``prompt + got``. ``noise`` is needed
    when ``temperature`` is above 0. A missing or surplus token is a disagreement unless a near
    tie came before it.
    """
    got, want = list(got), list(want)
    shared = min(len(got), len(want))
    first = next((i for i in range(shared) if got[i] != want[i]), None)
    if first is None:
        if len(got) == len(want):
            return Agreement(True, f"all {len(got)} tokens are equal", len(got))
        return Agreement(False, f"equal, but {len(got)} tokens instead of {len(want)}", len(got))

    scores = np.asarray(logits([*prompt, *got]), dtype=np.float64)
    tolerance = NEAR_TIE[dtype]
    if temperature > 0:
        tolerance /= temperature
    near: list[int] = []
    for i in range(first, len(got)):
        score = scores[len(prompt) + i - 1]
        if temperature > 0:
            if noise is None:
                raise ValueError("sampled answers need the sampling noise to be compared")
            score = score / temperature + np.asarray(noise(i), dtype=np.float64)
        # At the first difference the reference's own choice is known; later it is its best.
        wanted = want[i] if i == first else int(score.argmax())
        if got[i] == wanted:
            continue
        gap = float(score[wanted] - score[got[i]])
        if not abs(gap) <= tolerance:  # also catches NaN
            return Agreement(
                False,
                f"token {i} is {got[i]} instead of {wanted}, whose score is {gap:.3g} higher "
                f"(near ties end at {tolerance:.3g})",
                len(got),
                tuple(near),
            )
        near.append(i)
    return verdict(len(got), near, dtype)


def verdict(tokens: int, near_ties: Sequence[int], dtype: str) -> Agreement:
    """Judge a number of near ties, of one answer or summed over a suite."""
    limit = allowed_near_ties(tokens, dtype)
    ok = len(near_ties) <= limit
    return Agreement(
        ok,
        f"{tokens} tokens agree with {len(near_ties)} near ties ({limit} allowed)"
        if ok
        else f"{len(near_ties)} near ties in {tokens} tokens, only {limit} allowed",
        tokens,
        tuple(near_ties),
    )

"""The agreement rule itself: what passes, what fails, and what the verdict says."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.bench.agreement import agree, verdict

VOCAB = 8
PROMPT = [1, 2, 3]


class Reference:
    """A reference whose best next token is ``(last + 1) % VOCAB``, the second at ``gap`` below."""

    def __init__(self, gap: float) -> None:
        self.gap, self.asked = gap, 0

    def answer(self, n: int) -> list[int]:
        return [(PROMPT[-1] + 1 + i) % VOCAB for i in range(n)]

    def __call__(self, ids) -> np.ndarray:
        self.asked += 1
        rows = np.zeros((len(ids), VOCAB))
        for row, token in zip(rows, ids, strict=True):
            row[(token + 1) % VOCAB] = 5.0
            row[(token + 2) % VOCAB] = 5.0 - self.gap
        return rows


def test_equal_answers_need_no_reference() -> None:
    reference = Reference(0)
    assert agree(PROMPT, reference.answer(9), reference.answer(9), reference)
    assert reference.asked == 0


def test_near_tie_is_counted_and_the_rest_is_judged_by_the_written_prefix() -> None:
    reference = Reference(5e-4)
    got = [4, 6, 7, 0, 1]  # token 1 is the second best; the rest follows from it
    result = agree(PROMPT, got, reference.answer(5), reference)
    assert result and result.near_ties == (1,) and "1 near ties" in result.reason


def test_wide_gap_is_a_disagreement() -> None:
    reference = Reference(0.1)
    result = agree(PROMPT, [4, 6, 7], reference.answer(3), reference)
    assert not result and "token 1 is 6 instead of 5" in result.reason
    assert agree(PROMPT, [4, 6, 7], reference.answer(3), reference, dtype="bfloat16")


def test_wrong_token_after_a_near_tie_is_found() -> None:
    reference = Reference(5e-4)
    result = agree(PROMPT, [4, 6, 2], reference.answer(3), reference)
    assert not result and "token 2" in result.reason


def test_following_the_references_old_text_after_a_near_tie_is_wrong() -> None:
    reference = Reference(5e-4)
    assert not agree(PROMPT, [4, 6, 6], reference.answer(3), reference)


def test_too_many_near_ties() -> None:
    reference = Reference(5e-4)
    result = agree(PROMPT, [5, 7, 0], reference.answer(3), reference)
    assert not result and "only 1 allowed" in result.reason
    assert verdict(4000, range(3), "float32") and not verdict(3999, range(3), "float32")
    assert verdict(40, range(3), "bfloat16") and not verdict(39, range(3), "bfloat16")


@pytest.mark.parametrize("got", [[4, 5], [4, 5, 6, 7], []])
def test_missing_or_surplus_tokens(got: list[int]) -> None:
    reference = Reference(0)
    result = agree(PROMPT, got, reference.answer(3), reference)
    assert not result and "instead of 3" in result.reason


def test_nan_is_a_disagreement() -> None:
    reference = Reference(float("nan"))
    assert not agree(PROMPT, [4, 6, 7], reference.answer(3), reference)


def test_sampled_answers_compare_scores_with_noise() -> None:
    reference = Reference(1e-3)

    def noise(index: int) -> np.ndarray:
        row = np.zeros(VOCAB)
        row[7] = 50.0  # at temperature 0.5 the logits are doubled: 7 wins everywhere
        row[6] = 50.0 - 1e-3
        return row

    want = [7, 7, 7]
    for got, good in (([7, 7, 7], True), ([6, 7, 7], True), ([5, 7, 7], False)):
        result = agree(PROMPT, got, want, reference, temperature=0.5, noise=noise)
        assert bool(result) is good, result.reason
    with pytest.raises(ValueError, match="noise"):
        agree(PROMPT, [6, 7, 7], want, reference, temperature=0.5)

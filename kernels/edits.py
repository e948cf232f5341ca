"""Edits of the logits before a token is drawn: penalties, bias, tokens that may not come.

This file owns which edits a draw asks for and their order: repetition, frequency and presence
penalties, ``logit_bias``, ``min_tokens``, the grammar's mask. A batch's edits are data (one list of
token entries per kind, cut into rows), so that each backend carries them out in its own way. It
must never touch logits.

Shape suffixes: E edited draws, N entries, G masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kernels.sequence_state import TokenCounts
from kernels.settings import Draw
from protocol.errors import InternalError, InvalidArgument
from protocol.types import SamplingParams

_NO_IDS = np.empty(0, dtype=np.int64)
_NO_VALUES = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Edit:
    """One draw's edits; parts that it does not ask for are empty.

    ``counts`` are its tokens for the penalties, ``mask`` has one bit per token, uint32 words.
    ``may_end`` False: its end tokens and stop tokens may not come.
    """

    draw: Draw
    counts: TokenCounts | None = None
    mask: np.ndarray | None = None
    may_end: bool = True


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of E draws. Entries of row e are ``begin[e] .. begin[e + 1] - 1``.

    Penalties change the logit x of token ``seen_N``, which occurred ``count_N`` times in the
    answer: x / repetition if positive, else x * repetition (Keskar et al., 2019, CTRL); then less
    count * frequency, and less presence if it occurred. Then ``bias_N`` is added to ``biased_N``;
    ``banned_N`` and what the mask leaves out become minus infinity. All ids are in the vocabulary.
    """

    seen_begin_E: np.ndarray
    seen_N: np.ndarray
    count_N: np.ndarray
    repetition_E: np.ndarray
    frequency_E: np.ndarray
    presence_E: np.ndarray
    bias_begin_E: np.ndarray
    biased_N: np.ndarray
    bias_N: np.ndarray
    ban_begin_E: np.ndarray
    banned_N: np.ndarray
    mask_E: np.ndarray  # which mask, -1 for none
    mask_GW: np.ndarray  # uint32


def penalised(params: SamplingParams) -> bool:
    """Whether the sequence's tokens change the logits."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def too_early(draw: Draw) -> bool:
    """Whether the answer may not end with this token yet."""
    return draw.token_index < draw.params.min_tokens


def edited(draw: Draw) -> bool:
    """Whether the draw's logits differ from the model's."""
    p = draw.params
    return bool(
        p.grammar is not None or p.logit_bias or draw.token_index < p.min_tokens or penalised(p)
    )


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``InvalidArgument`` for a bias on a token that does not exist."""
    if not params.logit_bias:
        return
    ids, _ = _bias(params.logit_bias)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = next(i for i in ids.tolist() if not 0 <= i < vocab_size)
        raise InvalidArgument(
            f"logit_bias names token {wrong}; the vocabulary has 0..{vocab_size - 1}",
            field="logit_bias",
        )


def collect(edits: Sequence[Edit], vocab_size: int, eos_token_ids: tuple[int, ...]) -> Edits:
    """The batch's edits as arrays. Biases must have been checked.

    Raises ``InternalError`` for a history with a token outside the vocabulary.
    """
    params = [e.draw.params for e in edits]
    seen = [_NO_IDS if e.counts is None else e.counts.ids for e in edits]
    seen_N = np.concatenate(seen)
    if len(seen_N) and not 0 <= seen_N.min() <= seen_N.max() < vocab_size:
        raise InternalError(f"a token id outside 0..{vocab_size - 1} in a history")
    counts = [_NO_VALUES if e.counts is None else e.counts.counts for e in edits]
    biases = [_bias(p.logit_bias) for p in params]
    bans = [_NO_IDS if e.may_end else _ends(e.draw, vocab_size, eos_token_ids) for e in edits]
    masks = [e.mask for e in edits if e.mask is not None]
    has_mask = np.array([e.mask is not None for e in edits])
    return Edits(
        seen_begin_E=_begins(seen),
        seen_N=seen_N,
        count_N=np.concatenate(counts),
        repetition_E=np.array([p.repetition_penalty for p in params], dtype=np.float32),
        frequency_E=np.array([p.frequency_penalty for p in params], dtype=np.float32),
        presence_E=np.array([p.presence_penalty for p in params], dtype=np.float32),
        bias_begin_E=_begins([ids for ids, _ in biases]),
        biased_N=np.concatenate([ids for ids, _ in biases]),
        bias_N=np.concatenate([values for _, values in biases]),
        ban_begin_E=_begins(bans),
        banned_N=np.concatenate(bans),
        mask_E=np.where(has_mask, np.cumsum(has_mask) - 1, -1),
        mask_GW=np.stack(masks) if masks else np.empty((0, 1), dtype=np.uint32),
    )


def _ends(draw: Draw, vocab_size: int, eos_token_ids: tuple[int, ...]) -> np.ndarray:
    """What would end the answer. With ``ignore_eos`` an end of sequence ends nothing."""
    p = draw.params
    ids = p.stop_token_ids if p.ignore_eos else p.stop_token_ids + eos_token_ids
    return np.array([i for i in ids if 0 <= i < vocab_size], dtype=np.int64)


@lru_cache(maxsize=1024)
def _bias(pairs: tuple[tuple[int, float], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and values of a request's bias."""
    if not pairs:
        return _NO_IDS, _NO_VALUES
    ids, values = zip(*pairs, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)


def _begins(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Where each part begins once they are joined, and where the last one ends."""
    return np.cumsum([0, *(len(p) for p in parts)])

"""Edits of the logits before a token is drawn: penalties, bias, tokens that may not come yet.

This file owns their order (penalties, ``logit_bias``, ``min_tokens``; a grammar's mask is
``grammar_mask``'s) and their arithmetic. Each edit is one tensor operation over the batch's
(row, token, value) entries; only rows that ask for one take part. It must never change logits that
others read: the caller hands in a copy.

Shape suffixes: E edited rows, V vocabulary, N entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from kernels.draw_torch import to_device
from kernels.sequence_state import TokenCounts
from kernels.settings import Draw
from protocol.errors import InvalidArgument
from protocol.types import SamplingParams


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


def penalise_(logits_EV: torch.Tensor, rows: Sequence[tuple[int, Draw, TokenCounts]]) -> None:
    """Repetition, then frequency and presence penalties.

    Repetition divides a positive and multiplies a negative logit of every token that occurred
    (Keskar et al., 2019, CTRL); the others subtract, per occurrence in the answer and once.
    """
    if not rows:
        return
    lengths = [len(counts.ids) for _, _, counts in rows]

    def column(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    counts_N = np.concatenate([counts.counts for _, _, counts in rows])
    less_N = column([d.params.frequency_penalty for _, d, _ in rows]) * counts_N
    less_N += column([d.params.presence_penalty for _, d, _ in rows]) * (counts_N > 0)
    places_N = _places(logits_EV, [e for e, _, _ in rows], [c.ids for _, _, c in rows])
    factor_N = to_device(column([d.params.repetition_penalty for _, d, _ in rows]), places_N.device)
    flat = logits_EV.view(-1)
    some_N = flat[places_N]
    some_N = torch.where(some_N > 0, some_N / factor_N, some_N * factor_N)
    flat[places_N] = some_N - to_device(less_N, places_N.device)


def add_bias_(logits_EV: torch.Tensor, rows: Sequence[tuple[int, Draw]]) -> None:
    """Add each row's ``logit_bias``."""
    some = [(e, *_bias(d.params.logit_bias)) for e, d in rows if d.params.logit_bias]
    if some:
        places_N = _places(logits_EV, [e for e, _, _ in some], [ids for _, ids, _ in some])
        values_N = to_device(np.concatenate([v for _, _, v in some]), places_N.device)
        logits_EV.view(-1).index_put_((places_N,), values_N, accumulate=True)


def forbid_ends_(
    logits_EV: torch.Tensor, rows: Sequence[tuple[int, Draw]], eos_token_ids: tuple[int, ...]
) -> None:
    """No end of sequence and no stop token before ``min_tokens``.

    With ``ignore_eos`` an end of sequence ends nothing, so it may come.
    """
    ends = [
        (e, d.params.stop_token_ids + (() if d.params.ignore_eos else eos_token_ids))
        for e, d in rows
        if too_early(d)
    ]
    vocab = logits_EV.shape[1]
    ids = [np.array([i for i in some if 0 <= i < vocab], dtype=np.int64) for _, some in ends]
    if ids:
        places_N = _places(logits_EV, [e for e, _ in ends], ids)
        logits_EV.view(-1).index_fill_(0, places_N, float("-inf"))


@lru_cache(maxsize=1024)
def _bias(pairs: tuple[tuple[int, float], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and values of a request's bias."""
    ids, values = zip(*pairs, strict=True)
    return np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)


def _places(
    logits_EV: torch.Tensor, rows: Sequence[int], ids: Sequence[np.ndarray]
) -> torch.Tensor:
    """Where the tokens of each row are in the flattened logits."""
    begins = np.array(rows, dtype=np.int64) * logits_EV.shape[1]
    places = np.repeat(begins, [len(i) for i in ids]) + np.concatenate(ids)
    return to_device(places, logits_EV.device)

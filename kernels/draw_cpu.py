"""Draws tokens and reads logprobs on a CPU, row after row, looking at a logit as seldom as it can.

This file owns the compiled loops over rows; they give what ``draw_torch``, their oracle, gives.
They take and give tensors, hold no state, and release the GIL. It must never import on a worker
without a CPU model: importing it costs half a second of numba.

Shape suffixes: S rows of logits, V vocabulary, Q draws, L logprobs asked for, K likeliest.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy import float32, float64, int32, int64, uint32

from kernels import cuts, draw_loops, noise
from kernels.cuts import ROOM, candidates, floor_of, least_of_largest
from kernels.draw_loops import (
    BLOCK,
    INFINITY,
    LOWEST,
    MINUS_INFINITY,
    count_above,
    draw,
    first_of,
    mass,
    maxima,
    ordered,
    value_of,
)
from kernels.edits import Edits
from kernels.settings import NOT_FINITE, NOTHING_LEFT, SPOILED, Settings

# The disk cache knows a function by its own text and constants; this adds the text it builds on.
_STAMP = zlib.crc32(
    b"".join(Path(str(module.__file__)).read_bytes() for module in (cuts, draw_loops, noise))
)


def _compile(function: Any) -> Any:
    # numpy's division: by 0 it spoils a row, where Python's would raise and fail the whole step.
    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # nowhere to keep code on disk: neither beside this file nor in the home
        return njit(nogil=True, error_model="numpy")(function)


def draw_tokens(
    logits_SV: torch.Tensor, row_Q: np.ndarray, settings: Settings, edits: Edits | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draw_torch.draw_tokens``."""
    token_Q = np.zeros(len(row_Q), dtype=np.int64)
    status_Q = np.zeros(len(row_Q), dtype=np.int64)
    x_SV, s = logits_SV.contiguous().numpy(), settings
    how = (s.temperature_Q, s.top_k_Q, s.top_p_Q, s.min_p_Q, s.key_Q)
    if edits is None:
        _draw_rows(x_SV, row_Q, *how, token_Q, status_Q)
    else:
        d = edits
        _draw_edited_rows(
            x_SV, row_Q, *how, d.seen_begin_E, d.seen_N, d.count_N, d.repetition_E,
            d.frequency_E, d.presence_E, d.bias_begin_E, d.biased_N, d.bias_N, d.ban_begin_E,
            d.banned_N, d.mask_E, d.mask_GW, token_Q, status_Q,
        )  # fmt: skip
    return torch.from_numpy(token_Q), torch.from_numpy(status_Q)


def read_logprobs(
    logits_SV: torch.Tensor, row_L: np.ndarray, token_L: torch.Tensor, k: int
) -> torch.Tensor:
    """As ``draw_torch.read_logprobs``."""
    out = np.empty((len(row_L), 2 + 2 * k), dtype=np.float64)
    _logprob_rows(logits_SV.contiguous().numpy(), row_L, token_L.numpy(), k, out)
    return torch.from_numpy(out)


@njit(nogil=True)
def _draw_row(
    x_V: Any,
    top_N: Any,
    top: Any,
    temperature: Any,
    k: Any,
    p: Any,
    min_p: Any,
    key: Any,
    room: Any,
) -> Any:
    """The token of a row whose largest logit, ordered, is finite."""
    if temperature == 0.0:
        return first_of(x_V, top_N, top)
    per_t = float32(1.0 / temperature)
    floor = max(
        floor_of(x_V, top_N, top, per_t, k, p, min_p, room), int32(MINUS_INFINITY + int32(1))
    )
    return draw(x_V, top_N, top, per_t, floor, key)


@njit(nogil=True)
def _mask(x_V: Any, mask_W: Any) -> None:
    """Minus infinity where the bit is not set (low bits first)."""
    for w in range((len(x_V) + 31) // 32):
        word = mask_W[w]
        for j in range(32 * w, min(len(x_V), 32 * w + 32)):
            if (word >> uint32(j & 31)) & uint32(1) == 0:
                x_V[j] = -math.inf


def _make_draw_rows(stamp: int) -> Any:
    def draw_rows(
        x_SV: Any,
        row_Q: Any,
        temperature_Q: Any,
        top_k_Q: Any,
        top_p_Q: Any,
        min_p_Q: Any,
        key_Q: Any,
        token_Q: Any,
        status_Q: Any,
    ) -> None:
        top_N = np.empty(
            ((x_SV.shape[1] if stamp >= 0 else 0) + BLOCK - 1) // BLOCK, dtype=np.int32
        )
        room_K = np.empty(ROOM, dtype=np.int64)
        for q in range(len(row_Q)):
            x_V = x_SV[row_Q[q]]
            top, magnitude = maxima(x_V, top_N)
            if magnitude >= INFINITY:
                status_Q[q] = NOT_FINITE
                continue
            token_Q[q] = _draw_row(
                x_V,
                top_N,
                top,
                temperature_Q[q],
                top_k_Q[q],
                top_p_Q[q],
                min_p_Q[q],
                key_Q[q],
                room_K,
            )

    return _compile(draw_rows)


def _make_draw_edited_rows(stamp: int) -> Any:
    def draw_edited_rows(
        x_SV: Any,
        row_Q: Any,
        temperature_Q: Any,
        top_k_Q: Any,
        top_p_Q: Any,
        min_p_Q: Any,
        key_Q: Any,
        seen_begin_E: Any,
        seen_N: Any,
        count_N: Any,
        repetition_E: Any,
        frequency_E: Any,
        presence_E: Any,
        bias_begin_E: Any,
        biased_N: Any,
        bias_N: Any,
        ban_begin_E: Any,
        banned_N: Any,
        mask_E: Any,
        mask_GW: Any,
        token_Q: Any,
        status_Q: Any,
    ) -> None:
        """Each row is edited in one copy that stays in the cache."""
        vocab = x_SV.shape[1] if stamp >= 0 else 0
        top_N = np.empty((vocab + BLOCK - 1) // BLOCK, dtype=np.int32)
        room_K = np.empty(ROOM, dtype=np.int64)
        x_V = np.empty(vocab, dtype=np.float32)
        for q in range(len(row_Q)):
            top, magnitude = maxima(x_SV[row_Q[q]], top_N)
            if magnitude >= INFINITY:
                status_Q[q] = NOT_FINITE
                continue
            for j in range(vocab):
                x_V[j] = x_SV[row_Q[q], j]
            for n in range(seen_begin_E[q], seen_begin_E[q + 1]):
                x = x_V[seen_N[n]]
                x = x / repetition_E[q] if x > 0 else x * repetition_E[q]
                x -= frequency_E[q] * count_N[n]
                x_V[seen_N[n]] = x - presence_E[q] if count_N[n] > 0 else x
            for n in range(bias_begin_E[q], bias_begin_E[q + 1]):
                x_V[biased_N[n]] += bias_N[n]
            for n in range(ban_begin_E[q], ban_begin_E[q + 1]):
                x_V[banned_N[n]] = -math.inf
            if mask_E[q] >= 0:
                _mask(x_V, mask_GW[mask_E[q]])
            top, magnitude = maxima(x_V, top_N)
            if top == MINUS_INFINITY:
                status_Q[q] = NOTHING_LEFT
            elif magnitude > INFINITY or top >= INFINITY:
                status_Q[q] = SPOILED
            else:
                token_Q[q] = _draw_row(
                    x_V, top_N, top, temperature_Q[q], top_k_Q[q], top_p_Q[q], min_p_Q[q], key_Q[q],
                    room_K,
                )  # fmt: skip

    return _compile(draw_edited_rows)


def _make_logprob_rows(stamp: int) -> Any:
    def logprob_rows(x_SV: Any, row_L: Any, token_L: Any, k: Any, out: Any) -> None:
        vocab = x_SV.shape[1] if stamp >= 0 else 0
        top_N = np.empty((vocab + BLOCK - 1) // BLOCK, dtype=np.int32)
        room_K = np.empty(max(ROOM, k), dtype=np.int64)
        for n in range(len(row_L)):
            x_V = x_SV[row_L[n]]
            top, magnitude = maxima(x_V, top_N)
            if magnitude >= INFINITY:
                for i in range(2 + 2 * k):
                    out[n, i] = math.nan
                continue
            log_sum = float64(value_of(top)) + math.log(mass(x_V, top_N, top, float32(1.0), LOWEST))
            chosen = x_V[token_L[n]]
            out[n, 0] = float64(chosen) - log_sum
            out[n, 1] = float64(count_above(x_V, top_N, ordered(chosen)) + 1)
            if k > 0:
                found_K = room_K
                if candidates(x_V, top_N, least_of_largest(top_N, k), top, room_K) < 0:
                    found_K = np.empty(vocab, dtype=np.int64)
                    candidates(x_V, top_N, least_of_largest(top_N, k), top, found_K)
                for i in range(k):
                    token = int64(0xFFFFFFFF) - (found_K[i] & int64(0xFFFFFFFF))
                    out[n, 2 + i] = float64(token)
                    out[n, 2 + k + i] = float64(x_V[token]) - log_sum

    return _compile(logprob_rows)


_draw_rows = _make_draw_rows(_STAMP)
_draw_edited_rows = _make_draw_edited_rows(_STAMP)
_logprob_rows = _make_logprob_rows(_STAMP)

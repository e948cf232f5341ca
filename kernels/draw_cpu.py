"""Draws tokens and reads logprobs on a CPU, row after row, looking at a logit as seldom as it can.

This file owns the compiled loops over rows; they give what ``draw_torch``, their oracle, gives.
They take and give tensors, hold no state, and release the GIL. It must never import on a worker
without a CPU model: importing it costs half a second of numba.

Shape suffixes: S rows of logits, V vocabulary, Q draws, L logprobs asked for, K likeliest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy import float32, float64, int32, int64

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
from kernels.settings import NOT_FINITE, NOTHING_LEFT, OK, SPOILED, Settings


def draw_tokens(
    logits_SV: torch.Tensor, row_Q: np.ndarray, settings: Settings, edited: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draw_torch.draw_tokens``."""
    token_Q = np.empty(len(row_Q), dtype=np.int64)
    status_Q = np.empty(len(row_Q), dtype=np.int64)
    s = settings
    _draw_rows(
        logits_SV.contiguous().numpy(), row_Q, s.temperature_Q, s.top_k_Q, s.top_p_Q, s.min_p_Q,
        s.key_Q, edited, token_Q, status_Q,
    )  # fmt: skip
    return torch.from_numpy(token_Q), torch.from_numpy(status_Q)


def read_logprobs(
    logits_SV: torch.Tensor, row_L: np.ndarray, token_L: torch.Tensor, k: int
) -> torch.Tensor:
    """As ``draw_torch.read_logprobs``."""
    out = np.empty((len(row_L), 2 + 2 * k), dtype=np.float64)
    _logprob_rows(logits_SV.contiguous().numpy(), row_L, token_L.numpy(), k, out)
    return torch.from_numpy(out)


@njit(nogil=True, cache=True)
def _draw_rows(
    x_SV: Any,
    row_Q: Any,
    temperature_Q: Any,
    top_k_Q: Any,
    top_p_Q: Any,
    min_p_Q: Any,
    key_Q: Any,
    edited: Any,
    token_Q: Any,
    status_Q: Any,
) -> None:
    vocab = x_SV.shape[1]
    top_N = np.empty((vocab + BLOCK - 1) // BLOCK, dtype=np.int32)
    room_K = np.empty(ROOM, dtype=np.int64)
    for q in range(len(row_Q)):
        x_V = x_SV[row_Q[q]]
        token_Q[q] = 0
        top, magnitude = maxima(x_V, top_N)
        if edited:
            if top == MINUS_INFINITY:
                status_Q[q] = NOTHING_LEFT
                continue
            if magnitude > INFINITY or top >= INFINITY:
                status_Q[q] = SPOILED
                continue
        elif magnitude >= INFINITY:
            status_Q[q] = NOT_FINITE
            continue
        status_Q[q] = OK
        if temperature_Q[q] == 0.0:
            token_Q[q] = first_of(x_V, top_N, top)
        else:
            per_t = float32(1.0 / temperature_Q[q])
            floor = floor_of(x_V, top_N, top, per_t, top_k_Q[q], top_p_Q[q], min_p_Q[q], room_K)
            floor = max(floor, int32(MINUS_INFINITY + int32(1)))
            token_Q[q] = draw(x_V, top_N, top, per_t, floor, key_Q[q])


@njit(nogil=True, cache=True)
def _logprob_rows(x_SV: Any, row_L: Any, token_L: Any, k: Any, out: Any) -> None:
    vocab = x_SV.shape[1]
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
            if candidates(x_V, top_N, least_of_largest(top_N, k), room_K) < 0:
                found_K = np.empty(vocab, dtype=np.int64)
                candidates(x_V, top_N, least_of_largest(top_N, k), found_K)
            for i in range(k):
                token = int64(0xFFFFFFFF) - (found_K[i] & int64(0xFFFFFFFF))
                out[n, 2 + i] = float64(token)
                out[n, 2 + k + i] = float64(x_V[token]) - log_sum


def mask_(logits_EV: torch.Tensor, rows: Sequence[int], bits_GW: np.ndarray) -> None:
    """As ``draw_torch.mask_``."""
    _mask_rows(logits_EV.numpy(), np.array(rows, dtype=np.int64), bits_GW)


@njit(nogil=True, cache=True)
def _mask_rows(x_EV: Any, row_G: Any, bits_GW: Any) -> None:
    for g in range(len(row_G)):
        x_V, bits_W = x_EV[row_G[g]], bits_GW[g]
        for w in range((len(x_V) + 31) // 32):
            word = bits_W[w]
            if word != 0xFFFFFFFF:
                for j in range(32 * w, min(len(x_V), 32 * w + 32)):
                    if word >> (j & 31) & 1 == 0:
                        x_V[j] = -math.inf

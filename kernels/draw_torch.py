"""Draws tokens and reads logprobs with torch: on a GPU, and as the oracle of ``draw_cpu``.

This file owns the plain form of the draw: every logit is looked at, cuts come from a sort. It
must never wait for the device: results stay there until the step's one transfer.

Shape suffixes: S rows of logits, V vocabulary, Q draws, L logprobs asked for, K likeliest.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.edits import Edits
from kernels.noise import gumbel
from kernels.settings import NOT_FINITE, NOTHING_LEFT, OK, SPOILED, Settings


def draw_tokens(
    logits_SV: torch.Tensor, row_Q: np.ndarray, settings: Settings, edits: Edits | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token and the status of each draw, int64 ``[Q]``, on the logits' device.

    ``logits_SV`` is float32 and not written to: draws with ``edits`` are made from copies. A token
    whose status is not ``OK`` means nothing.
    """
    logits_QV = logits_SV
    if edits is not None or not np.array_equal(row_Q, np.arange(len(logits_SV))):
        logits_QV = logits_SV[to_device(row_Q, logits_SV.device)]
    # A sum is finite only if its terms are; a mean does not overflow.
    mean_Q = logits_QV.mul(1.0 / logits_QV.shape[1]).sum(dim=-1)
    status_Q = torch.where(torch.isfinite(mean_Q), OK, NOT_FINITE)
    if edits is not None:
        edit_(logits_QV, edits)
        top_Q = logits_QV.amax(dim=-1)  # NaN if there is one
        after_Q = torch.where(torch.isfinite(top_Q), OK, SPOILED)
        after_Q = after_Q.masked_fill(torch.isneginf(top_Q), NOTHING_LEFT)
        status_Q = torch.where(status_Q == OK, after_Q, status_Q)
    token_Q = logits_QV.argmax(dim=-1)
    random = np.flatnonzero(settings.random_Q)
    if len(random) == len(row_Q):
        token_Q = _scores(logits_QV, settings, random).argmax(dim=-1)
    elif len(random):
        at = to_device(random, logits_SV.device)
        token_Q[at] = _scores(logits_QV[at], settings, random).argmax(dim=-1)
    return token_Q, status_Q


def edit_(logits_EV: torch.Tensor, edits: Edits) -> None:
    """Carry out ``edits`` in their order, each as one operation over the batch's entries."""
    device, flat = logits_EV.device, logits_EV.view(-1)
    if len(edits.seen_N):
        n_E = np.diff(edits.seen_begin_E)
        less_N = np.repeat(edits.frequency_E, n_E) * edits.count_N
        less_N += np.repeat(edits.presence_E, n_E) * (edits.count_N > 0)
        places_N = _places(logits_EV, edits.seen_begin_E, edits.seen_N)
        factor_N = to_device(np.repeat(edits.repetition_E, n_E), device)
        some_N = flat[places_N]
        some_N = torch.where(some_N > 0, some_N / factor_N, some_N * factor_N)
        flat[places_N] = some_N - to_device(less_N, device)
    if len(edits.biased_N):
        places_N = _places(logits_EV, edits.bias_begin_E, edits.biased_N)
        flat.index_put_((places_N,), to_device(edits.bias_N, device), accumulate=True)
    if len(edits.banned_N):
        places_N = _places(logits_EV, edits.ban_begin_E, edits.banned_N)
        flat.index_fill_(0, places_N, float("-inf"))
    if len(edits.mask_GW):
        words_GW = to_device(edits.mask_GW.view(np.int32), device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        allowed_GV = ((words_GW[:, :, None] >> shifts) & 1).flatten(1)[:, : logits_EV.shape[1]]
        at = to_device(np.flatnonzero(edits.mask_E >= 0), device)
        logits_EV[at] = logits_EV[at].masked_fill(allowed_GV == 0, float("-inf"))


def read_logprobs(
    logits_SV: torch.Tensor, row_L: np.ndarray, token_L: torch.Tensor, k: int
) -> torch.Tensor:
    """``[L, 2 + 2 * k]`` in double: the token's logprob, its rank, k likeliest ids, their logprobs.

    By the raw distribution of each row; a row that is not finite gives NaN somewhere.
    """
    logits_LV = logits_SV[to_device(row_L, logits_SV.device)]
    log_sum_L = logits_LV.logsumexp(dim=-1, keepdim=True).double()
    chosen_L = logits_LV.gather(1, token_L[:, None])
    rank_L = (logits_LV > chosen_L).sum(dim=-1, keepdim=True) + 1
    columns = [chosen_L.double() - log_sum_L, rank_L.double()]
    if k:
        best_LK, ids_LK = logits_LV.topk(k, dim=-1)
        columns += [ids_LK.double(), best_LK.double() - log_sum_L]
    return torch.cat(columns, dim=-1)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small array on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _places(logits_EV: torch.Tensor, begin_E: np.ndarray, ids_N: np.ndarray) -> torch.Tensor:
    """Where each row's tokens are in the flattened logits."""
    rows_N = np.repeat(np.arange(len(logits_EV)), np.diff(begin_E))
    return to_device(rows_N * logits_EV.shape[1] + ids_N, logits_EV.device)


def _scores(logits_QV: torch.Tensor, settings: Settings, random: np.ndarray) -> torch.Tensor:
    """``(logit - largest) / temperature + noise``, minus infinity for what is cut."""
    device = logits_QV.device
    per_t_Q = to_device(np.float32(1.0) / settings.temperature_Q[random], device)
    scaled_QV = (logits_QV - logits_QV.amax(dim=-1, keepdim=True)) * per_t_Q[:, None]
    scores_QV = scaled_QV + gumbel(settings.key_Q[random], scaled_QV.shape[1], device)
    vocab = scaled_QV.shape[1]
    top_k, top_p, min_p = (
        c[random] for c in (settings.top_k_Q, settings.top_p_Q, settings.min_p_Q)
    )
    top_k = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    cut = np.flatnonzero((top_k < vocab) | (top_p < 1) | (min_p > 0))
    if len(cut) == 0:
        return scores_QV
    cuts = [to_device(c[cut], device)[:, None] for c in (top_k, top_p, min_p)]
    if len(cut) == len(random):
        return scores_QV.masked_fill_(scaled_QV < _floor(scaled_QV, *cuts), float("-inf"))
    at = to_device(cut, device)
    some = scaled_QV[at]
    scores_QV[at] = scores_QV[at].masked_fill(some < _floor(some, *cuts), float("-inf"))
    return scores_QV


def _floor(
    scaled_QV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Smallest scaled logit ``[Q, 1]`` that survives min_p, then top_k, then top_p.

    A value, not a rank: equal logits stay together.
    """
    sorted_QV = scaled_QV.sort(dim=-1, descending=True).values
    floor = torch.maximum(sorted_QV.gather(1, top_k - 1), min_p.clamp(0, 1).log().float())
    mass_QV = sorted_QV.double().exp() * (sorted_QV >= floor)
    before_QV = mass_QV.cumsum(dim=-1) - mass_QV
    goal = top_p.clamp(0, 1) * mass_QV.sum(dim=-1, keepdim=True)
    # A candidate stays while the mass before it has not reached top_p; the first always stays.
    inside_QV = (sorted_QV >= floor) & (before_QV < goal)
    inside_QV[:, 0] = True
    last = sorted_QV.gather(1, inside_QV.sum(dim=-1, keepdim=True) - 1)
    # top_p of 1 asks for no cut by mass: rounding in the sums must not make one.
    return torch.where(top_p >= 1, floor, last)

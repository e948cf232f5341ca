"""Draws the next token of each row: greedy, or seeded with temperature, top-k and top-p.

This file owns the noise. Sampling is Gumbel-max: the token with the largest
``logit / temperature + noise`` is an exact draw from the softmax. The noise is an integer hash of
(seed, choice, token index, token id), so a row draws the same token alone or in any batch, on any
worker, before and after a failover. It must never use a random generator with state, and one
row's bad logits must never touch another row.

Shape suffixes: S sampled rows, V vocabulary, K candidates looked at first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protocol.types import SamplingParams

GREEDY_BELOW = 1e-5  # smaller temperatures are greedy: dividing by them overflows
_CANDIDATES = (256, 4096)  # tried in turn before a full sort; nearly every nucleus is smaller
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: how, and the place of the new token within the answer."""

    params: SamplingParams
    token_index: int
    choice: int = 0


def sample(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row, None for a row whose logits are not all finite.

    ``logits_SV`` has one row per draw, any float dtype, any device.
    """
    logits_SV = logits_SV.float()
    finite_S = torch.isfinite(logits_SV.sum(dim=-1)).tolist()  # a sum is finite iff its terms are
    tokens_S = logits_SV.argmax(dim=-1)
    random = [
        i for i, d in enumerate(draws) if d.params.temperature >= GREEDY_BELOW and finite_S[i]
    ]
    if random:
        at = torch.tensor(random, device=logits_SV.device)
        scores = _scores(logits_SV[at], [draws[i] for i in random])
        tokens_S[at] = scores.argmax(dim=-1)
    return [t if ok else None for t, ok in zip(tokens_S.tolist(), finite_S, strict=True)]


def gumbel_noise(draws: Sequence[Draw], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise ``[S, V]``, float32, a pure function of its arguments."""
    keys = [_key(d.params.seed, d.choice, d.token_index) for d in draws]
    low = torch.tensor([[_signed(k & 0xFFFFFFFF)] for k in keys], dtype=torch.int32, device=device)
    high = torch.tensor([[_signed(k >> 32)] for k in keys], dtype=torch.int32, device=device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0x9E3779B1)
    bits_SV = ids[None] ^ low
    scratch_SV = torch.empty_like(bits_SV)
    bits_SV = _mix_(_mix_(bits_SV, scratch_SV).add_(high), scratch_SV)
    # (bits + 2^31 + 0.5) / 2^32 lies in (0, 1). In double, because small values need all 32 bits:
    # they are the large noises. Rounded up to 1 in float32 it would give minus infinity.
    uniform_SV = bits_SV.double().add_(2147483648.5).mul_(2.0**-32).float()
    uniform_SV.clamp_(max=1 - 2.0**-24)
    return uniform_SV.neg_().log1p_().neg_().log_().neg_()


def _scores(logits_SV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """``logit / temperature + noise``, minus infinity for candidates cut by top-k or top-p."""
    temperature = torch.tensor([[d.params.temperature] for d in draws], device=logits_SV.device)
    scaled_SV = logits_SV / temperature
    scores_SV = scaled_SV + gumbel_noise(draws, logits_SV.shape[1], logits_SV.device)
    cut = [i for i, d in enumerate(draws) if d.params.top_k > 0 or d.params.top_p < 1]
    if cut:
        at = torch.tensor(cut, device=logits_SV.device)
        chosen = scaled_SV[at]
        floor = _floor(chosen, [draws[i].params for i in cut])
        scores_SV[at] = scores_SV[at].masked_fill(chosen < floor[:, None], float("-inf"))
    return scores_SV


def _floor(scaled_SV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Smallest scaled logit of each row that survives top-k, then top-p of what top-k left.

    Working with a value, not with ranks, keeps ties together: a cut never depends on the order
    in which a sort returned equal logits, hence not on the batch.
    """
    vocab = scaled_SV.shape[1]
    floor_S = torch.full((len(params),), float("nan"), device=scaled_SV.device)
    for n_candidates in (*(n for n in _CANDIDATES if n < vocab), vocab):
        unsettled = torch.isnan(floor_S).nonzero().flatten().tolist()
        if unsettled:
            some = [params[i] for i in unsettled]
            floor_S[unsettled] = _floor_within(scaled_SV[unsettled], some, n_candidates)
    return floor_S


def _floor_within(
    scaled_SV: torch.Tensor, params: Sequence[SamplingParams], n_candidates: int
) -> torch.Tensor:
    """As ``_floor`` from the ``n_candidates`` largest; NaN where these do not settle it."""
    device, vocab = scaled_SV.device, scaled_SV.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    top_p = torch.tensor([min(max(p.top_p, 0.0), 1.0) for p in params], device=device)
    best_SK = scaled_SV.topk(n_candidates, dim=-1).values
    mass_SK = (best_SK - best_SK[:, :1]).double().exp()
    rank_K = torch.arange(n_candidates, device=device)
    kept_SK = rank_K < top_k[:, None]
    running_SK = (mass_SK * kept_SK).cumsum(dim=-1)
    whole_S = (scaled_SV - best_SK[:, :1]).exp_().sum(dim=-1).double()
    total_S = torch.where(top_k < vocab, running_SK[:, -1], whole_S)
    # A candidate stays while the mass before it has not reached top_p; the first always stays.
    before_SK = running_SK - mass_SK * kept_SK
    inside_SK = kept_SK & ((before_SK < top_p[:, None] * total_S[:, None]) | (rank_K == 0))
    floor_S = best_SK.gather(1, inside_SK.sum(dim=-1, keepdim=True) - 1)[:, 0]
    settled_S = (top_k <= n_candidates) | ((top_k == vocab) & ~inside_SK[:, -1])
    if n_candidates < vocab:
        floor_S = floor_S.masked_fill(~settled_S, float("nan"))
    # top_p of 1 asks for no cut by mass: rounding in the sums must not make one.
    unlimited_S = (top_p >= 1) & (top_k == vocab)
    return floor_S.masked_fill(unlimited_S, float("-inf"))


def _mix_(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift, multiply; twice) on int32, which wraps on every device.

    In place: a fresh tensor per operation costs 15 times as much here, in page faults.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x ^= scratch.bitwise_and_((1 << (32 - shift)) - 1)  # the shift copies the sign; cut it off
        x *= _signed(factor)
    return x


def _key(seed: int, choice: int, token_index: int) -> int:
    """64 well-mixed bits of the three numbers (splitmix64's finaliser over each in turn)."""
    key = 0
    for number in (seed, choice, token_index):
        key = (key + number + 0x9E3779B97F4A7C15) & _MASK_64
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK_64
        key ^= key >> 31
    return key


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word

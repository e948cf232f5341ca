"""Sampling on a GPU: the same tokens as on a CPU, and nothing waits for the device but the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from drawing import CPU, logits, params

from kernels.edits import edited
from kernels.sampling import Sampler
from kernels.settings import Draw
from protocol.types import TicketId

pytestmark = pytest.mark.gpu
VOCAB, N, EOS = 49_152, 64, (2,)


def mixed_draws() -> list[Draw]:
    """Greedy and drawn rows with every cut, penalty and bias, two choices of each third row."""
    rng = random.Random(3)
    draws = []
    for i in range(N):
        history = rng.choices(range(VOCAB), k=rng.randint(5, 30))
        p = params(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 40]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(1 << 64),
            frequency_penalty=rng.choice([0.0, 0.2]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([(), ((5, 3.0), (6, -3.0))]),
            min_tokens=rng.choice([0, 40]),
            logprobs=rng.choice([None, 0, 3]),
        )
        d = Draw(p, len(history) - 3, 0, i, TicketId(str(i)), history, 3)
        draws += [d, replace(d, choice=1)] if i % 3 == 0 else [d]
    return draws


def test_same_tokens_and_logprobs_as_on_a_cpu() -> None:
    x, draws = logits(N, 1, VOCAB), mixed_draws()
    x[9, 9] = float("nan")
    want = Sampler(VOCAB, CPU, EOS).sample(x, draws)
    got = Sampler(VOCAB, torch.device("cuda"), EOS).sample(x.cuda(), draws)
    assert [g.token for g in got] == [w.token for w in want]
    assert [g.error for g in got] == [w.error for w in want]
    for g, w in zip(got, want, strict=True):
        assert (g.logprobs is None) == (w.logprobs is None)
        if g.logprobs and w.logprobs:
            assert g.logprobs.logprob == pytest.approx(w.logprobs.logprob, abs=1e-4)
            assert g.logprobs.rank == w.logprobs.rank
            assert [t for t, _ in g.logprobs.top] == [t for t, _ in w.logprobs.top]


def test_nothing_waits_before_the_end() -> None:
    draws = mixed_draws()
    x = logits(N, 2, VOCAB).cuda()
    sampler = Sampler(VOCAB, torch.device("cuda"), EOS)
    sampler.sample(x, draws)  # what happens once has happened
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_Q, _, failed = sampler.queue(x, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(token_Q) == len(draws) and not failed
    assert any(edited(d) for d in draws)

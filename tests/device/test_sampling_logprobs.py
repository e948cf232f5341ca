"""Logprobs of drawn tokens: of the raw distribution, with rank and likeliest, edits or not."""

from __future__ import annotations

import pytest
import torch
from drawing import BACKENDS, CPU, draw, drawn, logits, params

from kernels.sampling import Sampler
from kernels.settings import Draw
from protocol.errors import InternalError
from protocol.types import TicketId

both = pytest.mark.parametrize("backend", BACKENDS)


@both
@pytest.mark.parametrize("vocab", [3, 320, 5000])
def test_against_log_softmax_in_double(vocab: int, backend: str) -> None:
    x = logits(40, 1, vocab)
    x[::5] = x[::5].round()  # ties
    asked = [(None, 0, 1, 2, vocab + 5)[i % 5] for i in range(40)]
    draws = [Draw(drawn(seed=i, logprobs=k, temperature=0.5), i) for i, k in enumerate(asked)]
    want = torch.log_softmax(x.double(), -1)
    for i, got in enumerate(draw(x, draws, backend)):
        if asked[i] is None:
            assert got.logprobs is None
            continue
        assert got.logprobs is not None and got.logprobs.token_id == got.token
        assert got.logprobs.logprob == pytest.approx(want[i, got.token].item(), abs=2e-5)
        assert got.logprobs.rank == 1 + (x[i] > x[i, got.token]).sum()
        top = got.logprobs.top
        assert len(top) == min(asked[i], vocab) == len({t for t, _ in top})
        best = want[i].sort(descending=True).values[: len(top)]
        assert [p for _, p in top] == pytest.approx(best.tolist(), abs=2e-5)
        assert [want[i, t].item() for t, _ in top] == pytest.approx(best.tolist(), abs=2e-5)


def test_equal_logits_are_listed_by_id() -> None:
    x = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]])
    got = draw(x, [Draw(params(logprobs=4), 0)])[0]
    assert got.token == 1 and [t for t, _ in got.logprobs.top] == [1, 2, 4, 0]


@both
def test_of_the_raw_distribution_whatever_the_edits(backend: str) -> None:
    """The bias forbids the likeliest token: it is still the first of the list."""
    x = logits(1, 2, 320)
    best = int(x.argmax())
    p = params(logprobs=1, logit_bias=((best, -100.0),), temperature=0.0, repetition_penalty=3.0)
    got = draw(x, [Draw(p, 1, 0, 0, TicketId("a"), [5, 6], 1)], backend)[0]
    assert got.token != best and got.logprobs.top[0][0] == best
    want = torch.log_softmax(x[0].double(), -1)
    assert got.logprobs.logprob == pytest.approx(want[got.token].item(), abs=1e-5)
    assert got.logprobs.rank >= 2


@both
def test_a_row_without_meaning_has_no_logprobs_and_harms_nobody(backend: str) -> None:
    x = logits(3, 3, 320)
    x[1, 9] = float("nan")
    got = draw(x, [Draw(params(logprobs=2), 0)] * 3, backend)
    assert got[1].error is not None and got[1].logprobs is None
    alone = draw(x[2:], [Draw(params(logprobs=2), 0)], backend)[0]
    assert got[2] == alone


@both
def test_prompt_rows(backend: str) -> None:
    x = logits(5, 4, 320)
    sampler = Sampler(320, CPU, compiled=BACKENDS[backend])
    tokens = [3, 3, 200, 319, 0]
    tables = [sampler.prompt_table(x[a:b], tokens[a:b], 2) for a, b in ((0, 2), (2, 5))]
    got = sampler.prompt_logprobs(tables, tokens, 2)
    want = torch.log_softmax(x.double(), -1)
    assert [g.token_id for g in got] == tokens
    assert [g.logprob for g in got] == pytest.approx([want[i, t].item() for i, t in
                                                      enumerate(tokens)], abs=1e-5)  # fmt: skip
    assert all(len(g.top) == 2 for g in got)
    x[3, 0] = float("inf")
    with pytest.raises(InternalError, match="not finite"):
        sampler.prompt_logprobs([sampler.prompt_table(x, tokens, 2)], tokens, 2)

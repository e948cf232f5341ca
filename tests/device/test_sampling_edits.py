"""Penalties, logit_bias and min_tokens: as transformers does, incremental, failing row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from drawing import BACKENDS, CPU, draw, drawn, in_order, logits, params
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from kernels import draw_torch
from kernels.edits import Edit, collect, penalised, too_early
from kernels.sampling import Sampler
from kernels.sequence_state import KEEP_STEPS, SequenceStates, TokenCounts
from kernels.settings import Draw
from protocol.errors import InternalError
from protocol.types import SamplingParams, TicketId

both = pytest.mark.parametrize("backend", BACKENDS)
VOCAB = 400
INF = float("inf")


def after(params: SamplingParams, prompt: list[int], answer: list[int], name: str = "a") -> Draw:
    """The draw that follows an answer."""
    return Draw(params, len(answer), 0, 0, TicketId(name), prompt + answer, len(prompt))


def edited_logits(x: torch.Tensor, draws: list[Draw], eos: tuple[int, ...] = ()) -> torch.Tensor:
    """What the tokens are drawn from, edit by edit as the sampler does."""
    y = x.clone()
    counts = SequenceStates(lambda d, p: TokenCounts(p if d.params.repetition_penalty != 1 else ()))
    some = [
        Edit(d, counts.of(d) if penalised(d.params) else None, may_end=not too_early(d))
        for d in draws
    ]
    draw_torch.edit_(y, collect(some, x.shape[1], eos))
    return y


def test_repetition_is_that_of_transformers() -> None:
    x = logits(1, 5, VOCAB)
    prompt, answer = [3, 9, 9, 77], [9, 120, 3]
    got = edited_logits(x, [after(params(repetition_penalty=1.7), prompt, answer)])
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + answer]), x.clone())
    assert torch.equal(got, want)


def test_presence_and_frequency_look_at_the_answer_only() -> None:
    x = logits(1, 6, VOCAB)
    p = params(presence_penalty=0.5, frequency_penalty=0.25)
    got = edited_logits(x, [after(p, [1, 2, 3], [2, 2, 50])])
    want = x.clone()
    want[0, 2] -= 0.5 + 2 * 0.25
    want[0, 50] -= 0.5 + 0.25
    assert torch.allclose(got, want)


def test_all_penalties_by_a_plain_reference_in_double() -> None:
    rng = random.Random(4)
    x = logits(12, 8, VOCAB)
    draws = []
    for i in range(12):
        p = params(
            repetition_penalty=rng.choice([1.0, 0.7, 1.3]),
            presence_penalty=rng.choice([0.0, -1.0, 0.8]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            logit_bias=tuple((t, rng.uniform(-5, 5)) for t in rng.sample(range(VOCAB), 3)),
        )
        prompt = rng.choices(range(60), k=rng.randint(1, 40))
        draws.append(after(p, prompt, rng.choices(range(60), k=rng.randint(0, 30)), str(i)))
    want = x.double()
    for i, d in enumerate(draws):
        answer = d.history[d.n_prompt :]
        for t in set(d.history):
            factor = d.params.repetition_penalty
            want[i, t] = want[i, t] / factor if want[i, t] > 0 else want[i, t] * factor
            want[i, t] -= d.params.frequency_penalty * answer.count(t)
            want[i, t] -= d.params.presence_penalty * (t in answer)
        for t, value in d.params.logit_bias:
            want[i, t] += value
    assert torch.allclose(edited_logits(x, draws).double(), want, atol=1e-5)


def test_min_tokens_is_that_of_transformers() -> None:
    x = logits(1, 7, VOCAB)
    for n_answer in (0, 2, 3, 4):
        d = after(params(min_tokens=3), [1, 2], [5] * n_answer)
        got = edited_logits(x, [d], eos=(17, 33))
        processor = MinNewTokensLengthLogitsProcessor(2, 3, torch.tensor([17, 33]))
        assert torch.equal(got, processor(torch.tensor([d.history]), x.clone()))


@both
def test_no_end_before_min_tokens(backend: str) -> None:
    """The likeliest tokens are the ends; they come when, and only when, they may."""
    x = torch.zeros(5, 10)
    x[:, 4], x[:, 7], x[:, 9] = 9.0, 8.0, 7.0
    draws = [
        after(params(min_tokens=2, stop_token_ids=(7,)), [1], [2], "early"),
        after(params(min_tokens=2, stop_token_ids=(7,)), [1], [2, 2], "late"),
        after(params(min_tokens=2, ignore_eos=True), [1], [2], "ignores"),
        after(params(min_tokens=2, stop_token_ids=(7, 99)), [1], [2], "unknown stop"),
        after(params(stop_token_ids=(4,)), [1], [2], "no min_tokens"),
    ]
    assert [d.token for d in draw(x, draws, backend, eos=(4,))] == [9, 4, 4, 9, 4]


@both
def test_greedy_takes_the_largest_edited_logit(backend: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0]] * 4)
    draws = [
        after(params(logit_bias=((3, 4.0),)), [1], [], "bias"),
        after(params(presence_penalty=2.5), [0], [2], "presence"),
        after(params(repetition_penalty=4.0), [2], [], "repetition"),
        after(params(), [2], [2], "plain"),
    ]
    assert [d.token for d in draw(x, draws, backend)] == [3, 1, 1, 2]


@both
def test_rows_fail_alone_and_say_why(backend: str) -> None:
    x = logits(7, 1, 10)
    x[4, 3] = float("nan")
    draws = [
        after(params(logit_bias=((10, 1.0),)), [1], [], "beyond"),
        after(params(logit_bias=tuple((t, -INF) for t in range(10))), [1], [], "nothing"),
        after(params(logit_bias=((2, INF),)), [1], [], "spoiled"),
        Draw(params(presence_penalty=1.0), 5, 0, 0, TicketId("short"), [1, 2], 1),
        after(params(logit_bias=((0, -INF),)), [1], [], "nan"),
        after(params(logit_bias=((0, -INF), (1, -INF))), [1], [], "good"),
        after(
            params(
                min_tokens=1,
                stop_token_ids=(8, 9),
                logit_bias=tuple((t, -INF) for t in range(8)),
            ),
            [1],
            [],
            "both",
        ),
    ]
    got = draw(x, draws, backend)
    messages = [d.error.message if d.error else "" for d in got]
    assert "logit_bias names token 10" in messages[0] and "0..9" in messages[0]
    assert "no token is left for nothing#1: logit_bias exclude" in messages[1]
    assert "without meaning for spoiled#1" in messages[2]
    assert "2 tokens of history where 6" in messages[3]
    assert "output for nan#1 is not finite" in messages[4]
    assert got[5].error is None and got[5].token == x[5, 2:].argmax() + 2
    assert "logit_bias and min_tokens exclude" in messages[6]
    reasons = [d.error.reason for d in got if d.error]
    assert reasons == ["INVALID_ARGUMENT"] * 3 + ["INTERNAL"] * 2 + ["INVALID_ARGUMENT"]


def test_raw_logits_are_not_written_to() -> None:
    x = logits(3, 2, VOCAB)
    before = x.clone()
    p = drawn(repetition_penalty=2.0, logit_bias=((1, 5.0),), min_tokens=9, top_p=0.5, logprobs=2)
    draw(x, [after(p, [1, 2], [3, 4], str(i)) for i in range(3)], eos=(5,))
    assert torch.equal(x, before)


def mixed_params(rng: random.Random) -> SamplingParams:
    """Any mixture of features, as far as a tokenizer is not needed."""
    return params(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        top_k=rng.choice([0, 3, 200]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1 << 64),
        presence_penalty=rng.choice([0.0, 0.6]),
        frequency_penalty=rng.choice([0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logit_bias=rng.choice([(), ((5, 3.0), (6, -3.0))]),
        min_tokens=rng.choice([0, 4]),
        stop_token_ids=rng.choice([(), (11,)]),
        logprobs=rng.choice([None, 0, 3]),
    )


@both
def test_same_token_alone_and_in_any_batch_with_everything_mixed(backend: str) -> None:
    rng = random.Random(9)
    n = 48
    x = logits(n, 11, 700)
    x[7, 7] = INF
    draws = []
    for i in range(n):
        history = rng.choices(range(700), k=rng.randint(5, 30))
        n_prompt = rng.randint(1, len(history))
        draws.append(
            Draw(mixed_params(rng), len(history) - n_prompt, 0, i, TicketId(str(i)), history,
                 n_prompt)
        )  # fmt: skip
    sampler = Sampler(700, CPU, (2,), compiled=BACKENDS[backend])
    together = sampler.sample(x, draws)
    assert together[7].error and sum(d.error is not None for d in together) == 1
    for i in range(n):
        alone = draw(x[i : i + 1], [draws[i]], backend, eos=(2,))[0]
        assert alone == together[i]
    order = rng.sample(range(n), n)
    shuffled = Sampler(700, CPU, (2,), compiled=BACKENDS[backend]).sample(
        x[order], in_order([draws[i] for i in order])
    )
    assert shuffled == [together[i] for i in order]


@both
def test_choices_of_one_row_are_drawn_each_with_its_own_noise(backend: str) -> None:
    x = logits(2, 3, 2000) / 10
    sampler = Sampler(2000, CPU, compiled=BACKENDS[backend])
    draws = [Draw(drawn(seed=4), 0, c, row=1) for c in range(5)] + [
        Draw(drawn(seed=4), 0, 2, row=0)
    ]
    tokens = [d.token for d in sampler.sample(x, draws)]
    assert len(set(tokens[:5])) == 5
    alone = [draw(x[1:], [Draw(drawn(seed=4), 0, c)], backend)[0].token for c in range(5)]
    assert tokens[:5] == alone


tokens_of = st.lists(st.integers(0, 30), max_size=12)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_incremental_state_equals_a_rebuilt_one(data: st.DataObject) -> None:
    """Sequences advance, are cut back, replaced by others of the same name, forgotten."""
    params_of = [
        params(repetition_penalty=1.3, frequency_penalty=0.1),
        params(frequency_penalty=0.4),
    ]

    def build(d: Draw, prompt: list[int]) -> TokenCounts:
        return TokenCounts(prompt if d.params.repetition_penalty != 1 else ())

    states = SequenceStates(build)
    histories: dict[str, tuple[list[int], int, SamplingParams]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        states.next_step()
        name = data.draw(st.sampled_from("abc"))
        how = data.draw(st.sampled_from(["new", "advance", "advance", "cut", "copy", "idle"]))
        if how == "new" or name not in histories:
            prompt = [*data.draw(tokens_of), 1]
            p = data.draw(st.sampled_from(params_of))
            histories[name] = (prompt + data.draw(tokens_of), len(prompt), p)
        history, n_prompt, p = histories[name]
        if how == "advance":
            history += data.draw(tokens_of)
        elif how == "cut":
            del history[data.draw(st.integers(n_prompt, len(history))) :]
        elif how == "copy":  # another list with the same tokens: a hand-off
            histories[name] = (list(history), n_prompt, p)
        elif how == "idle":
            for _ in range(KEEP_STEPS + 1):
                states.next_step()
            assert len(states) == 0
        history, n_prompt, p = histories[name]
        d = Draw(p, len(history) - n_prompt, 0, 0, TicketId(name), history, n_prompt)
        got = states.of(d)
        want = build(d, history[:n_prompt])
        want.feed(history[n_prompt:])
        assert dict(zip(got.ids.tolist(), got.counts.tolist(), strict=True)) == dict(
            zip(want.ids.tolist(), want.counts.tolist(), strict=True)
        )


def test_forgotten_when_not_seen_any_more() -> None:
    sampler = Sampler(50, CPU)
    x = logits(1, 0, 50)
    p = params(presence_penalty=1.0)
    for i in range(KEEP_STEPS + 100):
        sampler.sample(x, [after(p, [1], [2], f"r{i}")])
    assert sampler.remembered == KEEP_STEPS
    for _ in range(KEEP_STEPS):
        sampler.sample(x, [after(params(), [1], [2], "plain")])
    assert sampler.remembered == 0


def test_a_state_whose_feeding_fails_is_not_kept() -> None:
    class Fails:
        def feed(self, tokens: list[int]) -> None:
            raise InternalError("no")

    states = SequenceStates(lambda d, p: Fails())
    d = after(params(), [1], [2])
    for _ in range(2):
        with pytest.raises(InternalError):
            states.of(d)
        assert len(states) == 0


def test_counts_grow() -> None:
    counts = TokenCounts([5, 5, 7])
    counts.feed(list(range(300)) * 2)
    assert counts.ids.tolist()[:2] == [5, 7] and len(counts.ids) == 300
    assert np.all(counts.counts == 2)


@both
@pytest.mark.parametrize("factor", [5e-324, 1e-45, 1e-30])
def test_a_factor_too_small_for_a_float_fails_its_row_alone(backend: str, factor: float) -> None:
    x = logits(3, 2, VOCAB)
    x[0, 7] = 1e9
    tiny = params(repetition_penalty=factor)
    draws = [after(tiny, [7], [], "tiny"), Draw(params(), 0, 0, 1, TicketId("plain"), [7], 1)]
    got = draw(x, draws, backend)
    assert got[1].error is None and got[1].token == x[1].argmax()
    assert got[0].error is not None and got[0].error.reason == "INVALID_ARGUMENT"

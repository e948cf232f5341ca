"""Whole models through the runner: chunked, mixed and shared, against transformers' generate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from stepping import PAGE, Sequence, new_runner, step

from cluster.bench.agreement import agree
from kernels.model import LoadedModel, load_model
from kernels.runner import Runner
from protocol.errors import InternalError
from protocol.step import RowResult, StepRow
from protocol.types import SamplingParams, TicketId

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt2")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("models")


@cache
def _model(root: Path, family: str) -> tuple[Path, LoadedModel]:
    folder = tiny.tiny_model(root / family, family)
    return folder, load_model(folder)


def generate(runner: Runner, s: Sequence, n: int, chunks: Iterator[int]) -> list[int]:
    while len(s.output) < n:
        step(runner, {s: next(chunks)})
    return s.output


def endless(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_equals_generate(root: Path, family: str) -> None:
    folder, model = _model(root, family)
    prompt = random.Random(1).choices(range(4, 320), k=38)
    want = tiny.reference_generate(folder, prompt, 16)
    for chunks in ((38,), (7, 1, 16, 14), (4,), (1, 5)):
        pages = random.Random(str(chunks)).sample(range(64), 20)
        got = generate(new_runner(model), Sequence("a", prompt, pages), 16, endless(*chunks))
        verdict = agree(prompt, got, want, lambda ids: tiny.reference_logits(folder, ids))
        assert verdict, (family, chunks, verdict.reason)


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 8 * PAGE])
def test_prompt_lengths_around_a_page(root: Path, length: int) -> None:
    folder, model = _model(root, "llama")
    prompt = random.Random(length).choices(range(4, 320), k=length)
    want = tiny.reference_generate(folder, prompt, 10)
    got = generate(new_runner(model), Sequence("a", prompt, list(range(30))), 10, endless(5))
    verdict = agree(prompt, got, want, lambda ids: tiny.reference_logits(folder, ids))
    assert verdict, verdict.reason


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mixed_batches_change_nobodys_answer(root: Path, backend: str) -> None:
    """Six sequences at different ages in one random schedule, each as if it were alone."""
    folder, model = _model(root, "llama")
    rng = random.Random(5)
    free = rng.sample(range(100), 100)
    runner = new_runner(model, 100, backend)
    sequences = []
    for i in range(6):
        prompt = rng.choices(range(4, 320), k=rng.choice([1, 3, 4, 5, 17, 33]))
        sequences.append(Sequence(str(i), prompt, [free.pop() for _ in range(12)]))
    goal = 8
    while live := [s for s in sequences if len(s.output) < goal]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        step(runner, {s: rng.choice([1, 2, 7, 16]) for s in chosen})
    for s in sequences:
        prompt = s.tokens[: s.n_prompt]
        want = tiny.reference_generate(folder, prompt, goal)
        verdict = agree(prompt, s.output, want, lambda ids: tiny.reference_logits(folder, ids))
        assert verdict, verdict.reason


def test_seeded_answer_is_the_same_alone_and_in_company(root: Path) -> None:
    _, model = _model(root, "llama")
    drawn = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=77)
    prompt = list(range(20, 31))
    runner = new_runner(model)
    alone = generate(runner, Sequence("a", prompt, list(range(10)), drawn), 12, endless(4))
    sequence = Sequence("a", prompt, list(range(20, 30)), drawn)
    other = Sequence("b", [9, 8, 7], list(range(40, 50)))
    while len(sequence.output) < 12:
        step(runner, {other: 3, sequence: 6})
    assert sequence.output == alone
    assert len(set(alone)) > 3


def test_a_row_with_nan_fails_alone_and_stays_in_its_pages(root: Path) -> None:
    _, model = _model(root, "llama")
    runner = new_runner(model)
    good, bad = Sequence("good", [5, 6, 7, 8, 9], [1, 2, 3]), Sequence("bad", [9] * 5, [4, 5, 6])
    twin = Sequence("twin", [5, 6, 7, 8, 9], [7, 8, 9])
    step(runner, {good: 5, bad: 5, twin: 5})
    runner.poison([4])
    rows = [bad.row(1), good.row(1), twin.row(1)]
    result = runner.run(rows)
    failed, lived, lived_too = result.rows
    assert failed.error and failed.error.reason == "INTERNAL" and "bad" in failed.error.message
    assert lived.error is None and lived.tokens == lived_too.tokens != ()


def test_poisoned_pages_do_not_leak_into_their_next_owner(root: Path) -> None:
    folder, model = _model(root, "llama")
    runner = new_runner(model)
    generate(runner, Sequence("old", list(range(30, 60)), list(range(12))), 5, endless(8))
    runner.poison(range(12))
    prompt = list(range(100, 109))
    got = generate(runner, Sequence("new", prompt, [11, 3, 0, 5, 2]), 8, endless(5))
    assert got == tiny.reference_generate(folder, prompt, 8)


def test_step_that_samples_nothing(root: Path) -> None:
    _, model = _model(root, "llama")
    result = new_runner(model).run([StepRow(TicketId("a"), [5, 6], 0, [0])])
    assert result.rows == (RowResult(),)


def test_warm_up_works_on_one_page(root: Path) -> None:
    _, model = _model(root, "gemma2")
    new_runner(model, pages=1).warm_up()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (StepRow(TicketId("a"), [], 0, [0]), "without tokens"),
        (StepRow(TicketId("a"), [1], -1, [0]), "negative start"),
        (StepRow(TicketId("a"), [1] * 5, 0, [0]), "1 pages cannot hold 5"),
        (StepRow(TicketId("a"), [1], 0, [64]), "page outside"),
        (StepRow(TicketId("a"), [1], 0, [-1]), "page outside"),
        (StepRow(TicketId("a"), [320], 0, [0]), "token id outside"),
    ],
)
def test_a_schedulers_bug_is_caught_before_it_writes(
    root: Path, row: StepRow, complaint: str
) -> None:
    _, model = _model(root, "llama")
    with pytest.raises(InternalError, match=complaint):
        new_runner(model).run([row])


def test_pool_of_another_shape_is_refused(root: Path) -> None:
    _, model = _model(root, "llama")
    g = model.geometry(PAGE)
    with pytest.raises(InternalError, match="KV pool of shape"):
        Runner(model, torch.zeros(4, g.layers, 2, PAGE, g.kv_heads + 1, g.head_dim), PAGE)
    half = torch.zeros(4, g.layers, 2, PAGE, g.kv_heads, g.head_dim, dtype=torch.bfloat16)
    with pytest.raises(InternalError, match="bfloat16"):
        Runner(model, half, PAGE)

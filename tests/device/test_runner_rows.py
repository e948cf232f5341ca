"""What a runner makes of a step beyond tokens: choices, prompt logprobs, copies, grammars."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
import tiny
import torch
from stepping import PAGE, Sequence, new_runner, step
from transformers import AutoTokenizer

from kernels import prompt_logprobs as prompt_logprobs_module
from kernels.model import LoadedModel, load_model
from kernels.runner import Runner
from protocol.errors import InternalError
from protocol.step import CopyKind, PageCopy, StepRow
from protocol.types import Grammar, GrammarKind, SamplingParams, TicketId, TokenLogprobs

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("runner-rows")


@cache
def _model(root: Path, family: str) -> tuple[Path, LoadedModel]:
    folder = tiny.tiny_model(root / family, family)
    return folder, load_model(folder)


def asking(**settings) -> SamplingParams:
    return SamplingParams(max_tokens=64, **settings)


def collect(runner: Runner, s: Sequence, chunks: list[int]) -> list[TokenLogprobs]:
    """The prompt logprobs of a sequence computed in these chunks."""
    found: list[TokenLogprobs] = []
    for n in chunks:
        row = s.row(n)
        result = runner.run([row]).rows[0]
        assert result.error is None
        found += result.prompt_logprobs
        s.done += len(row.tokens)
        s.tokens += result.tokens
    return found


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_prompt_logprobs_are_those_of_a_whole_forward(
    root: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices of three positions: whatever a family does after its head is done there too."""
    monkeypatch.setattr(prompt_logprobs_module, "SLICE", 3)
    folder, model = _model(root, family)
    want = torch.log_softmax(tiny.reference_logits(folder, PROMPT).double(), -1)
    s = Sequence("a", PROMPT, [3, 1, 2, 7], asking(prompt_logprobs=2))
    got = collect(new_runner(model), s, [4, 1, 6])
    assert [g.token_id for g in got] == PROMPT[1:]
    for i, g in enumerate(got):
        assert g.logprob == pytest.approx(want[i, g.token_id].item(), abs=2e-4)
        least, most = ((want[i] > want[i, g.token_id] + d).sum() + 1 for d in (2e-4, -2e-4))
        assert least <= g.rank <= most
        best = want[i].topk(2).values.tolist()
        assert [p for _, p in g.top] == pytest.approx(best, abs=2e-4)


def test_prompt_logprobs_do_not_change_the_step(root: Path) -> None:
    """Beside other rows, in a chunk with and without a sampled token, and the model stays whole."""
    _, model = _model(root, "llama")
    plain, other = (Sequence(n, PROMPT, p) for n, p in (("a", [0, 1, 2, 3]), ("b", [4, 5, 6, 7])))
    runner = new_runner(model)
    for n in (4, 7, 1):
        step(runner, {plain: n, other: n})
    s, o = (Sequence(n, PROMPT, p) for n, p in (("c", [8, 9, 10, 11]), ("d", [12, 13, 14, 15])))
    s.sampling = asking(prompt_logprobs=0)
    for n in (4, 7, 1):
        step(runner, {o: n, s: n})
    assert s.output == plain.output and o.output == other.output
    assert len(runner.run([s.row(1)]).rows[0].prompt_logprobs) == 0  # an answer has none


def test_prompt_logprobs_of_a_recomputed_sequence_stop_at_the_prompt(root: Path) -> None:
    _, model = _model(root, "llama")
    s = Sequence("a", PROMPT, [0, 1, 2, 3, 4], asking(prompt_logprobs=1))
    first = collect(new_runner(model), s, [11, 1, 1])
    again = Sequence("a", s.tokens, [0, 1, 2, 3, 4], s.sampling)
    again.n_prompt = len(PROMPT)
    second = collect(new_runner(model), again, [9, 5])
    assert [g.token_id for g in second] == [g.token_id for g in first] == PROMPT[1:]
    assert [g.logprob for g in second] == pytest.approx([g.logprob for g in first], abs=1e-4)


def test_a_row_whose_prompt_logprobs_fail_fails_alone(root: Path) -> None:
    _, model = _model(root, "llama")
    runner = new_runner(model)
    good, bad = Sequence("a", PROMPT, [0, 1, 2]), Sequence("b", PROMPT, [3, 4, 5])
    for s in (good, bad):
        s.sampling = asking(prompt_logprobs=0)
    step(runner, {good: 4, bad: 4})
    runner.poison([3])
    got = runner.run([good.row(3), bad.row(3)]).rows
    assert got[0].error is None and len(got[0].prompt_logprobs) == 3
    assert got[1].error and "b#1: the model's output is not finite" in got[1].error.message
    short = StepRow(TicketId("short"), PROMPT, 0, [6, 7, 8], history=PROMPT[:5], n_prompt=11,
                    prompt_logprobs=0)  # fmt: skip
    error = runner.run([short]).rows[0].error
    assert error and "5 tokens of history" in error.message


def test_choices_share_a_prompt_and_go_on_each_for_itself(root: Path) -> None:
    """One prefill, three first tokens; a copied page per choice; then a row per choice."""
    _, model = _model(root, "llama")
    drawn = asking(temperature=1.2, seed=11, logprobs=1)
    runner = new_runner(model)
    prompt = StepRow(TicketId("n"), PROMPT, 0, [0, 1, 2], drawn, 0, (0, 1, 2), PROMPT, 11)
    first = runner.run([prompt]).rows[0]
    assert len(first.tokens) == len(first.logprobs) == 3
    assert [p.token_id for p in first.logprobs] == list(first.tokens)
    answers = [[t] for t in first.tokens]
    pages = [[0, 1, 2, 9], [0, 1, 5, 10], [0, 1, 6, 11]]  # two full pages shared, the third forked
    copies = [PageCopy(CopyKind.WITHIN, 2, 5), PageCopy(CopyKind.WITHIN, 2, 6)]
    for i in range(5):
        rows = [
            StepRow(TicketId("n"), [answers[c][-1]], 11 + i, pages[c], drawn, i + 1, (c,),
                    PROMPT + answers[c], 11)
            for c in range(3)
        ]  # fmt: skip
        for answer, result in zip(answers, runner.run(rows, copies).rows, strict=True):
            answer.append(result.tokens[0])
        copies = []
    assert len({tuple(a) for a in answers}) == 3
    for choice, answer in enumerate(answers):  # as if each had been alone from the start
        alone = new_runner(model)
        history = list(PROMPT)
        for i in range(6):
            start = 0 if i == 0 else 10 + i
            row = StepRow(TicketId("x"), history[start:], start, [4, 5, 6, 7, 8], drawn, i,
                          (choice,), history, 11)  # fmt: skip
            history.append(alone.run([row]).rows[0].tokens[0])
        assert history[11:] == answer


def test_a_failed_choice_fails_its_row(root: Path) -> None:
    _, model = _model(root, "llama")
    p = asking(temperature=1.0, logit_bias=((9999, 1.0),))
    row = StepRow(TicketId("n"), PROMPT, 0, [0, 1, 2], p, 0, (0, 1), PROMPT, 11)
    result = new_runner(model).run([row]).rows[0]
    assert result.error and result.tokens == () and result.error.field == "logit_bias"


def test_pages_go_to_host_memory_and_come_back(root: Path) -> None:
    """A sequence leaves, its pages are taken by another, and it goes on in other pages."""
    _, model = _model(root, "llama")
    whole = Sequence("a", PROMPT, [0, 1, 2, 3, 4])
    runner = new_runner(model)
    for _ in range(8):
        step(runner, {whole: 11})
    runner = new_runner(model, pages=10, host_pages=4)
    s, other = Sequence("b", PROMPT, [0, 1, 2, 3]), Sequence("c", PROMPT[::-1], [0, 1, 2])
    for _ in range(3):
        step(runner, {s: 11})
    out = [PageCopy(CopyKind.TO_HOST, page, 3 - page) for page in range(4)]
    assert runner.run([], out).rows == ()
    runner.poison([0, 1, 2, 3])
    step(runner, {other: 11})
    back = [PageCopy(CopyKind.FROM_HOST, 3 - page, 5 + page) for page in range(4)]
    moved = PageCopy(CopyKind.WITHIN, 8, 9)  # in order: reads what the copy before it wrote
    s.pages = [5, 6, 7, 9]
    result = runner.run([s.row(1)], [*back, moved])
    s.done, s.tokens = s.done + 1, [*s.tokens, *result.rows[0].tokens]
    s.pages.append(8)
    while len(s.output) < 8:
        step(runner, {s: 1})
    assert s.output == whole.output


@pytest.mark.parametrize(
    ("copy", "why"),
    [
        (PageCopy(CopyKind.WITHIN, 0, 64), "page 0 of 64 to page 64 of 64"),
        (PageCopy(CopyKind.WITHIN, -1, 0), "page -1"),
        (PageCopy(CopyKind.TO_HOST, 0, 2), "to page 2 of 2"),
        (PageCopy(CopyKind.FROM_HOST, 2, 0), "page 2 of 2"),
    ],
)
def test_copies_of_pages_that_do_not_exist_are_refused_before_the_first(
    root: Path, copy: PageCopy, why: str
) -> None:
    _, model = _model(root, "llama")
    runner = new_runner(model, host_pages=2)
    s = Sequence("a", PROMPT, [0, 1, 2])
    step(runner, {s: 11})
    before = runner._kv[:2].clone()
    with pytest.raises(InternalError, match=why):
        runner.run([], [PageCopy(CopyKind.WITHIN, 0, 1), copy])
    assert torch.equal(runner._kv[:2], before)


def test_host_pages_must_fit(root: Path) -> None:
    _, model = _model(root, "llama")
    with pytest.raises(InternalError, match="without host pages"):
        new_runner(model).run([], [PageCopy(CopyKind.TO_HOST, 0, 0)])
    g = model.geometry(PAGE)
    kv = torch.zeros(4, g.layers, 2, PAGE, g.kv_heads, g.head_dim)
    with pytest.raises(InternalError, match="host pages"):
        Runner(model, kv, PAGE, host_kv=kv[:, :1].contiguous())


def test_json_from_a_model_in_company(root: Path) -> None:
    """An answer in a grammar, through chunks and beside others, parses and ends by itself."""
    folder, model = _model(root, "llama")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "null"}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    runner = new_runner(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bias = tuple((t, -6.0) for t in tokenizer.convert_tokens_to_ids(["Ġ", "Ċ", "ĉ", "č"]))
    p = asking(temperature=0.9, seed=3, grammar=grammar, logit_bias=bias)
    s, other = Sequence("a", PROMPT, list(range(20)), p), Sequence("b", PROMPT, list(range(20, 40)))
    eos = model.described.eos_token_ids
    while not s.output or s.output[-1] not in eos:
        step(runner, {other: 5, s: 3} if random.Random(len(s.tokens)).random() < 0.5 else {s: 3})
        assert len(s.output) < 60
    value = json.loads(tokenizer.decode(s.output[:-1]))
    assert value["a"] in ("x", "yy") and value["b"] is None

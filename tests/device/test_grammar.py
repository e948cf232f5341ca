"""Grammars: compiled, refused in a sentence, followed to their end, rebuilt from the history."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from drawing import BACKENDS, CPU, draw, drawn, logits, params
from transformers import AutoTokenizer

from kernels.grammar import TokenTable, check_grammar
from kernels.sampling import Sampler
from kernels.settings import Draw
from protocol.errors import InvalidArgument
from protocol.types import Grammar, GrammarKind, SamplingParams, TicketId

VOCAB = 340  # the tokenizer knows 320: the rest may never come
EOS = (tiny.EOS, tiny.END_OF_TURN)
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 22]}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
HUGE = json.dumps(
    {"properties": {f"p{i}": {"pattern": f"[a-f]{{{i % 30},300}}"} for i in range(1200)}}
)
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, SCHEMA),
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "regex": Grammar(GrammarKind.REGEX, r"[a-c]{2,4}-\d+"),
    "lark": Grammar(GrammarKind.LARK, 'start: "x" /[0-9]/ | "yes"'),
    "choice": Grammar(GrammarKind.CHOICE, json.dumps(["grün", 'say "no"\n', "a"])),
}
both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def tokens(folder: Path) -> TokenTable:
    return TokenTable(folder, VOCAB, EOS)


def answer(
    sampler: Sampler, p: SamplingParams, rng: random.Random, most: int, name: str = "a"
) -> list[int]:
    """Tokens drawn from random logits until an end token or ``most``."""
    history = [9, 9]
    x = torch.randn(most, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    for i in range(most):
        d = Draw(p, i, 0, 0, TicketId(name), history, 2)
        got = sampler.sample(x[i : i + 1], [d])[0]
        assert got.error is None, got.error
        history.append(got.token)
        if got.token in EOS and not p.ignore_eos:
            break
    return history[2:]


@both
@pytest.mark.parametrize("name", [n for n in GRAMMARS if n != "object"])
def test_answers_match_and_end_by_themselves(
    folder: Path, tokens: TokenTable, name: str, backend: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(name)
    sampler = Sampler(VOCAB, CPU, EOS, tokens, compiled=BACKENDS[backend])
    for i in range(6):
        bias = ((tiny.EOS, 3.0),)  # random logits would go on in \d+ and strings for long
        p = drawn(seed=i, grammar=GRAMMARS[name], temperature=0.7, logit_bias=bias)
        got = answer(sampler, p, rng, 400, f"{name}{i}")
        assert got[-1] in EOS, "it did not end"
        text = tokenizer.decode(got[:-1])
        if name == "schema":
            value = json.loads(text)
            assert set(value) == {"name", "n"} and value["n"] in (1, 22)
            assert len(value["name"]) <= 5
        elif name == "regex":
            assert re.fullmatch(r"[a-c]{2,4}-\d+", text)
        elif name == "lark":
            assert re.fullmatch(r"x[0-9]|yes", text)
        else:
            assert text in ["grün", 'say "no"\n', "a"]


def test_any_object_begins_as_json(folder: Path, tokens: TokenTable) -> None:
    sampler = Sampler(VOCAB, CPU, EOS, tokens)
    p = drawn(grammar=GRAMMARS["object"])
    text = AutoTokenizer.from_pretrained(folder).decode(answer(sampler, p, random.Random(1), 30))
    assert text.lstrip().startswith("{")


@both
def test_only_ends_remain_at_the_end_whatever_min_tokens_says(
    tokens: TokenTable, backend: str
) -> None:
    """With ``ignore_eos`` the end token comes again and again."""
    once = Grammar(GrammarKind.CHOICE, '["a"]')
    sampler = Sampler(VOCAB, CPU, EOS, tokens, compiled=BACKENDS[backend])
    got = answer(sampler, drawn(grammar=once, min_tokens=8), random.Random(2), 9)
    assert len(got) == 2 and got[1] in EOS
    got = answer(sampler, drawn(grammar=once, ignore_eos=True), random.Random(3), 9, "b")
    assert len(got) == 9 and set(got[1:]) <= set(EOS)


def test_min_tokens_holds_where_the_grammar_can_go_on(tokens: TokenTable) -> None:
    sampler = Sampler(VOCAB, CPU, EOS, tokens)
    letters = Grammar(GrammarKind.REGEX, "[a-z]+")
    p = drawn(grammar=letters, min_tokens=12, logit_bias=((tiny.EOS, 50.0),))
    assert len(answer(sampler, p, random.Random(4), 40)) == 13


def test_rebuilt_from_history_alone(tokens: TokenTable) -> None:
    """A fresh sampler (another worker) at every token, or one that was there all along."""
    p = drawn(grammar=GRAMMARS["schema"], temperature=0.8)
    x = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(1))
    old, history, fresh = Sampler(VOCAB, CPU, EOS, tokens), [9], [9]
    for i in range(60):
        d = Draw(p, i, 0, 0, TicketId("a"), history, 1)
        history.append(old.sample(x[i : i + 1], [d])[0].token)
        d = Draw(p, i, 0, 0, TicketId("a"), fresh, 1)
        fresh.append(Sampler(VOCAB, CPU, EOS, tokens).sample(x[i : i + 1], [d])[0].token)
        if history[-1] in EOS:
            break
    assert fresh == history and len(history) > 10


def test_rows_fail_alone(tokens: TokenTable) -> None:
    x = logits(5, 1, VOCAB)
    a = Grammar(GrammarKind.CHOICE, '["a"]')

    def one(p: SamplingParams, answer: list[int], name: str) -> Draw:
        return Draw(p, len(answer), 0, 0, TicketId(name), [9, *answer], 1)

    ban = tuple((t, -float("inf")) for t in range(VOCAB))
    draws = [
        one(params(grammar=Grammar(GrammarKind.REGEX, "(a")), [], "broken"),
        one(params(grammar=a), [77, 78], "left"),
        one(params(grammar=a, logit_bias=ban), [], "banned"),
        one(params(grammar=a), [], "good"),
        one(params(), [], "plain"),
    ]
    got = draw(x, draws, eos=EOS, tokens=tokens)
    messages = [d.error.message if d.error else "" for d in got]
    assert "regex grammar does not compile" in messages[0] and "unclosed group" in messages[0]
    assert "does not match its grammar" in messages[1]
    assert "banned#1: the grammar and logit_bias exclude" in messages[2]
    assert messages[3] == messages[4] == "" and got[4].token == x[4].argmax()
    assert all(d.error.reason == "INVALID_ARGUMENT" for d in got[:3])
    assert [d.error.field for d in got[:2]] == ["response_format"] * 2


def test_without_a_usable_tokenizer_the_row_says_so(tmp_path: Path) -> None:
    broken = TokenTable(tmp_path, VOCAB, EOS)
    p = params(grammar=GRAMMARS["choice"])
    for table, why in ((broken, "tokenizer cannot be used"), (None, "no tokenizer")):
        got = draw(logits(1, 1, VOCAB), [Draw(p, 0, history=[9], n_prompt=1)], tokens=table)[0]
        assert got.error is not None and why in got.error.message
    with pytest.raises(InvalidArgument, match="no end token"):
        _ = TokenTable(tmp_path, VOCAB, ()).table


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "(a", "unclosed group"),
        ("lark", "start: foo", "unknown name"),
        ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"type":', "cannot be read as JSON"),
        ("json_schema", "[1]", "not a JSON object"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("choice", "[]", "not a list"),
        ("choice", '["a", 1]', "not a string"),
        ("choice", "x", "cannot be read as JSON"),
        ("choice", "[" * 60_000, "cannot be read as JSON"),
        ("regex", "a" * ((1 << 16) + 1), "65537 characters"),
        ("json_schema", HUGE, "too big"),
    ],
)
@pytest.mark.parametrize("with_tokens", [True, False])
def test_a_grammar_that_does_not_compile_is_refused(
    tokens: TokenTable, kind: str, text: str, why: str, with_tokens: bool
) -> None:
    said = check_grammar(tokens if with_tokens else None, Grammar(GrammarKind(kind), text))
    assert said is not None and why in said and "\n" not in said and len(said) < 500


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_compiles_is_let_in(tokens: TokenTable, name: str) -> None:
    assert check_grammar(None, GRAMMARS[name]) is None
    assert check_grammar(tokens, GRAMMARS[name]) is None


def test_special_tokens_are_checked_with_the_model_only(tokens: TokenTable) -> None:
    unknown = Grammar(GrammarKind.LARK, 'start: "a" <|nobody|>')
    assert check_grammar(None, unknown) is None
    assert "unknown special token" in (check_grammar(tokens, unknown) or "")
    assert check_grammar(tokens, Grammar(GrammarKind.LARK, 'start: "a" <|end|>')) is None


def test_compiled_grammars_are_bounded(tokens: TokenTable) -> None:
    for i in range(200):
        tokens.start(Grammar(GrammarKind.CHOICE, f'["a{i}"]'))
    assert tokens.n_compiled <= 64


def test_checking_needs_no_torch() -> None:
    code = (
        "import sys; from kernels.grammar import check_grammar; "
        "from protocol.types import Grammar, GrammarKind; "
        "print(check_grammar(None, Grammar(GrammarKind.REGEX, '(a')) is not None, "
        "'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr

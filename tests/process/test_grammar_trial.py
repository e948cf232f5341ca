"""Grammars are tried in a process that a bad one may freeze or break: the router stays whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import tiny
from serving import wait_until

from kernels.grammar import TokenTable
from kernels.grammar_judge import WORK_S
from protocol.errors import Unavailable
from protocol.types import Grammar, GrammarKind
from router.grammar_trial import GrammarTrial

GOOD = Grammar(GrammarKind.REGEX, "[a-c]{2}")
N_RULES = 4500  # as many as 65,536 characters hold: llguidance overflows a stack of 8 MB
CHAIN = Grammar(
    GrammarKind.LARK,
    "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(N_RULES)) + f'r{N_RULES}: "a"',
)
# Validation takes no time at all, the lexer half a minute.
SLOW = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1000003}')


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    folder = tiny.tiny_llama(tmp_path_factory.mktemp("trial"))
    return TokenTable(folder, 320, (tiny.EOS, tiny.END_OF_TURN))


@pytest.fixture(scope="module")
def told(tokens: TokenTable) -> str:
    return tokens.to_json()


@pytest.fixture(scope="module")
def trial(told: str):
    made = GrammarTrial(lambda: told)
    yield made
    made.close()


def child_of(trial: GrammarTrial) -> subprocess.Popen[str]:
    child = trial._child
    assert child is not None
    return child


@pytest.mark.parametrize(
    ("grammar", "why"), [(CHAIN, "goes too deep"), (SLOW, f"more than {WORK_S:g} s of work")]
)
def test_what_ends_the_compiler_is_refused_and_the_next_is_tried(
    trial: GrammarTrial, grammar: Grammar, why: str
) -> None:
    assert trial.complaint(Grammar(GrammarKind.REGEX, f"{grammar.kind}[a-c]{{2}}")) is None
    first = child_of(trial)
    said = trial.complaint(grammar)
    assert said is not None and why in said and grammar.kind in said
    assert first.poll() is not None
    assert trial.complaint(Grammar(GrammarKind.REGEX, f"{grammar.kind}[d-f]")) is None
    second = child_of(trial)
    assert trial.complaint(grammar) == said
    assert child_of(trial) is second and second.poll() is None, "verdicts are kept"


@pytest.mark.parametrize(
    ("kind", "text"),
    [("lark", "start: start"), ("json_schema", '{"$ref": "#"}'), ("regex", r"[^\x00-\U0010FFFF]")],
)
def test_a_grammar_of_no_text_at_all_is_refused(trial: GrammarTrial, kind: str, text: str) -> None:
    said = trial.complaint(Grammar(GrammarKind(kind), text))
    assert said == "the grammar cannot be followed: it allows no token here, not even an end"


def test_special_tokens_are_those_of_the_model(trial: GrammarTrial) -> None:
    assert "special token" in (trial.complaint(Grammar(GrammarKind.LARK, "start: <|no|>")) or "")
    assert trial.complaint(Grammar(GrammarKind.LARK, 'start: "a" <|end|>')) is None
    on_trust = GrammarTrial(lambda: "null")
    try:
        assert on_trust.complaint(Grammar(GrammarKind.LARK, 'start: "a" <|no|>')) is None
        assert "unclosed" in (on_trust.complaint(Grammar(GrammarKind.REGEX, "(a")) or "")
    finally:
        on_trust.close()


def test_without_a_usable_tokenizer_it_says_so(tmp_path: Path) -> None:
    trial = GrammarTrial(TokenTable(tmp_path, 320, (2,)).to_json)
    try:
        assert "tokenizer cannot be used" in (trial.complaint(GOOD) or "")
    finally:
        trial.close()


def test_a_child_that_ended_by_itself_is_replaced(trial: GrammarTrial) -> None:
    assert trial.complaint(Grammar(GrammarKind.CHOICE, json.dumps(["b"]))) is None
    os.kill(child_of(trial).pid, signal.SIGKILL)
    wait_until(lambda: child_of(trial).poll() is not None, what="the child's end")
    assert trial.complaint(Grammar(GrammarKind.CHOICE, json.dumps(["a"]))) is None


def test_closing_leaves_no_process(told: str) -> None:
    trial = GrammarTrial(lambda: told)
    assert trial.complaint(GOOD) is None
    child = child_of(trial)
    trial.close()
    assert child.poll() is not None
    with pytest.raises(Unavailable):
        trial.complaint(SLOW)

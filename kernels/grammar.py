"""Grammars that an answer must match: compiled, checked, followed token by token.

This file owns llguidance, which knows the tokens of a model and says which may come next. It must
never import torch or transformers when it is imported itself: routers check grammars through it
before a request is let in.

Life: ``TokenTable`` once per process, read at its first use (half a second for 49k tokens, so a
worker uses it while it warms up) -> a ``GrammarState`` per sequence, made from the cached compiled
grammar, fed with the answer's tokens; it is a function of them and nothing else.

Measured with SmolLM2's 49k tokens: a grammar of usual size compiles in 0.1 to 20 ms, a first mask
takes 0.1 to 2 ms, a further one 10 to 200 µs. Compiling grows with the square of the lexemes (2 s
for a schema of 3,000 patterns) and would hold up the other rows of a step, so they are bounded:
the largest that are let in take 0.2 s. A mask's work is bounded by llguidance, at about 15 ms.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypedDict

import llguidance
import numpy as np
from llguidance import LLMatcher

from protocol.errors import InvalidArgument
from protocol.types import Grammar, GrammarKind

FIELD = "response_format"
MAX_TEXT = 1 << 16  # characters of one grammar
_CACHED = 64
# Error texts name positions in the grammar, never tokens of an answer: they reach logs.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=200_000, max_grammar_size=10_000, verbose_errors=False
)
_NO_WAY_ON = "NoExtensionBias"  # llguidance: neither a token nor an end is possible
_TOO_MUCH = ("fuel", "too many", "too large", "limit", "lexer error")


def check_grammar(tokens: TokenTable | None, grammar: Grammar) -> str | None:
    """Why ``grammar`` cannot be followed, in one sentence, or None.

    Without the model's ``tokens`` names of special tokens are taken on trust.
    """
    if tokens is not None:
        # Validation alone builds no lexer, which is where most of the work is.
        try:
            tokens.start(grammar).mask()
        except InvalidArgument as e:
            return e.message
        return None
    try:
        text = _source(grammar)
    except ValueError as e:
        return str(e)
    complaint = LLMatcher.validate_grammar(text, None, limits=_LIMITS)
    if not complaint or complaint.startswith("WARNING"):
        return None
    return f"the {grammar.kind} grammar does not compile: {_one_line(complaint)}"


class TokenTable:
    """The tokens of one model as llguidance wants them, and the compiled grammars over them."""

    def __init__(self, folder: str | Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``folder`` is a model folder; ``eos_token_ids`` may follow a complete answer."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._table: llguidance.LLTokenizer | None = None
        self._why_not: str | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def table(self) -> llguidance.LLTokenizer:
        """llguidance's own. Raises ``InvalidArgument``, also later, if it cannot be made."""
        if self._table is None and self._why_not is None:
            try:
                self._table = self._read()
            except Exception as e:  # foreign code: whatever it raises means the same
                self._why_not = _one_line(e)
        if self._table is None:
            raise InvalidArgument(
                f"this model's tokenizer cannot be used for grammars: {self._why_not}", field=FIELD
            )
        return self._table

    def _read(self) -> llguidance.LLTokenizer:
        return _table_of(self._words())

    def _words(self) -> Words:
        from transformers import AutoTokenizer

        if not self._eos_token_ids:
            raise ValueError("it has no end token")
        tokenizer: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError("it has no fast (tokenizers) form")
        backend = copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        n = max(self._vocab_size, len(tokenizer))
        return {"text": backend.to_str(), "size": n, "ends": list(self._eos_token_ids)}

    def to_json(self) -> str:
        """All that another process needs for the same table; or why there is none."""
        try:
            return json.dumps(self._words())
        except Exception as e:  # as in ``table``
            return json.dumps({"why_not": _one_line(e)})

    @classmethod
    def from_json(cls, text: str) -> TokenTable:
        """The table of which ``to_json`` told."""
        told = json.loads(text)
        ends = tuple(told.get("ends", ()))
        made = cls("", told.get("size", 0), ends)
        made._why_not = told.get("why_not")
        if made._why_not is None:
            made._table = _table_of(told)
        return made

    @property
    def n_compiled(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._compiled)

    def start(self, grammar: Grammar) -> GrammarState:
        """The state before the first token. Raises ``InvalidArgument`` if it does not compile."""
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            try:
                matcher = LLMatcher(self.table, _source(grammar), log_level=0, limits=_LIMITS)
            except ValueError as e:
                raise InvalidArgument(str(e), field=FIELD) from e
            if matcher.is_error():
                why = _one_line(matcher.get_error())
                raise InvalidArgument(
                    f"the {grammar.kind} grammar does not compile: {why}", field=FIELD
                )
        self._compiled[grammar] = matcher
        while len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        words = (self.table.vocab_size + 31) // 32
        return GrammarState(matcher.deep_copy(), words, self._eos_token_ids)


class Words(TypedDict):
    """A tokenizer as llguidance reads it: its own JSON, how many ids, which of them are ends."""

    text: str
    size: int
    ends: list[int]


def _table_of(words: Words) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(words["text"], n_vocab=words["size"], eos_token=words["ends"])


class GrammarState:
    """Where in its grammar one answer is.

    At the grammar's end only end-of-sequence tokens remain, again and again: an answer ends by
    itself, and one that ignores them (``ignore_eos``) repeats them up to ``max_tokens``.
    """

    def __init__(self, matcher: LLMatcher, mask_words: int, ends: Collection[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask = np.zeros(mask_words, dtype=np.uint32)
        self._stale = True

    def feed(self, tokens: Sequence[int]) -> None:
        """Follow the answer's next tokens; ``InvalidArgument`` where they leave the grammar."""
        self._stale = True
        n = next((i for i, t in enumerate(tokens) if t in self._ends), len(tokens))
        fits = n == 0 or self._matcher.consume_tokens(list(tokens[:n]))
        for token in tokens[n:]:  # an end, and after it nothing but ends
            ends = self._matcher.is_stopped() or self._matcher.consume_token(token)
            fits = fits and ends and token in self._ends
        if fits:
            return
        if self._matcher.is_error() and any(w in self._matcher.get_error() for w in _TOO_MUCH):
            raise InvalidArgument(
                "the grammar takes too much work to follow at this place of the answer", field=FIELD
            )
        # llguidance's own words would quote the answer.
        raise InvalidArgument("the answer so far does not match its grammar", field=FIELD)

    @property
    def complete(self) -> bool:
        """Whether nothing but an end of sequence can follow."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> np.ndarray:
        """One bit per token, uint32 words: whether it may come next. Valid until ``feed``.

        Raises ``InvalidArgument`` when the grammar takes too much work here.
        """
        if self._stale:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                why = _one_line(self._matcher.get_error().partition("\n")[0])
                if _NO_WAY_ON in why:
                    why = "it allows no token here, not even an end"
                raise InvalidArgument(f"the grammar cannot be followed: {why}", field=FIELD)
            self._stale = False
        return self._mask


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's words. Raises ``ValueError`` saying what is wrong."""
    kind, text = grammar.kind, grammar.text
    if len(text) > MAX_TEXT:
        raise ValueError(f"a grammar of {len(text)} characters; at most {MAX_TEXT} are read")
    if kind is GrammarKind.JSON_OBJECT:
        return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
    if kind is GrammarKind.JSON_SCHEMA:
        schema = _json(text, "the JSON schema")
        if not isinstance(schema, dict | bool):
            raise ValueError("the JSON schema is not a JSON object")
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    if kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(text))
    if kind is GrammarKind.CHOICE:
        choices = _json(text, "the choices")
        if not isinstance(choices, list) or not choices:
            raise ValueError("the choices are not a list of strings")
        if not all(isinstance(c, str) and c for c in choices):
            raise ValueError("a choice is not a string, or is empty")
        lark = "start: " + " | ".join(json.dumps(c) for c in choices)
        return str(LLMatcher.grammar_from_lark(lark))
    return str(LLMatcher.grammar_from_lark(text))


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{what} cannot be read as JSON: {_one_line(e)}") from e


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]

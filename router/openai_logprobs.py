"""Logprobs as JSON: OpenAI's shape of each endpoint, and vLLM's of a prompt.

This file owns how a token is written (whole characters as they are, others as escaped bytes),
where it begins in the text, and that JSON has no infinity. It must never wait or decode an
answer. ``entries`` are ``TokenLogprobs``; ``k`` is how many likeliest tokens the client asked
for, which may be fewer than an entry has.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from protocol.types import TokenLogprobs

LEAST = -9999.0  # OpenAI's word for "very unlikely"; JSON has no minus infinity


class Vocabulary(Protocol):
    """The part of ``router.text.TextCodec`` that logprobs need."""

    @property
    def special_tokens(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(
    entries: Sequence[TokenLogprobs], k: int, vocabulary: Vocabulary
) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = vocabulary.token_bytes(token_id)
        return {
            "token": _written(raw, ""),
            "logprob": max(logprob, LEAST),
            "bytes": list(raw),
        }

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top[:k]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], k: int, vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: one object by token id per prompt token, the first has none."""

    def one(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = vocabulary.token_bytes(token_id).decode("utf-8", "replace")
        return {"logprob": max(logprob, LEAST), "rank": rank, "decoded_token": text}

    told: list[dict[str, Any] | None] = [None]
    for entry in entries:
        at = {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:k], 1):
            at.setdefault(str(token_id), one(token_id, logprob, rank))
        told.append(at)
    return told


class CompletionLogprobs:
    """``choices[].logprobs`` of one choice of a completion, piece by piece.

    Life: ``prompt`` first, where the prompt is echoed; then ``answer`` for every piece, in order.
    Offsets are in characters of the choice's text; a token that begins inside a character has
    that character's.
    """

    def __init__(self, vocabulary: Vocabulary, k: int, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._k = k
        self._skips_special = skip_special_tokens
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs], text: str
    ) -> dict[str, Any]:
        """The prompt's tokens; the first one follows nothing and has no logprob."""
        offsets = [
            self._begin(token, lambda word, at: text.startswith(word, at)) for token in tokens
        ]
        self._characters.reset()
        self._offset = len(text)
        first: list[Row] = [(self._word(tokens[0]), None, None)]
        return _completion([*first, *self._rows(entries)], offsets)

    def answer(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of the answer."""
        offsets = [
            self._begin(entry.token_id, lambda word, at: not self._skips_special)
            for entry in entries
        ]
        return _completion(self._rows(entries), offsets)

    def _rows(self, entries: Sequence[TokenLogprobs]) -> list[Row]:
        rows: list[Row] = []
        for entry in entries:
            word, logprob = self._word(entry.token_id), max(entry.logprob, LEAST)
            top = {self._word(token): max(value, LEAST) for token, value in entry.top[: self._k]}
            # The token itself is always among them, likely or not.
            rows.append((word, logprob, {**top, word: logprob} if word not in top else top))
        return rows

    def _word(self, token_id: int) -> str:
        return _written(self._vocabulary.token_bytes(token_id), "bytes:")

    def _begin(self, token_id: int, special_is_shown: Callable[[str, int], bool]) -> int:
        """Where this token begins; moves on to where the next one does."""
        at, raw = self._offset, self._vocabulary.token_bytes(token_id)
        is_special = token_id in self._vocabulary.special_tokens
        if not is_special or special_is_shown(raw.decode("utf-8", "replace"), at):
            self._offset += len(self._characters.decode(raw))
        return at


Row = tuple[str, float | None, dict[str, float] | None]


def _completion(rows: Sequence[Row], offsets: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [word for word, _, _ in rows],
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": [top for _, _, top in rows],
        "text_offset": list(offsets),
    }


def extend(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Put the next piece of a choice's logprobs, of either endpoint, behind the others."""
    for name, value in piece.items():
        if value is not None:
            whole[name] += value


def _written(raw: bytes, prefix: str) -> str:
    """The text of a token's bytes; of no whole characters, OpenAI's way of writing bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)

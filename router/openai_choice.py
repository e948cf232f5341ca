"""One choice of an HTTP answer as it grows: what each piece adds to its JSON.

This file owns the echo in front of a choice, which logprobs go with which text, and when the
choice has ended. It must never write a whole reply: ``router.openai_replies`` puts the pieces in
their place. Life: ``take`` for every ``Delta`` of the choice, in order; ``ending`` is set by the
last one where there are several choices, else by ``end``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol.types import Complete, Delta, FinishReason, Request
from router.openai_logprobs import (
    CompletionLogprobs,
    Vocabulary,
    chat_logprobs,
    extend,
    prompt_logprobs,
)


@dataclass(slots=True)
class Piece:
    """Text of a choice and the logprobs of its tokens: new ones, or all of them so far."""

    text: str = ""
    logprobs: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.text) or self.logprobs is not None

    def add(self, piece: Piece) -> None:
        """Put the next piece behind what is there."""
        self.text += piece.text
        if self.logprobs is None:
            self.logprobs = piece.logprobs
        elif piece.logprobs is not None:
            extend(self.logprobs, piece.logprobs)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended, and at which stop string or stop token of the client's own."""

    finish_reason: FinishReason
    matched_stop: str | int | None


class ChoiceReply:
    """One choice of a completion. ``prompt_text`` is what ``echo`` puts before it."""

    def __init__(self, request: Request, vocabulary: Vocabulary, prompt_text: str) -> None:
        self.ending: Ending | None = None
        self.prompt_logprobs: list[Any] | None = None
        self._request = request
        self._vocabulary = vocabulary
        self._prompt_text = prompt_text
        self._is_first = True
        self._last_token = -1
        k = request.sampling.logprobs
        self._logprobs = None if k is None else self._logprobs_of(k)

    def take(self, delta: Delta, prompt_k: int | None = None) -> Piece:
        """The next piece. ``prompt_k`` likeliest prompt tokens go into ``prompt_logprobs``."""
        piece = Piece(delta.text)
        if self._is_first:
            self._is_first = False
            piece.text = self._prompt_text + piece.text
            if prompt_k is not None:
                self.prompt_logprobs = prompt_logprobs(
                    delta.prompt_logprobs, prompt_k, self._vocabulary
                )
            if self._request.echo and self._logprobs is not None:
                piece.logprobs = self._logprobs.prompt(
                    self._request.prompt, delta.prompt_logprobs, self._prompt_text
                )
        if delta.logprobs and self._request.sampling.logprobs is not None:
            piece.add(Piece("", self._answered(delta)))
        if delta.token_ids:
            self._last_token = delta.token_ids[-1]
        if delta.finish_reason is not None:
            self._end(delta.finish_reason, delta.matched_stop)
        return piece

    def end(self, complete: Complete) -> None:
        """The answer's end is that of its only choice."""
        if self.ending is None:
            self._end(complete.finish_reason, complete.matched_stop)

    def _end(self, reason: FinishReason, matched: str | int | None) -> None:
        stops = self._request.sampling.stop_token_ids
        if matched is None and reason is FinishReason.STOP and self._last_token in stops:
            matched = self._last_token
        self.ending = Ending(reason, matched)

    def _logprobs_of(self, k: int) -> CompletionLogprobs:
        skip = self._request.skip_special_tokens
        return CompletionLogprobs(self._vocabulary, k, skip_special_tokens=skip)

    def _answered(self, delta: Delta) -> dict[str, Any]:
        assert self._logprobs is not None
        return self._logprobs.answer(delta.logprobs)


class ChatChoiceReply(ChoiceReply):
    """One choice of a chat: nothing is echoed."""

    def _answered(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(delta.logprobs, self._request.sampling.logprobs or 0, self._vocabulary)

"""OpenAI's answers, written: one class per endpoint gives every JSON shape of a reply.

This file owns ids, objects, choices, usage and errors as OpenAI's SDK reads them, streamed or in
one piece. It must never wait for anything; the clock's reading is handed in. A shape lives as
long as one HTTP request and is told nothing but pieces, indexes and counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from protocol.errors import TandemError
from protocol.types import Usage
from router.openai_choice import ChatChoiceReply, ChoiceReply, Ending, Piece

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What every JSON of one reply repeats. ``created`` is in seconds since 1970."""

    request_id: str
    created: int
    model: str
    fingerprint: str


class CompletionShape:
    """``/v1/completions``: choices with ``text``."""

    prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    choice: ClassVar[type[ChoiceReply]] = ChoiceReply

    def __init__(self, heading: Heading) -> None:
        self._head: dict[str, Any] = {
            "id": self.prefix + heading.request_id,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.fingerprint,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens choice ``index``, if this endpoint has one."""
        return None

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """A chunk that carries new text of choice ``index``, or new logprobs."""
        return self._chunk([self._piece(index, piece) | {"finish_reason": None}])

    def last(self, index: int, ending: Ending) -> dict[str, Any]:
        """The chunk that closes choice ``index``."""
        return self._chunk([self._piece(index, Piece()) | _ending(ending)])

    def usage(self, usages: Iterable[Usage]) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: no choices."""
        return self._chunk([]) | {"usage": usage_json(usages)}

    def whole(
        self, choices: Sequence[tuple[Piece, ChoiceReply]], usages: Iterable[Usage]
    ) -> dict[str, Any]:
        """A reply in one piece. Each choice: all of it as one piece, and its ending."""
        told = []
        for index, (piece, reply) in enumerate(choices):
            assert reply.ending is not None
            told.append(self._whole_choice(index, piece) | _ending(reply.ending))
        self._add_prompts(told, [reply for _, reply in choices])
        usage = usage_json(usages)
        return self._head | {"object": self.whole_object, "choices": told, "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_object, "choices": choices}

    def _piece(self, index: int, piece: Piece) -> dict[str, Any]:
        return {"index": index, "text": piece.text, "logprobs": piece.logprobs}

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._piece(index, piece)

    def _add_prompts(self, told: list[dict[str, Any]], replies: Sequence[ChoiceReply]) -> None:
        """vLLM's place for the prompt's logprobs: every choice."""
        for choice, reply in zip(told, replies, strict=True):
            if reply.prompt_logprobs is not None:
                choice["prompt_logprobs"] = reply.prompt_logprobs


class ChatShape(CompletionShape):
    """``/v1/chat/completions``: the same, with ``message`` or ``delta`` in the place of text."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    choice = ChatChoiceReply

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk with the role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice])

    def _piece(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece else {}
        return {"index": index, "delta": delta, "logprobs": piece.logprobs}

    def _whole_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": piece.logprobs}

    def _add_prompts(self, told: list[dict[str, Any]], replies: Sequence[ChoiceReply]) -> None:
        """vLLM's place for the conversation's logprobs: the reply, which has but one prompt."""
        if replies[0].prompt_logprobs is not None:
            self._head["prompt_logprobs"] = replies[0].prompt_logprobs


def _ending(ending: Ending) -> dict[str, Any]:
    # stop_reason is vLLM's addition: which stop string, or stop token, it was.
    return {"finish_reason": ending.finish_reason.value, "stop_reason": ending.matched_stop}


def usage_json(usages: Iterable[Usage]) -> dict[str, Any]:
    """OpenAI's usage object over all choices."""
    all_usages = list(usages)
    prompt = sum(usage.prompt_tokens for usage in all_usages)
    completion = sum(usage.completion_tokens for usage in all_usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in all_usages)},
    }


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8") + b"\n\n"


def error_json(error: TandemError) -> dict[str, Any]:
    """An error in OpenAI's shape; ``code`` is our stable reason in small letters."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.field,
            "code": error.reason.lower(),
        }
    }


def error_headers(error: TandemError) -> dict[str, str]:
    """Tell clients that retry by themselves when a repeat helps and when it cannot."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if not error.retryable:
        headers["x-should-retry"] = "false"
    return headers

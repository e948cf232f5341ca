"""What both front ends do with a call: prompt to tokens, tokens to a request, request to answer.

This file owns the order of the checks (values before tokenizing, so that a bad call costs
nothing) and keeps long prompts off the event loop. It must never know HTTP or gRPC.

Life of a call: ``from_text``, ``from_chat`` or ``from_tokens`` make a ``Request``; ``answer``
gives its stream, which ends both legs when it is closed early.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from protocol.errors import ContextLengthExceeded
from protocol.types import Complete, Delta, FinishReason, Request
from router.failures import Failures
from router.params import Asked, Intake
from router.status import RouterStatus
from router.text import IncrementalText

LONG_PROMPT_CHARS = 4096  # above: encoding takes longer than a stream may be held up
# Encoding takes some hundred bytes of memory per token: what no tokenizer could bring under the
# context is refused unread, and only a few long prompts are encoded at a time.
MOST_CHARS_PER_TOKEN = 128
LONG_PROMPTS_AT_ONCE = 2
GRAMMARS_AT_ONCE = 2


class Codec(Protocol):
    """The part of ``router.text.TextCodec`` that the front ends use."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...
    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def decoder_for(self, request: Request) -> IncrementalText: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    @property
    def special_tokens(self) -> frozenset[int]: ...


class Core(Protocol):
    """The part of ``router.dispatcher.Dispatcher`` that the front ends use."""

    def generate(
        self, request: Request, texts: Sequence[IncrementalText]
    ) -> AsyncGenerator[Delta | Complete, None]: ...
    def can_serve(self) -> tuple[bool, str]: ...
    def status(self) -> RouterStatus: ...


class InferenceService:
    """One per router; every method runs on the router's event loop."""

    def __init__(self, intake: Intake, codec: Codec, core: Core, failures: Failures) -> None:
        self.intake = intake
        self.codec = codec
        self.core = core
        self.failures = failures
        self._compiling = asyncio.Semaphore(GRAMMARS_AT_ONCE)
        self._encoding = asyncio.Semaphore(LONG_PROMPTS_AT_ONCE)

    async def from_text(self, text: str, asked: Asked, field: str = "prompt") -> Request:
        """The request for a plain prompt. Raises as ``Intake.request``."""
        await self._check(asked)
        self._check_length(len(text), field)
        tokens = await self.encode(text)
        return self.intake.request(asked, tokens, field)

    async def from_chat(self, messages: Sequence[Mapping[str, Any]], asked: Asked) -> Request:
        """The request for a conversation. Raises as ``Intake.request``."""
        await self._check(asked)
        self._check_length(_chars(messages), "messages")
        tokens = await self.encode_chat(messages)
        return self.intake.request(asked, tokens, "messages")

    async def from_tokens(
        self, tokens: Sequence[int], asked: Asked, field: str = "prompt"
    ) -> Request:
        """The request for a prompt of token ids. Raises as ``Intake.request``."""
        await self._check(asked)
        return self.intake.request(asked, tokens, field)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt."""
        if len(text) <= LONG_PROMPT_CHARS:
            return self.codec.encode(text, add_special_tokens=add_special_tokens)
        async with self._encoding:
            return await asyncio.to_thread(
                self.codec.encode, text, add_special_tokens=add_special_tokens
            )

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation by the model's chat template."""
        if _chars(messages) <= LONG_PROMPT_CHARS:
            return self.codec.chat(messages)
        async with self._encoding:
            return await asyncio.to_thread(self.codec.chat, messages)

    def answer(self, request: Request) -> AsyncGenerator[Delta | Complete, None]:
        """The answer as it grows: ``Delta``s, then one ``Complete``. Close it to cancel."""
        texts = [self.codec.decoder_for(request) for _ in range(request.n_choices)]
        answer = self.core.generate(request, texts)
        return _prompt_only(answer) if request.prompt_only else answer

    def prompt_text(self, request: Request, prompt: str | Sequence[int]) -> str:
        """What ``echo`` puts before an answer: the prompt as it was given, or its text."""
        if isinstance(prompt, str):
            return prompt
        return self.codec.decode(request.prompt, skip_special_tokens=request.skip_special_tokens)

    async def _check(self, asked: Asked) -> None:
        """What needs no prompt. Compiling a grammar would hold up every stream: in a thread."""
        self.intake.check_values(asked)
        if asked.grammar is not None:
            async with self._compiling:
                await asyncio.to_thread(self.intake.check_grammar, asked)

    def _check_length(self, n_chars: int, field: str) -> None:
        context = self.intake.limits.max_model_len
        if n_chars > context * MOST_CHARS_PER_TOKEN:
            raise ContextLengthExceeded(
                f"{field} has {n_chars} characters, more than this model's context of "
                f"{context} tokens can ever hold",
                field=field,
            )


async def _prompt_only(
    answer: AsyncGenerator[Delta | Complete, None],
) -> AsyncGenerator[Delta | Complete, None]:
    """The answer without the one token per choice that was drawn and nobody asked for."""
    async with aclosing(answer):
        async for piece in answer:
            if isinstance(piece, Complete):
                usage = replace(piece.usage, completion_tokens=0)
                yield replace(piece, finish_reason=FinishReason.LENGTH, usage=usage)
            else:
                finish = piece.finish_reason and FinishReason.LENGTH
                yield replace(piece, token_ids=(), text="", logprobs=(), finish_reason=finish)


def _chars(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)

"""A dispatcher and a codec without workers, for tests of the front ends.

The answer to every prompt is ``ANSWER`` (further choices: ``OTHER_ANSWER``, then again), one byte
per token, through the real incremental text and stop matching; half of a prompt was cached.
Words in the prompt steer it: ``hold-first`` and ``hold-later`` wait for ``release`` (or their
deadline) before the first token or after the second one; ``fail-first`` and ``fail-later`` raise
there, and ``late-first`` as a server whose own time is up; ``bug`` raises what no front expects.
An answer that is closed early is in ``cancelled``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from protocol.errors import DeadlineExceeded, InvalidArgument, Overloaded, Unavailable
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    KvGeometry,
    ModelInfo,
    Request,
    StageTiming,
    TokenLogprobs,
    Usage,
    WorkerInfo,
)
from router.status import RouterStatus
from router.text import IncrementalText
from router.token_bytes import TokenBytes

OTHER_ANSWER = "Another answer, 世界. Two. And more."
ANSWER = "Tandem says: grüße, 世界 \U0001f6b2! One. Two. Three."
MODEL = ModelInfo("f" * 32, 256, 512, (), KvGeometry(2, 2, 8, 16, "float32"))


def answer_of(choice: int) -> str:
    """What the fake answers, by choice."""
    return OTHER_ANSWER if choice % 2 else ANSWER


def logprobs_of(token: int, k: int) -> TokenLogprobs:
    """Logprobs that tell tokens apart: the token itself is third, unlikely where k is small."""
    top = tuple(((token + i + 1) % 256, -0.5 * (i + 1)) for i in range(k))
    return TokenLogprobs(token, -token / 64 - 1, 3, top)


class ByteCodec:
    """Every byte is a token; a chat is ``role: content`` lines."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(
            models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
        )
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.token_bytes = TokenBytes(self.tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_batch([text])[0].ids)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(token_ids)))

    special_tokens: frozenset[int] = frozenset()

    def decoder_for(self, request: Request) -> IncrementalText:
        return IncrementalText(
            self.tokenizer, stop=request.stop, include_stop=request.include_stop_str_in_output
        )


class FakeCore:
    """What ``router.dispatcher.Dispatcher`` offers, without workers."""

    def __init__(self, codec: ByteCodec) -> None:
        self.codec = codec
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.changed = threading.Condition()  # notified when one of the two lists grows
        self.ready = (True, "")
        self.closed = False
        self.workers: tuple[WorkerInfo, ...] = ()
        self._release = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self) -> None:
        """Forget what was noted and hold again. For a test's beginning."""
        with self.changed:
            self.requests.clear()
            self.cancelled.clear()
        self.ready = (True, "")
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._release.clear)

    def release(self) -> None:
        """Let every held answer go on."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._release.set)

    def wait_for(self, condition, timeout_s: float = 10) -> bool:
        """Wait in a test's thread until ``condition()`` holds."""
        with self.changed:
            return self.changed.wait_for(condition, timeout_s)

    async def generate(
        self, request: Request, texts: Sequence[IncrementalText]
    ) -> AsyncGenerator[Delta | Complete, None]:
        self._loop = asyncio.get_running_loop()
        self._note(self.requests, request)
        prompt = self.codec.decode(request.prompt)
        ended = False
        try:
            await self._steer(request, prompt, "first")
            answers = [
                self.codec.encode(answer_of(c))[: request.sampling.max_tokens]
                for c in range(request.n_choices)
            ]
            ends: dict[int, tuple[FinishReason, str | None, int]] = {}
            for index in range(max(map(len, answers))):
                if index == 2:
                    await self._steer(request, prompt, "later")
                for choice, answer in enumerate(answers):
                    if choice not in ends:
                        delta = self._token(request, texts[choice], choice, answer, index)
                        yield self._seen(delta, request, ends)
            ended = True
            reason, stop, _ = ends[0]
            n_tokens = sum(count for _, _, count in ends.values())
            yield self._end(request, n_tokens, reason, stop)
        except (DeadlineExceeded, Unavailable, Overloaded, ZeroDivisionError):
            ended = True
            raise
        finally:
            if not ended:
                self._note(self.cancelled, request.request_id)

    def _token(
        self,
        request: Request,
        text: IncrementalText,
        choice: int,
        answer: Sequence[int],
        index: int,
    ) -> Delta:
        """One token of a choice; its last one says how the choice ended."""
        token, sampling = answer[index], request.sampling
        piece = text.push([token])
        delta = Delta(index, (token,), piece.text, choice)
        if sampling.logprobs is not None:
            delta = replace(delta, logprobs=(logprobs_of(token, sampling.logprobs),))
        if sampling.prompt_logprobs is not None and index == 0:
            k = sampling.prompt_logprobs
            told = tuple(logprobs_of(token, k) for token in request.prompt[1:])
            delta = replace(delta, prompt_logprobs=told)
        if piece.stop_matched is not None:
            delta = replace(delta, finish_reason=FinishReason.STOP, matched_stop=piece.stop_matched)
        elif index + 1 == len(answer):
            cut = len(answer) < len(self.codec.encode(answer_of(choice)))
            reason = FinishReason.LENGTH if cut else FinishReason.STOP
            delta = replace(delta, text=delta.text + text.finish(), finish_reason=reason)
        return delta

    def _seen(
        self,
        delta: Delta,
        request: Request,
        ends: dict[int, tuple[FinishReason, str | None, int]],
    ) -> Delta:
        """As the dispatcher gives it: of a single choice, only ``Complete`` says the end."""
        if delta.finish_reason is None:
            return delta
        ends[delta.choice] = (delta.finish_reason, delta.matched_stop, delta.index + 1)
        if request.n_choices > 1:
            return delta
        return replace(delta, finish_reason=None, matched_stop=None)

    def _note(self, notes: list, item: object) -> None:
        with self.changed:
            notes.append(item)
            self.changed.notify_all()

    async def _steer(self, request: Request, prompt: str, place: str) -> None:
        if f"hold-{place}" in prompt:
            try:
                async with asyncio.timeout(request.deadline_s):
                    await self._release.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"the fake's {request.deadline_s:g} s passed") from None
            if self.closed:
                raise Unavailable("this router is shutting down")
        if f"late-{place}" in prompt:
            raise DeadlineExceeded("the server's own 0.3 s passed")
        if f"fail-{place}" in prompt:
            raise Unavailable("worker decode-0 died", retry_after_s=2.5)
        if f"full-{place}" in prompt:
            raise Overloaded("256 requests wait already")
        if f"bug-{place}" in prompt:
            raise ZeroDivisionError("secret prompt text")
        if "refuse-id" in prompt:
            raise InvalidArgument("request_id is already running", field="request_id")

    def _end(
        self, request: Request, n_tokens: int, reason: FinishReason, stop: str | None
    ) -> Complete:
        usage = Usage(len(request.prompt), n_tokens, len(request.prompt) // 2)
        return Complete(reason, usage, stop, (StageTiming("prefill", "prefill-0", 0.25),))

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        self.workers = workers

    def can_serve(self) -> tuple[bool, str]:
        return self.ready

    def status(self) -> RouterStatus:
        return RouterStatus("router-0", (), 0, 0, {"retries": 1})

    async def close(self) -> None:
        self.closed = True
        self._release.set()

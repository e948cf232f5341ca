"""Prompts far beyond the context cost the router neither memory nor time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from protocol.errors import ContextLengthExceeded
from router.params import Asked, Intake, ModelLimits
from router.service import LONG_PROMPT_CHARS, LONG_PROMPTS_AT_ONCE, InferenceService

CONTEXT = 100


class SlowCodec:
    """Holds every encoding until it is released, and notes how many ran at once."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.begun = threading.Semaphore(0)
        self.running = self.most = self.calls = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        with self._lock:
            self.calls += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.begun.release()
        assert self.release.wait(30)
        with self._lock:
            self.running -= 1
        return (1, 2, 3)

    def chat(self, messages: Any) -> tuple[int, ...]:
        return self.encode(messages[0]["content"])


def a_service(codec: SlowCodec) -> InferenceService:
    intake = Intake(
        ModelLimits("m", 10, CONTEXT),
        draw_seed=lambda: 1,
        draw_id=lambda: "id",
        request_timeout_s=1.0,
    )
    return InferenceService(intake, codec, None, None)  # type: ignore[arg-type]  # not used here


def test_a_text_that_no_tokenizer_could_fit_is_refused_unread() -> None:
    async def main() -> None:
        codec = SlowCodec()
        service, text = a_service(codec), "x" * 1_000_000
        with pytest.raises(ContextLengthExceeded, match=r"1000000 characters.* 100 tokens"):
            await service.from_text(text, Asked(max_tokens=1))
        with pytest.raises(ContextLengthExceeded) as caught:
            await service.from_chat([{"role": "user", "content": text}], Asked(max_tokens=1))
        assert caught.value.field == "messages"
        assert codec.calls == 0

    asyncio.run(main())


def test_few_long_prompts_are_encoded_at_a_time_and_those_who_leave_never() -> None:
    async def main() -> None:
        codec = SlowCodec()
        service = a_service(codec)
        text = "x" * (LONG_PROMPT_CHARS + 1)
        tasks = [
            asyncio.create_task(service.from_text(text, Asked(max_tokens=1))) for _ in range(8)
        ]
        for _ in range(LONG_PROMPTS_AT_ONCE):
            assert await asyncio.to_thread(codec.begun.acquire, timeout=30)
        for task in tasks[4:]:
            task.cancel()
        codec.release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert codec.most == LONG_PROMPTS_AT_ONCE
        assert codec.calls == 4

    asyncio.run(main())

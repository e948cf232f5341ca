"""One OpenAI answer on its way to one HTTP client, streamed or in one piece.

This file owns the order of what is sent (status late, so that an early failure is an HTTP status
and not an event), keep-alive comments while a prompt is computed, the error event in the middle
of a stream, and the hang-up: a client that goes away ends the answers at once, streamed or not.
It must never parse a request.

Life of an ``AnswerResponse`` (an ASGI response, returned by an endpoint and called once):
 1. Two tasks run: one answers, one waits for the client's hang-up; the first to end ends both.
 2. Streamed: up to ``keepalive_s`` for the first piece, then status 200 and what OpenAI's SDK
    expects: first chunk, text, last chunk, usage, ``[DONE]``; on failure an error event instead.
 3. In one piece: everything is collected, then sent as one JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from protocol.errors import TandemError
from protocol.types import Complete, Delta, Request, Usage
from router.answers import Answers, Event
from router.failures import Failures
from router.openai_choice import ChoiceReply, Piece
from router.openai_replies import (
    DONE,
    KEEP_ALIVE,
    CompletionShape,
    error_headers,
    error_json,
    sse,
    usage_json,
)
from router.openai_types import Streaming

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]


def error_response(error: TandemError) -> JSONResponse:
    """A failure as an HTTP answer in OpenAI's shape."""
    return JSONResponse(error_json(error), error.http_status, error_headers(error))


class AnswerResponse:
    """Answers ``requests``, each with the same number of choices, to one client.

    ``replies`` has every choice of the first request, then of the second, and so on; a choice's
    index in the reply is its place there.
    """

    def __init__(
        self,
        shape: CompletionShape,
        streaming: Streaming,
        requests: Sequence[Request],
        streams: Sequence[AsyncGenerator[Event, None]],
        replies: Sequence[ChoiceReply],
        *,
        prompt_logprobs: int | None,
        keepalive_s: float,
        failures: Failures,
    ) -> None:
        """``prompt_logprobs``: how many likeliest prompt tokens a reply in one piece has."""
        self._shape = shape
        self._streaming = streaming
        self._prompt_tokens = [len(request.prompt) for request in requests]
        self._streams = streams
        self._replies = replies
        self._per_stream = len(replies) // len(streams)
        self._prompt_logprobs = prompt_logprobs
        self._keepalive_s = keepalive_s
        self._failures = failures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the answer or the client ends."""
        answering = self._stream if self._streaming.enabled else self._whole
        work = asyncio.create_task(answering(scope, receive, send))
        hang_up = asyncio.create_task(_hung_up(receive))
        try:
            await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            work.cancel()
            hang_up.cancel()
            await asyncio.gather(work, hang_up, return_exceptions=True)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = [Piece() for _ in self._replies]
        usages: list[Usage] = []
        response: JSONResponse
        try:
            async with Answers(self._streams) as answers:
                while not answers.all_complete:
                    stream, event = await answers.take()
                    if isinstance(event, Delta):
                        index = stream * self._per_stream + event.choice
                        pieces[index].add(self._replies[index].take(event, self._prompt_logprobs))
                    else:
                        usages.append(event.usage)
                        self._replies[stream * self._per_stream].end(event)
            choices = list(zip(pieces, self._replies, strict=True))
            response = JSONResponse(self._shape.whole(choices, usages))
        except Exception as error:
            response = error_response(self._failures.known(error))
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with Answers(self._streams) as answers:
                first = await answers.next(self._keepalive_s)
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                started = True
                async for event in self._events(answers, first):
                    await _send_body(send, event)
            await _send_body(send, DONE)
        except OSError:
            return  # the client is gone: nobody is left to tell
        except Exception as error:
            if not started:
                await error_response(self._failures.known(error))(scope, receive, send)
                return
            # No ``[DONE]`` after it: that word says that the answer is whole. OpenAI's SDK raises
            # ``APIError`` at the event itself, and a reader that knows no error events must see a
            # stream that was cut, not one that ended well.
            await _send_body(send, sse(error_json(self._failures.known(error))))
        await send({"type": "http.response.body", "body": b""})

    async def _events(
        self, answers: Answers, first: tuple[int, Event] | None
    ) -> AsyncIterator[bytes]:
        """Every event but ``[DONE]``, encoded."""
        completed = [0 for _ in self._streams]
        usages: list[Usage] = []
        for index in range(len(self._replies)):
            opening = self._shape.first(index)
            if opening is not None:
                yield self._encode(opening, completed)
        taken = first
        while True:
            if taken is None:
                yield KEEP_ALIVE
            else:
                stream, event = taken
                if isinstance(event, Complete):
                    usages.append(event.usage)
                    completed[stream] = event.usage.completion_tokens
                else:
                    completed[stream] += len(event.token_ids)
                for chunk in self._chunks(stream, event):
                    yield self._encode(chunk, completed)
            if answers.all_complete:
                break
            taken = await answers.next(self._keepalive_s)
        if self._streaming.include_usage:
            yield sse(self._shape.usage(usages))

    def _chunks(self, stream: int, event: Event) -> Iterator[dict[str, Any]]:
        """What one event of an answer says to the client."""
        index = stream * self._per_stream
        if isinstance(event, Complete):
            if self._per_stream == 1:
                self._replies[index].end(event)
                yield self._closing(index)
            return
        index += event.choice
        piece = self._replies[index].take(event)
        if piece:
            yield self._shape.delta(index, piece)
        if event.finish_reason is not None:
            yield self._closing(index)

    def _closing(self, index: int) -> dict[str, Any]:
        ending = self._replies[index].ending
        assert ending is not None
        return self._shape.last(index, ending)

    def _encode(self, chunk: dict[str, Any], completed: Sequence[int]) -> bytes:
        if self._streaming.continuous_usage:
            pairs = zip(self._prompt_tokens, completed, strict=True)
            chunk["usage"] = usage_json(Usage(prompt, done) for prompt, done in pairs)
        elif self._streaming.include_usage:
            chunk["usage"] = None
        return sse(chunk)


async def _hung_up(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})

"""The HTTP surface: routes, body limits, ids in headers, and errors always in OpenAI's shape.

This file owns what is served under which path. It must never look into sampling fields
(``router.openai_types`` and ``router.params`` do) nor write an answer's JSON
(``router.openai_replies`` does).

Life of a call: the middleware gives it an id; the endpoint reads the body, checks it and makes
one ``Request`` per prompt; an ``AnswerResponse`` answers it. Whatever raises before the answer
has begun becomes a JSON error with its HTTP status; an unknown exception becomes an incident id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protocol.errors import (
    Cancelled,
    InvalidArgument,
    RequestTooLarge,
    RequestTooSlow,
    TandemError,
    Unavailable,
)
from protocol.types import ModelInfo, Request
from protocol.wire.telemetry import CONTENT_TYPE, Telemetry
from router.failures import Failures
from router.json_fields import parse_json
from router.openai_replies import ChatShape, CompletionShape, Heading
from router.openai_response import AnswerResponse, error_response
from router.openai_types import Streaming, chat_call, completion_call
from router.params import Asked, check_request_id
from router.service import InferenceService

KEEPALIVE_S = 5.0
ID_HEADER = b"x-request-id"
ID_KEY = "tandem.request_id"  # in the ASGI scope: what the response's header will say
DRAIN_FACTOR = 4  # how much of a body that is too large is read so that the client hears why

Endpoint = Callable[[HttpRequest], Awaitable[Response | AnswerResponse]]


class OpenAIHttp:
    """The endpoints of one router."""

    def __init__(
        self,
        service: InferenceService,
        model: ModelInfo,
        *,
        router_id: str,
        max_request_bytes: int,
        request_body_s: float,
        telemetry: Telemetry,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        self._service = service
        self._model = model
        self._router_id = router_id
        self._max_request_bytes = max_request_bytes
        self._request_body_s = request_body_s
        self._telemetry = telemetry
        self._keepalive_s = keepalive_s
        self._started = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application."""
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{model:path}", self._one_model),
            ("GET", "/", self._root),
            ("GET", "/health", self._health),
            ("GET", "/ready", self._ready),
            ("GET", "/version", self._version),
            ("GET", "/metrics", self._metrics),
            ("GET", "/load", self._load),
        ]
        routes = [
            Route(path, _guarded(endpoint, self._service.failures), methods=[method])
            for method, path, endpoint in endpoints
        ]
        return Starlette(
            routes=routes,
            middleware=[Middleware(_RequestIds, draw_id=self._service.intake.draw_id)],
            exception_handlers={HTTPException: _http_exception},
        )

    async def _completions(self, http: HttpRequest) -> AnswerResponse:
        call = completion_call(await self._body(http))
        self._service.intake.check_model(call.model)
        asked = self._with_id(http, call.asked)
        many = len(call.prompts) > 1
        requests = []
        for i, prompt in enumerate(call.prompts):
            field = f"prompt[{i}]" if many else "prompt"
            each = replace(asked, request_id=f"{asked.request_id}-{i}") if many else asked
            if isinstance(prompt, str):
                requests.append(await self._service.from_text(prompt, each, field))
            else:
                requests.append(await self._service.from_tokens(prompt, each, field))
        shape = CompletionShape(self._heading(asked))
        texts = [
            self._service.prompt_text(request, prompt) if asked.echo else ""
            for request, prompt in zip(requests, call.prompts, strict=True)
        ]
        return self._answer(shape, call.streaming, asked, requests, texts)

    async def _chat(self, http: HttpRequest) -> AnswerResponse:
        call = chat_call(await self._body(http))
        self._service.intake.check_model(call.model)
        asked = self._with_id(http, call.asked)
        request = await self._service.from_chat(call.messages, asked)
        shape = ChatShape(self._heading(asked))
        return self._answer(shape, call.streaming, asked, [request], [""])

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def _one_model(self, http: HttpRequest) -> Response:
        self._service.intake.check_model(http.path_params["model"])
        return JSONResponse(self._model_json())

    async def _root(self, http: HttpRequest) -> Response:
        """For whoever opens the address in a browser: what this is and where to look."""
        paths = {"models": "/v1/models", "health": "/health", "metrics": "/metrics"}
        return JSONResponse({"service": "tandem"} | paths)

    async def _health(self, http: HttpRequest) -> Response:
        """The process lives and its event loop turns; ``/ready`` says whether it can serve."""
        return JSONResponse({"status": "ok"})

    async def _ready(self, http: HttpRequest) -> Response:
        ready, detail = self._service.core.can_serve()
        if not ready:
            raise Unavailable(f"not ready: {detail}", retry_after_s=1.0)
        return JSONResponse({"status": "degraded" if detail else "ready", "detail": detail})

    async def _version(self, http: HttpRequest) -> Response:
        return JSONResponse(
            {"version": metadata.version("tandem-serve"), "router_id": self._router_id}
        )

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self._telemetry.exposition(), media_type=CONTENT_TYPE)

    async def _load(self, http: HttpRequest) -> Response:
        return JSONResponse(load_json(self._service))

    async def _body(self, http: HttpRequest) -> dict[str, Any]:
        kind = http.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json":
            raise InvalidArgument(f"content-type must be application/json, not {kind}")
        try:
            async with asyncio.timeout(self._request_body_s):
                body = await _read(http, self._max_request_bytes)
        except TimeoutError:
            raise RequestTooSlow(
                f"the body was not complete after {self._request_body_s:g} s"
            ) from None
        return parse_json(body)

    def _with_id(self, http: HttpRequest, asked: Asked) -> Asked:
        """Settle the request's id: the body's, or the drawn one.

        A client's own ``x-request-id`` is echoed and nothing more: proxies repeat it on retries,
        and two running requests must not share an id.
        """
        echoed = _given_id(http.scope) is not None
        if asked.request_id is not None:
            check_request_id(asked.request_id)
            if not echoed:
                http.scope[ID_KEY] = asked.request_id
            return asked
        fresh = self._service.intake.draw_id() if echoed else http.scope[ID_KEY]
        return replace(asked, request_id=fresh)

    def _heading(self, asked: Asked) -> Heading:
        return Heading(
            request_id=asked.request_id or "",
            created=int(time.time()),
            model=self._service.intake.limits.served_name,
            fingerprint="fp_" + self._model.fingerprint[:12],
        )

    def _answer(
        self,
        shape: CompletionShape,
        streaming: Streaming,
        asked: Asked,
        requests: Sequence[Request],
        prompt_texts: Sequence[str],
    ) -> AnswerResponse:
        return AnswerResponse(
            shape,
            streaming,
            requests,
            [self._service.answer(request) for request in requests],
            [
                shape.choice(request, self._service.codec, text)
                for request, text in zip(requests, prompt_texts, strict=True)
                for _ in range(request.n_choices)
            ],
            prompt_logprobs=asked.prompt_logprobs,
            keepalive_s=self._keepalive_s,
            failures=self._service.failures,
        )

    def _model_json(self) -> dict[str, Any]:
        return {
            "id": self._service.intake.limits.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "tandem",
            "max_model_len": self._service.intake.limits.max_model_len,
        }


def load_json(service: InferenceService) -> dict[str, Any]:
    """The router's own view of its load: requests, and per worker what is in flight there."""
    status = service.core.status()
    return {
        "router_id": status.router_id,
        "running": status.running,
        "queued": status.queued,
        "counters": dict(status.counters),
        "workers": [
            {
                "worker_id": worker.info.worker_id,
                "role": worker.info.role.value,
                "session": worker.session,
                "detail": worker.detail,
                "in_flight": worker.in_flight,
                "reserved_pages": worker.reserved_pages,
                "queued_tokens": worker.queued_tokens,
                "load": None if worker.load is None else asdict(worker.load),
            }
            for worker in status.workers
        ],
    }


class _RequestIds:
    """ASGI middleware: every response carries ``x-request-id``, the client's own or a drawn one."""

    def __init__(self, app: ASGIApp, draw_id: Callable[[], str]) -> None:
        self._app = app
        self._draw_id = draw_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[ID_KEY] = _given_id(scope) or self._draw_id()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (ID_HEADER, scope[ID_KEY].encode("ascii"))
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _given_id(scope: Scope) -> str | None:
    """The client's ``x-request-id`` if it may stand in a header; else as if not given."""
    for name, value in scope["headers"]:
        if name == ID_HEADER:
            try:
                text = str(value, "ascii")
                check_request_id(text)
            except (UnicodeDecodeError, TandemError):
                return None
            return text
    return None


def _guarded(endpoint: Endpoint, failures: Failures) -> Endpoint:
    """The endpoint, with whatever it raises as an answer in OpenAI's shape."""

    async def guarded(http: HttpRequest) -> Response | AnswerResponse:
        try:
            return await endpoint(http)
        except HTTPException:
            raise
        except Exception as error:
            return error_response(failures.refused(error))

    return guarded


async def _read(http: HttpRequest, limit: int) -> bytes:
    """The whole body. One that is too large is read on for a while, so that the client, which
    may still be sending, gets to read the refusal."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in http.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > DRAIN_FACTOR * limit:
                break
    except ClientDisconnect as error:
        raise Cancelled("the client hung up while it sent the request") from error
    if size > limit:
        raise RequestTooLarge(f"the body is larger than {limit} bytes, the most this server reads")
    return b"".join(parts)


async def _http_exception(http: HttpRequest, error: Exception) -> Response:
    """Unknown paths and methods, which starlette finds, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {}) | {"x-should-retry": "false"}
    where = f"{http.method} {http.url.path}"
    message, code = {
        404: (f"there is nothing at {where}", "not_found"),
        405: (f"{where}: this path answers other methods", "method_not_allowed"),
    }.get(status, (str(getattr(error, "detail", error)), "http_error"))
    shape = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": shape}, status, headers)

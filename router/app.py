"""A whole router without Ray: the composition root that actors, tests and benchmarks share.

This file owns the life of every part of one router (event loop thread, dispatcher, both servers,
health) and the order of start and stop. It must never decide anything about a request.

Life of a ``RouterApp``; all methods may be called from any thread but the router's own loop:
 1. Construct: nothing runs, the tokenizer is loaded.
 2. ``start``: takes both ports (a used one is a ``ConfigError``), serves, returns the addresses.
    Health says NOT_SERVING until a request would be answered.
 3. ``set_workers`` and ``set_controller`` whenever the controller tells.
 4. ``stop``: what runs ends with an honest error, ports and thread are given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kernels.grammar import TokenTable
from protocol.config import TandemConfig
from protocol.types import ModelInfo, Role, WorkerInfo
from protocol.wire.channel import WireServer
from protocol.wire.clients import SessionClient
from protocol.wire.loop_thread import LoopThread
from protocol.wire.telemetry import Telemetry
from router import admin_proxy, grpc_front
from router.admin_proxy import AdminProxy
from router.dispatcher import Dispatcher
from router.failures import Failures
from router.grammar_trial import GrammarTrial
from router.grpc_front import InferenceFront
from router.http_server import HttpServer, join_address, listening_socket, split_address
from router.openai_http import KEEPALIVE_S, OpenAIHttp
from router.params import Intake, ModelLimits
from router.service import Codec, Core, InferenceService
from router.status import RouterStatus
from router.text import TextCodec

STOP_S = 10.0
GRACE_S = 1.0  # for the errors of ended requests to reach their clients


@dataclass(frozen=True, slots=True)
class RouterEndpoints:
    """Where a started router listens: ``host:port`` each, with the real ports."""

    http: str
    grpc: str


class RouterCore(Core, Protocol):
    """The dispatcher as its owner sees it."""

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None: ...
    async def close(self) -> None: ...


class RouterApp:
    """One router process, minus the process."""

    def __init__(
        self,
        config: TandemConfig,
        *,
        router_id: str,
        model: ModelInfo,
        secret: str,
        http: str | None = None,
        grpc: str | None = None,
        controller: str = "",
        codec: Codec | None = None,
        build_core: Callable[[], RouterCore] | None = None,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """``http`` and ``grpc`` override the configured addresses (port 0: any free one).

        ``controller`` is the address that ``Admin`` calls are forwarded to. ``codec`` and
        ``build_core`` default to the model's tokenizer and the real dispatcher.
        """
        self._config = config
        self._router_id = router_id
        self._model = model
        self._secret = secret
        self._http_address = http or config.router.http
        self._grpc_address = grpc or config.router.grpc
        self._controller = controller
        self._tokens_known = codec is None
        self._grammars = GrammarTrial(self._tokens_json)
        self._codec = codec or TextCodec(config.model.path)
        self._build_core = build_core or self._dispatcher
        self._keepalive_s = keepalive_s
        self.telemetry = Telemetry()
        name = config.model.served_name or Path(config.model.path).resolve().name
        self._intake = Intake(
            ModelLimits(name, model.vocab_size, model.max_model_len),
            draw_seed=lambda: secrets.randbits(63),
            draw_id=lambda: secrets.token_hex(12),
            request_timeout_s=config.timing.request_timeout_s,
            check_grammar=self._grammars.complaint,
        )
        self._loop: LoopThread | None = None
        self._core: RouterCore | None = None
        self._http: HttpServer | None = None
        self._grpc: WireServer | None = None
        self._admin: AdminProxy | None = None
        self._health: asyncio.Task[None] | None = None

    def start(self) -> RouterEndpoints:
        """Serve. Raises ``ConfigError`` for an address that is used or malformed."""
        if self._loop is not None:
            raise RuntimeError(f"router {self._router_id} is started already")
        self._loop = LoopThread(f"router-{self._router_id}")
        self._loop.start()
        try:
            return self._loop.run(self._start())
        except BaseException:
            self.stop()
            raise

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        """The whole list of workers that are up."""
        self._running().call(self._take_workers, workers)

    def set_controller(self, address: str) -> None:
        """Where ``Admin`` calls go from now on."""
        self._running().run(self._set_controller(address))

    def status(self) -> RouterStatus:
        """A snapshot of requests and workers as this router sees them."""
        return self._running().call(self._live_core().status)

    def stop(self) -> None:
        """End everything. May be called twice, and after a failed start."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            loop.run(self._stop(), STOP_S)
        finally:
            loop.stop()
            self._grammars.close()

    async def _start(self) -> RouterEndpoints:
        core = self._core = self._build_core()
        failures = Failures(self.telemetry)
        service = InferenceService(self._intake, self._codec, core, failures)
        limits = self._config.router.limits
        http_server = self._http = HttpServer(self._http_address)
        http = http_server.bind()
        wire = self._grpc = WireServer(
            secret=self._secret,
            timing=self._config.timing,
            on_refused=lambda cause: self.telemetry.count("frames_refused", cause),
        )
        grpc_host, grpc_port = split_address(self._grpc_address, "router.grpc")
        # Tried with a plain socket first: grpc would write its own lines about a used port.
        listening_socket(grpc_host, grpc_port, "router.grpc").close()
        grpc = join_address(grpc_host, wire.bind(self._grpc_address))
        self._admin = AdminProxy(self._secret, self._config.timing, failures)
        self._admin.add_to(wire.grpc)
        await self._admin.set_controller(self._controller)
        InferenceFront(service, limits.max_request_bytes).add_to(wire.grpc)
        await wire.start((grpc_front.SERVICE, admin_proxy.SERVICE), serving=False)
        endpoints = OpenAIHttp(
            service,
            self._model,
            router_id=self._router_id,
            max_request_bytes=limits.max_request_bytes,
            request_body_s=limits.request_body_s,
            telemetry=self.telemetry,
            keepalive_s=self._keepalive_s,
        )
        await http_server.start(endpoints.app(), GRACE_S)
        await self._tell_health()
        self._health = asyncio.create_task(self._follow_health())
        return RouterEndpoints(http, grpc)

    async def _stop(self) -> None:
        if self._health is not None:
            self._health.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health
        # The dispatcher first: its requests end with errors that the servers can still send.
        if self._core is not None:
            await self._core.close()
        if self._http is not None:
            await self._http.stop()
        if self._grpc is not None:
            await self._grpc.stop(GRACE_S)
        if self._admin is not None:
            await self._admin.close()

    async def _follow_health(self) -> None:
        """gRPC health answers from memory, so that memory follows the dispatcher."""
        while True:
            await asyncio.sleep(self._config.timing.heartbeat_s)
            await self._tell_health()

    async def _tell_health(self) -> None:
        if self._grpc is not None:
            serving, _ = self._live_core().can_serve()
            states = {"": serving, grpc_front.SERVICE: serving, admin_proxy.SERVICE: True}
            await self._grpc.set_serving(states)

    def _take_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        self._live_core().set_workers(workers)
        rooms = [
            worker.total_pages * worker.model.geometry.page_size
            for worker in workers
            if worker.role is Role.DECODE
        ]
        self._intake.limits = replace(
            self._intake.limits,
            room_tokens=max(rooms, default=None),
            page_size=max((w.model.geometry.page_size for w in workers), default=1),
        )

    async def _set_controller(self, address: str) -> None:
        self._controller = address
        if self._admin is not None:
            await self._admin.set_controller(address)

    def _running(self) -> LoopThread:
        if self._loop is None:
            raise RuntimeError(f"router {self._router_id} is not started")
        return self._loop

    def _live_core(self) -> RouterCore:
        if self._core is None:
            raise RuntimeError(f"router {self._router_id} is not started")
        return self._core

    def _dispatcher(self) -> RouterCore:
        return Dispatcher(
            self._config,
            self._model,
            router_id=self._router_id,
            session_factory=self._session,
            clock=time.monotonic,
            telemetry=self.telemetry,
        )

    def _tokens_json(self) -> str:
        """What the trial of grammars must know of the model's tokens; null: take them on trust."""
        if not self._tokens_known:
            return "null"
        model = self._model
        tokens = TokenTable(self._config.model.path, model.vocab_size, model.eos_token_ids)
        return tokens.to_json()

    def _session(self, worker: WorkerInfo) -> SessionClient:
        return SessionClient(
            worker.endpoint, self._router_id, self._secret, timing=self._config.timing
        )

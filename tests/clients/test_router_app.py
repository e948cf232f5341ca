"""The life of a router: ports, restarts, an honest end, workers' room, forwarded Admin calls."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from clients.conftest import SECRET, make_app
from clients.fake_core import ANSWER, MODEL, ByteCodec, FakeCore

from protocol.config import TimingConfig
from protocol.errors import ConfigError, TandemError, Unauthenticated, Unavailable
from protocol.status import ClusterStatus
from protocol.types import Complete, Mode, Role, WorkerInfo
from protocol.wire import admin_pb2
from protocol.wire.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from protocol.wire.channel import WireServer
from protocol.wire.clients import AdminClient
from protocol.wire.convert_front import encode_status
from protocol.wire.inference_client import GenerateCall, InferenceClient
from protocol.wire.loop_thread import LoopThread
from router.app import RouterApp
from router.http_server import join_address, split_address

CODEC = ByteCodec()


def fresh(**more) -> tuple[RouterApp, FakeCore]:
    core = FakeCore(CODEC)
    return make_app(core, CODEC, **more), core


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_a_used_port_is_one_sentence_and_leaves_nothing_behind(used_port: int, which: str, capfd):
    address = f"127.0.0.1:{used_port}"
    before = threading.active_count()
    app, _ = fresh(**{which: address})
    with pytest.raises(ConfigError) as caught:
        app.start()
    assert address in caught.value.message
    assert "in use" in caught.value.message and f"router.{which}" in caught.value.message
    assert "\n" not in caught.value.message
    assert capfd.readouterr().err == ""
    app.stop()
    assert threading.active_count() <= before + 1  # grpc keeps one poller thread per process


def test_two_routers_cannot_share_a_port():
    first, _ = fresh()
    endpoints = first.start()
    try:
        for which in ("http", "grpc"):
            second, _ = fresh(**{which: getattr(endpoints, which)})
            with pytest.raises(ConfigError):
                second.start()
    finally:
        first.stop()


def test_a_stopped_router_gives_its_ports_back():
    first, _ = fresh()
    endpoints = first.start()
    first.stop()
    first.stop()
    second, _ = fresh(http=endpoints.http, grpc=endpoints.grpc)
    try:
        assert second.start() == endpoints
        assert httpx.get(f"http://{endpoints.http}/health", trust_env=False).status_code == 200
    finally:
        second.stop()


@pytest.mark.parametrize(
    "address", ["8000", "127.0.0.1:", "127.0.0.1:http", ":80", "a:99999", "²:²"]
)
def test_a_malformed_address_names_its_field(address: str):
    with pytest.raises(ConfigError) as caught:
        split_address(address, "router.http")
    assert caught.value.field == "router.http"
    app, _ = fresh(grpc=address)
    with pytest.raises(ConfigError):
        app.start()


def test_addresses_of_both_families():
    for address in ("127.0.0.1:80", "localhost:0", "[::1]:8000"):
        assert join_address(*split_address(address, "x")) == address


def test_stopping_ends_running_answers_with_an_error():
    app, core = fresh()
    endpoints = app.start()
    body = {"prompt": "hold-later", "stream": True}
    with httpx.stream(
        "POST", f"http://{endpoints.http}/v1/completions", json=body, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        assert ANSWER[0] in next(lines)
        stopper = threading.Thread(target=app.stop)
        stopper.start()
        rest = [line for line in lines if line]
    stopper.join(20)
    assert not stopper.is_alive()
    assert "is shutting down" in rest[-1]
    assert core.wait_for(lambda: core.closed)


def test_the_default_length_follows_the_workers_room():
    app, core = fresh()
    endpoints = app.start()
    try:
        app.set_workers(
            (_worker(Role.PREFILL, 1), _worker(Role.DECODE, 3), _worker(Role.DECODE, 2))
        )
        assert len(core.workers) == 3
        asked = {"prompt": "hi"}
        url = f"http://{endpoints.http}/v1/completions"
        assert httpx.post(url, json=asked, trust_env=False).status_code == 200
        assert core.requests[-1].sampling.max_tokens == 3 * 16 - 2
        assert app.status().router_id == "router-0"
    finally:
        app.stop()


def _worker(role: Role, pages: int) -> WorkerInfo:
    return WorkerInfo(f"{role}-{pages}", "i", role, "127.0.0.1:1", MODEL, pages, 4, 64)


def test_our_own_client_and_the_front_agree():
    app, _ = fresh()
    endpoints = app.start()

    async def talk() -> None:
        async with InferenceClient(endpoints.grpc) as client:
            pieces = [p async for p in client.generate(GenerateCall(text="hi", stop=("Two.",)))]
            assert isinstance(pieces[-1], Complete)
            assert pieces[-1].matched_stop == "Two."
            with pytest.raises(Unavailable) as caught:
                async for _ in client.generate(GenerateCall(text="fail-later")):
                    pass
            assert caught.value.retry_after_s == 2.5

    try:
        asyncio.run(talk())
    finally:
        app.stop()


class Controller(AdminServicer):
    """Answers Admin calls and remembers why it should end."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    async def Status(self, request, context):
        return encode_status(ClusterStatus("demo", Mode.DISAGGREGATED, "tiny", 1.5))

    async def Shutdown(self, request, context):
        self.causes.append(request.cause)
        return admin_pb2.ShutdownResponse()


def test_admin_calls_reach_the_controller_and_say_when_it_is_gone():
    loop, controller = LoopThread("controller"), Controller()
    loop.start()

    async def serve() -> tuple[WireServer, str]:
        server = WireServer(secret=SECRET, timing=TimingConfig())
        add_AdminServicer_to_server(controller, server.grpc)
        port = server.bind("127.0.0.1:0")
        await server.start(("tandem.v1.Admin",))
        return server, f"127.0.0.1:{port}"

    server, address = loop.run(serve())
    app, _ = fresh()
    endpoints = app.start()
    try:
        client = AdminClient(endpoints.grpc, SECRET)
        _fails(client, Unavailable, "no controller")
        app.set_controller(address)
        assert client.status().cluster == "demo"
        client.shutdown("the test is over")
        assert controller.causes == ["the test is over"]
        _fails(AdminClient(endpoints.grpc, "wrong"), Unauthenticated, "token")
        loop.run(server.stop(0))
        _fails(client, Unavailable, f"controller at {address}")
        client.close()
    finally:
        app.stop()
        loop.stop()


def _fails(client: AdminClient, kind: type[TandemError], words: str) -> None:
    with pytest.raises(kind, match=words):
        client.status()

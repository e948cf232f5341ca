"""Servers and errors on the wire: addresses, health, reflection, details, the Admin client."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from wire_host import FAST, SECRET, RecordingHost, run, served

from protocol.errors import BY_REASON, ConfigError, TandemError, Unauthenticated, Unavailable
from protocol.status import ClusterStatus, Note, RouterStatus, WorkerStatus
from protocol.types import Mode, Role, WorkerLoad
from protocol.wire import admin_pb2, admin_pb2_grpc
from protocol.wire.channel import (
    WireServer,
    abort_with,
    aio_channel,
    cluster_token,
    token_metadata,
)
from protocol.wire.clients import AdminClient
from protocol.wire.convert_front import encode_status

STATUS = ClusterStatus(
    cluster="tandem",
    mode=Mode.DISAGGREGATED,
    model="m",
    uptime_s=3.5,
    workers=(
        WorkerStatus(
            "decode-0", "a", Role.DECODE, "ready", "127.0.0.1:1", "n", 7, 1, WorkerLoad(running=2)
        ),
    ),
    routers=(RouterStatus("router-0", "ready", "127.0.0.1:8000", "127.0.0.1:9000"),),
    notes=(Note(1.0, "decode-0 was replaced"),),
)


class Admin(admin_pb2_grpc.AdminServicer):
    """Answers with a status; raises ``error`` instead when it is set."""

    def __init__(self) -> None:
        self.error: TandemError | None = None
        self.causes: list[str] = []

    async def Status(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            await abort_with(context, self.error)
        return encode_status(STATUS)

    async def Shutdown(self, request: Any, context: Any) -> Any:
        self.causes.append(request.cause)
        return admin_pb2.ShutdownResponse()


def test_a_used_port_is_an_error_that_names_the_address() -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = f"127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(ConfigError, match=address):
                WireServer().bind(address)

    run(main())


def test_two_servers_never_share_a_port() -> None:
    async def main() -> None:
        one, other = WireServer(), WireServer()
        address = f"127.0.0.1:{one.bind('127.0.0.1:0')}"
        with pytest.raises(ConfigError, match=address):
            other.bind(address)
        await one.stop()
        await other.stop()

    run(main())


def test_an_address_that_is_none_is_an_error() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="nowhere"):
            WireServer().bind("nowhere.invalid:1")

    run(main())


def test_the_token_is_not_the_secret() -> None:
    token = cluster_token(SECRET)
    assert SECRET not in token
    assert token != cluster_token("another")
    assert cluster_token("") == ""


def test_admin_takes_and_gives_dataclasses_and_needs_the_token() -> None:
    async def main() -> None:
        server, servicer = WireServer(secret=SECRET, timing=FAST), Admin()
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, server.grpc)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start(["tandem.v1.Admin"])
        admin, stranger = AdminClient(endpoint, SECRET), AdminClient(endpoint, "wrong")
        assert await asyncio.to_thread(admin.status) == STATUS
        await asyncio.to_thread(admin.shutdown, "asked")
        assert servicer.causes == ["asked"]
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(stranger.status)
        await server.stop()
        with pytest.raises(Unavailable):
            await asyncio.to_thread(admin.status)
        admin.close()
        stranger.close()

    run(main())


def test_bytes_that_are_no_message_are_the_callers_mistake(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Never UNKNOWN, never a traceback in the log, and a stranger's bytes are not read at all."""
    refused: list[str] = []

    async def main() -> None:
        server = WireServer(secret=SECRET, timing=FAST, on_refused=refused.append)
        admin_pb2_grpc.add_AdminServicer_to_server(Admin(), server.grpc)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start(["tandem.v1.Admin"])
        async with aio_channel(endpoint) as channel:

            async def code_of(call: Any) -> grpc.StatusCode:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                return caught.value.code()

            status = channel.unary_unary("/tandem.v1.Admin/Status")
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
            assert await code_of(status(b"\xff\xff")) is grpc.StatusCode.UNAUTHENTICATED
            mine = status(b"\xff\xff", metadata=token_metadata(SECRET))
            assert await code_of(mine) is grpc.StatusCode.INVALID_ARGUMENT
            assert await code_of(watch(b"\xff\xff").read()) is grpc.StatusCode.INVALID_ARGUMENT
        await server.stop()

    run(main())
    assert refused == ["unauthenticated", "malformed", "malformed"]
    assert "Traceback" not in caplog.text


def test_every_error_arrives_as_the_class_it_was() -> None:
    async def main() -> None:
        server, servicer = WireServer(timing=FAST), Admin()
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, server.grpc)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start(["tandem.v1.Admin"])
        admin = AdminClient(endpoint)
        for kind in BY_REASON.values():
            for field, retry_after_s in ((None, None), ("max_tokens", 1.5)):
                servicer.error = kind("wörds: 7 > 3", field=field, retry_after_s=retry_after_s)
                with pytest.raises(TandemError) as caught:
                    await asyncio.to_thread(admin.status)
                assert type(caught.value) is kind
                assert caught.value.info() == servicer.error.info()
        admin.close()
        await server.stop()

    run(main())


def test_an_endless_message_is_cut_not_lost() -> None:
    async def main() -> None:
        server, servicer = WireServer(timing=FAST), Admin()
        admin_pb2_grpc.add_AdminServicer_to_server(servicer, server.grpc)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start(["tandem.v1.Admin"])
        admin = AdminClient(endpoint)
        servicer.error = Unavailable("x" * 100_000)
        with pytest.raises(Unavailable, match=r"^x{1000}$"):
            await asyncio.to_thread(admin.status)
        admin.close()
        await server.stop()

    run(main())


def test_an_error_of_a_stranger_is_known_by_its_code() -> None:
    async def main() -> None:
        server = WireServer(timing=FAST)
        endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start([])
        admin = AdminClient(endpoint)
        with pytest.raises(TandemError) as caught:
            await asyncio.to_thread(admin.status)  # no such service there
        assert "Method not found" in caught.value.message
        admin.close()
        await server.stop()

    run(main())


def test_health_and_reflection_are_open_and_follow_the_worker() -> None:
    async def main() -> None:
        async with served(RecordingHost()) as (endpoint, server), aio_channel(endpoint) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def states() -> list[int]:
                names = ("", "tandem.v1.Session", "tandem.v1.Transfer")
                requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
                return [(await health.Check(request)).status for request in requests]

            assert await states() == [health_pb2.HealthCheckResponse.SERVING] * 3
            await server.set_serving(False)
            assert await states() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health.Check(health_pb2.HealthCheckRequest(service="no.such"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = {s.name for s in (await call.read()).list_services_response.service}
            assert {"tandem.v1.Session", "tandem.v1.Transfer", "grpc.health.v1.Health"} <= listed
            symbol = reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="tandem.v1.Hello"
            )
            await call.write(symbol)
            assert (await call.read()).file_descriptor_response.file_descriptor_proto
            await call.done_writing()

    run(main())

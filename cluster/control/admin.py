"""``tandem.v1.Admin`` at the controller: status and shutdown, by gRPC.

This file owns the controller's gRPC server. It must never decide: what a cluster is doing, and
how it ends, it asks of whoever made it. Routers forward operators' calls to it.

Life of an ``AdminServer``, on the controller's event loop: construct -> ``start`` -> ``stop``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from protocol.config import TimingConfig
from protocol.status import ClusterStatus
from protocol.wire import admin_pb2 as pb
from protocol.wire.admin_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from protocol.wire.channel import WireServer
from protocol.wire.convert_front import encode_status

SERVICE = "tandem.v1.Admin"


class _Admin(AdminServicer):
    def __init__(
        self, status: Callable[[], Awaitable[ClusterStatus]], shutdown: Callable[[str], None]
    ) -> None:
        self._status = status
        self._shutdown = shutdown

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:
        """The state of the cluster."""
        return encode_status(await self._status())

    async def Shutdown(self, request: pb.ShutdownRequest, context: Any) -> pb.ShutdownResponse:
        """End the cluster; answers at once."""
        self._shutdown(request.cause)
        return pb.ShutdownResponse()


class AdminServer:
    """The controller's gRPC server."""

    def __init__(
        self,
        secret: str,
        timing: TimingConfig,
        *,
        status: Callable[[], Awaitable[ClusterStatus]],
        shutdown: Callable[[str], None],
    ) -> None:
        """Both are called on the event loop; ``shutdown`` must not block."""
        self._server = WireServer(secret=secret, timing=timing)
        add_AdminServicer_to_server(_Admin(status, shutdown), self._server.grpc)

    async def start(self, host: str) -> str:
        """Serve on any free port of ``host``; returns ``host:port``."""
        port = self._server.bind(f"{host}:0")
        await self._server.start((SERVICE,))
        return f"{host}:{port}"

    async def stop(self) -> None:
        """End the server."""
        await self._server.stop()

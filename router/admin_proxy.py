"""``tandem.v1.Admin`` at a router: every call goes on to the controller, unread.

This file owns the one channel from a router to the controller. It must never answer by itself:
without a controller the call fails with a sentence that says so. Whether a caller may ask is
decided before, by the cluster token's check on the router's own server.

Life of an ``AdminProxy``: made with the router, told the controller's address when it is known
or changes (``set_controller``), ``close``.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from protocol.config import TimingConfig
from protocol.errors import Unavailable
from protocol.wire import admin_pb2 as pb
from protocol.wire.admin_pb2_grpc import AdminServicer, AdminStub, add_AdminServicer_to_server
from protocol.wire.channel import abort_with, aio_channel, from_rpc_error, token_metadata
from router.failures import Failures

SERVICE = "tandem.v1.Admin"
LONGEST_CALL_S = 30.0  # of a caller who set no deadline


class AdminProxy(AdminServicer):
    """Forwards Admin calls; every method runs on the router's event loop."""

    def __init__(self, secret: str, timing: TimingConfig, failures: Failures) -> None:
        self._failures = failures
        self._metadata = token_metadata(secret)
        self._timing = timing
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    def add_to(self, server: Any) -> None:
        """Register with a ``grpc.aio`` server."""
        add_AdminServicer_to_server(self, server)

    async def set_controller(self, address: str) -> None:
        """Forward to this ``host:port`` from now on; empty: to nobody."""
        if address == self._address:
            return
        await self.close()
        self._address = address
        if address:
            self._channel = aio_channel(address, self._timing)

    async def close(self) -> None:
        """Give the channel up."""
        channel, self._channel, self._address = self._channel, None, ""
        if channel is not None:
            await channel.close()

    async def Status(self, request: pb.StatusRequest, context: Any) -> Any:
        """The state of the cluster, from the controller."""
        return await self._forward("Status", request, context)

    async def Shutdown(self, request: pb.ShutdownRequest, context: Any) -> Any:
        """End the cluster, by the controller."""
        return await self._forward("Shutdown", request, context)

    async def _forward(self, method: str, request: Any, context: Any) -> Any:
        try:
            if self._channel is None:
                raise Unavailable("this router knows no controller yet", retry_after_s=1.0)
            call = getattr(AdminStub(self._channel), method)
            timeout_s = min(context.time_remaining() or LONGEST_CALL_S, LONGEST_CALL_S)
            return await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error)
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                cause = Unavailable(f"the controller at {self._address} does not answer")
            await abort_with(context, cause)
        except Exception as error:
            await abort_with(context, self._failures.known(error))

"""Typed clients of Tandem's own services: they take and give the dataclasses of ``protocol``.

Owns one channel per client and nothing else; knows no policy, no retry, no reconnection: a
client that has ended is thrown away and a new one is made. Protobuf and grpc stop here.

Life of a stream client, on one event loop: construct -> ``await connect()`` -> ``send_nowait``
from any thread and ``async for message in messages()`` by one coroutine -> ``await close()``.
However the stream ends, ``messages()`` raises a ``TandemError`` with the cause; only a ``close``
of our own ends it quietly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from protocol.agreement import check_agreement
from protocol.config import TimingConfig
from protocol.errors import TandemError, Unavailable
from protocol.messages import (
    Hello,
    ReceiverToSender,
    RouterHeartbeat,
    RouterToWorker,
    SenderToReceiver,
    WorkerToRouter,
)
from protocol.status import ClusterStatus
from protocol.types import Peer
from protocol.wire import (
    admin_pb2,
    admin_pb2_grpc,
    session_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from protocol.wire.channel import (
    ROUTER_ID_KEY,
    blocking_channel,
    from_rpc_error,
    token_metadata,
)
from protocol.wire.convert import (
    RECEIVER_FRAMES,
    ROUTER_FRAMES,
    SENDER_FRAMES,
    WORKER_FRAMES,
)
from protocol.wire.convert_front import decode_status
from protocol.wire.stream import Duplex
from protocol.wire.stream_call import StreamCall

CONNECT_S = 4.0


class SessionClient:
    """A router's Session with one worker. Sends the router's heartbeat by itself."""

    def __init__(
        self,
        endpoint: str,
        router_id: str,
        secret: str = "",
        *,
        timing: TimingConfig | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._timing = timing or TimingConfig()
        self._metadata = (*token_metadata(secret), (ROUTER_ID_KEY, router_id))
        self._stream = StreamCall(endpoint, self._timing, connect_s)
        self._duplex: Duplex | None = None

    async def connect(self) -> None:
        """Open the stream. Raises ``Unavailable``, ``Unauthenticated`` or the worker's refusal."""
        stub = session_pb2_grpc.SessionStub(self._stream.channel)
        call = stub.Stream(metadata=self._metadata)
        self._duplex = await self._stream.open(call, ROUTER_FRAMES, WORKER_FRAMES)
        self._stream.keep(self._duplex, self._timing, RouterHeartbeat())

    def send_nowait(self, message: RouterToWorker) -> None:
        """Queue a message; any thread. Ignored after the stream's end, which ``messages`` tells."""
        self._live().send(message)

    def messages(self) -> AsyncIterator[WorkerToRouter]:
        """What the worker says, in order. Raises the cause when the stream ends."""
        return self._stream.messages(self._live())

    async def close(self) -> None:
        """End the stream and the channel. May be called twice."""
        await self._stream.close()

    def _live(self) -> Duplex:
        if self._duplex is None:
            raise Unavailable("the session is not connected")
        return self._duplex


class TransferClient:
    """A sending worker's Transfer stream to one receiving worker.

    The caller says ``TransferHeartbeat`` every ``heartbeat_s``: it names what only it knows.
    """

    def __init__(
        self,
        endpoint: str,
        me: Hello,
        secret: str = "",
        *,
        expect: Peer | None = None,
        timing: TimingConfig | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        """``expect``: refuse a worker at that address with another id or incarnation."""
        self._me = me
        self._expect = expect
        self._metadata = token_metadata(secret)
        self._connect_s = connect_s
        self._timing = timing or TimingConfig()
        self._stream = StreamCall(endpoint, self._timing, connect_s)
        self._duplex: Duplex | None = None

    async def connect(self) -> Hello:
        """Open the stream and exchange Hellos; returns the receiver's.

        Raises ``PeerMismatch`` with both values when the two cannot exchange pages,
        ``Unavailable`` when nobody, or another incarnation than expected, answers.
        """
        stub = transfer_pb2_grpc.TransferStub(self._stream.channel)
        call = stub.Stream(metadata=self._metadata)
        duplex = await self._stream.open(call, SENDER_FRAMES, RECEIVER_FRAMES)
        try:
            duplex.send(self._me)
            async with asyncio.timeout(self._connect_s):
                answer = await duplex.read()
            if not isinstance(answer, Hello):
                raise Unavailable(f"{self._stream.endpoint}: did not answer the Hello")
            check_agreement(self._me, answer)
            self._check_identity(answer)
        except TimeoutError:
            await self.close()
            raise Unavailable(f"{self._stream.endpoint}: no answer to the Hello") from None
        except TandemError:
            await self.close()
            raise
        self._duplex = duplex
        self._stream.keep(duplex, self._timing)
        return answer

    def _check_identity(self, answer: Hello) -> None:
        want = self._expect
        if want is None or (want.worker_id, want.incarnation) == (
            answer.worker_id,
            answer.incarnation,
        ):
            return
        raise Unavailable(
            f"{self._stream.endpoint}: expected {want.worker_id} ({want.incarnation}), found "
            f"{answer.worker_id} ({answer.incarnation}): it was restarted"
        )

    def send_nowait(self, message: SenderToReceiver) -> None:
        """Queue a message; any thread. Ignored after the stream's end, which ``messages`` tells."""
        self._live().send(message)

    def messages(self) -> AsyncIterator[ReceiverToSender]:
        """What the receiver says, in order. Raises the cause when the stream ends."""
        return self._stream.messages(self._live())

    async def close(self) -> None:
        """End the stream and the channel. May be called twice."""
        await self._stream.close()

    def _live(self) -> Duplex:
        if self._duplex is None:
            raise Unavailable("the transfer stream is not connected")
        return self._duplex


class StoreClient:
    """The rendezvous map of one link at its receiver; blocking, for link threads."""

    def __init__(
        self,
        endpoint: str,
        link: str,
        secret: str = "",
        *,
        timing: TimingConfig | None = None,
        call_s: float = CONNECT_S,
    ) -> None:
        """``call_s``: deadline of one call, on top of the time that a ``get`` may wait."""
        self._link = link
        self._call_s = call_s
        self._metadata = token_metadata(secret)
        self._channel = blocking_channel(endpoint, timing)
        self._stub = transfer_pb2_grpc.TransferStub(self._channel)

    def set(self, key: str, value: bytes) -> None:
        """Leave a value. Raises ``WrongState`` when the receiver has not opened the link."""
        request = transfer_pb2.StoreSetRequest(link=self._link, key=key, value=value)
        self._do(self._stub.StoreSet, request)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """A value, or None when nobody left it within ``timeout_s``."""
        request = transfer_pb2.StoreGetRequest(link=self._link, key=key, timeout_s=timeout_s)
        answer = self._do(self._stub.StoreGet, request, timeout_s)
        return bytes(answer.value) if answer.HasField("value") else None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is there now."""
        request = transfer_pb2.StoreCheckRequest(link=self._link, keys=keys)
        return bool(self._do(self._stub.StoreCheck, request).present)

    def delete(self, key: str) -> bool:
        """Remove a value; whether it was there."""
        request = transfer_pb2.StoreDeleteRequest(link=self._link, key=key)
        return bool(self._do(self._stub.StoreDelete, request).deleted)

    def close(self) -> None:
        """End the channel; calls that still wait fail."""
        self._channel.close()

    def _do(self, method: Any, request: Any, wait_s: float = 0.0) -> Any:
        try:
            return method(request, timeout=self._call_s + wait_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except ValueError as error:  # grpc's answer to a call on a closed channel
            raise Unavailable("the rendezvous channel is closed") from error


class AdminClient:
    """The Admin service for the command line; blocking."""

    def __init__(self, endpoint: str, secret: str = "", *, call_s: float = 10.0) -> None:
        self._endpoint = endpoint
        self._call_s = call_s
        self._metadata = token_metadata(secret)
        self._channel = blocking_channel(endpoint)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def status(self) -> ClusterStatus:
        """The state of the cluster. Raises ``Unavailable`` when nobody answers there."""
        return decode_status(self._do(self._stub.Status, admin_pb2.StatusRequest()))

    def shutdown(self, cause: str) -> None:
        """Ask the cluster to end; returns when it has agreed."""
        self._do(self._stub.Shutdown, admin_pb2.ShutdownRequest(cause=cause))

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def _do(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._call_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

"""The gRPC face of one worker: the Session and Transfer services.

Owns the streams that routers and sending workers have open to this worker: it decodes their
frames into events for the ``Host``, writes what the host sends, and makes sure that the end of a
stream reaches the role exactly once, after everything that came before it. It must never decide
about tickets, never touch pages, and never let a bad frame pass unnoticed.

Life of a stream (all on the worker's event loop; the host's ``send`` may come from any thread):
 1. A router names itself in the call's metadata, a peer in its Hello, which both sides check.
 2. An older stream of the same router or peer is ended first: detach, then ``RouterLost`` or
    ``PeerLost``.
 3. Attach; frames in are submitted in order, messages out are written in order; every
    ``heartbeat_s`` the worker says that it lives, and looks whether the other side does.
 4. The end, whatever the reason: detach, then the one lost event. Later frames are not read.

A malformed frame on a Session is dropped, counted, and answered where it was an Open; on a
Transfer it ends the stream, because a dropped announcement would shift the bytes of the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.worker.host import Host
from cluster.worker.streams import StreamTable
from protocol.agreement import check_agreement
from protocol.config import TimingConfig
from protocol.errors import (
    InvalidArgument,
    MalformedFrame,
    PeerMismatch,
    TandemError,
    Unavailable,
)
from protocol.events import FromPeer, FromRouter, PeerLost, RouterLost
from protocol.messages import Done, Hello, TransferHeartbeat, WorkerHeartbeat
from protocol.types import Outcome, TicketId
from protocol.wire import session_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from protocol.wire.channel import ACCEPTED_KEY, ROUTER_ID_KEY, WireServer, abort_with
from protocol.wire.convert import RECEIVER_FRAMES, ROUTER_FRAMES, SENDER_FRAMES, WORKER_FRAMES
from protocol.wire.stream import QUEUE_LIMIT, Duplex

SERVICES = ("tandem.v1.Session", "tandem.v1.Transfer")
_ACCEPTED = ((ACCEPTED_KEY, "1"),)
_STORE_WAIT_S = 1.0  # most that one StoreGet may hold a thread; callers ask again
_STORE_THREADS = 4


class SessionService(session_pb2_grpc.SessionServicer):
    """Routers' sessions with this worker."""

    def __init__(self, host: Host, timing: TimingConfig, queue_limit: int = QUEUE_LIMIT) -> None:
        self._host = host
        self._queue_limit = queue_limit
        self.streams = StreamTable("session", timing, host)

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        """One router's Session, until it ends."""
        router_id = _metadata(context, ROUTER_ID_KEY)
        if not router_id:
            self._host.count("frames_refused", "nameless")
            await abort_with(context, InvalidArgument(f"the call needs {ROUTER_ID_KEY}"))
        await context.send_initial_metadata(_ACCEPTED)
        host = self._host
        me = host.hello()
        duplex = Duplex(context, WORKER_FRAMES, ROUTER_FRAMES, self._queue_limit)

        def lost(cause: TandemError) -> None:
            host.detach_router(router_id)
            host.submit(RouterLost(router_id))

        def refuse(error: MalformedFrame) -> None:
            ticket_id = _opened(duplex.frame)
            if ticket_id is not None:
                duplex.send(Done(ticket_id, Outcome.FAILED, error=error.info()))

        cause = await self.streams.serve(
            router_id,
            duplex,
            attach=lambda: host.attach_router(router_id, duplex.send),
            lost=lost,
            take=lambda message: host.submit(FromRouter(router_id, message)),
            refuse=refuse,
            beat=lambda: WorkerHeartbeat(me.worker_id, me.incarnation, host.load()),
        )
        await abort_with(context, cause)


class TransferService(transfer_pb2_grpc.TransferServicer):
    """Sending workers' transfer streams to this worker, and the rendezvous of their links."""

    def __init__(self, host: Host, timing: TimingConfig, queue_limit: int = QUEUE_LIMIT) -> None:
        self._host = host
        self._timing = timing
        self._queue_limit = queue_limit
        self.streams = StreamTable("transfer", timing, host)
        self._waits = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="rendezvous")

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        """One sending worker's Transfer stream, until it ends."""
        await context.send_initial_metadata(_ACCEPTED)
        host = self._host
        duplex = Duplex(context, RECEIVER_FRAMES, SENDER_FRAMES, self._queue_limit)
        try:
            theirs = await self._greet(duplex)
        except TandemError as error:
            why = "mismatch" if isinstance(error, PeerMismatch) else "hello"
            host.count("frames_refused", why)
            await abort_with(context, error)
        worker_id = theirs.worker_id

        def attach() -> None:
            duplex.send(host.hello())
            host.attach_peer(theirs, duplex.send, duplex.close)

        def lost(cause: TandemError) -> None:
            host.detach_peer(worker_id)
            host.submit(PeerLost(worker_id, cause.info(), outgoing=False))

        def refuse(error: MalformedFrame) -> None:
            raise error

        def take(message: Any) -> None:
            if isinstance(message, Hello):
                raise MalformedFrame(f"{worker_id} said Hello twice")
            host.submit(FromPeer(worker_id, message))

        cause = await self.streams.serve(
            worker_id,
            duplex,
            attach=attach,
            lost=lost,
            take=take,
            refuse=refuse,
            beat=TransferHeartbeat,
        )
        await abort_with(context, cause)

    async def _greet(self, duplex: Duplex) -> Hello:
        try:
            async with asyncio.timeout(self._timing.peer_dead_s):
                hello = await duplex.read()
        except TimeoutError:
            raise Unavailable("no Hello came") from None
        if not isinstance(hello, Hello) or not hello.worker_id or not hello.incarnation:
            raise MalformedFrame("a Transfer stream starts with the Hello of a named worker")
        check_agreement(self._host.hello(), hello)
        return hello

    async def StoreSet(self, request: Any, context: Any) -> Any:
        """Leave a value in a link's map."""

        async def do() -> Any:
            self._host.rendezvous.set(request.link, request.key, request.value)
            return transfer_pb2.StoreSetResponse()

        return await _answer(context, do)

    async def StoreGet(self, request: Any, context: Any) -> Any:
        """A value of a link's map; waits off the event loop, for a second at most."""

        async def do() -> Any:
            store = self._host.rendezvous
            value = store.get(request.link, request.key, 0.0)
            wait_s = min(request.timeout_s, _STORE_WAIT_S)
            if value is None and wait_s > 0:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(
                    self._waits, store.get, request.link, request.key, wait_s
                )
            return transfer_pb2.StoreGetResponse(value=value)

        return await _answer(context, do)

    async def StoreCheck(self, request: Any, context: Any) -> Any:
        """Whether all keys of a link's map are there."""

        async def do() -> Any:
            present = self._host.rendezvous.check(request.link, tuple(request.keys))
            return transfer_pb2.StoreCheckResponse(present=present)

        return await _answer(context, do)

    async def StoreDelete(self, request: Any, context: Any) -> Any:
        """Remove a value of a link's map."""

        async def do() -> Any:
            deleted = self._host.rendezvous.delete(request.link, request.key)
            return transfer_pb2.StoreDeleteResponse(deleted=deleted)

        return await _answer(context, do)

    def close(self) -> None:
        """Let the waiting threads go."""
        self._waits.shutdown(wait=False, cancel_futures=True)


async def _answer(context: Any, do: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await do()
    except TandemError as error:
        await abort_with(context, error)


def _opened(frame: Any) -> TicketId | None:
    """The ticket that a malformed frame wanted to open, if it says so much."""
    if frame is None or frame.WhichOneof("message") != "open":
        return None
    found = frame.open.ticket.id
    return TicketId(found.request_id, found.attempt) if found.request_id else None


def _metadata(context: Any, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""


class WorkerServer:
    """A worker's gRPC server: Session, Transfer, health, reflection, behind the cluster's token.

    Life, on the worker's event loop: construct -> ``bind`` -> ``start`` -> ``set_serving`` as the
    worker's own health changes -> ``stop``.
    """

    def __init__(self, host: Host, *, secret: str, timing: TimingConfig) -> None:
        self.wire = WireServer(
            secret=secret,
            timing=timing,
            on_refused=lambda cause: host.count("frames_refused", cause),
        )
        self.sessions = SessionService(host, timing)
        self.transfers = TransferService(host, timing)
        session_pb2_grpc.add_SessionServicer_to_server(self.sessions, self.wire.grpc)
        transfer_pb2_grpc.add_TransferServicer_to_server(self.transfers, self.wire.grpc)

    def bind(self, address: str) -> int:
        """Listen; returns the port. Raises ``ConfigError`` naming the address."""
        return self.wire.bind(address)

    async def start(self, *, serving: bool = True) -> None:
        """Serve from now on."""
        await self.wire.start(SERVICES, serving=serving)

    async def set_serving(self, serving: bool) -> None:
        """What the health service says of the whole worker."""
        await self.wire.set_serving(dict.fromkeys(("", *SERVICES), serving))

    async def stop(self, cause: str = "the worker is stopping") -> None:
        """End every stream with ``cause``, then the server."""
        await self.sessions.streams.end_all(Unavailable(cause))
        await self.transfers.streams.end_all(Unavailable(cause))
        await self.wire.stop()
        self.transfers.close()

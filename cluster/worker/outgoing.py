"""Transfer streams that this worker opens, one per receiving worker, each with its link.

This file owns the rule that an outgoing stream and its link share one life: when either ends the
other is ended, and a new pair is made only when the old link is over, so that a late
``LinkBroken`` is never taken for the new link's. A stream's end reaches the role as ``PeerLost``,
exactly once. It must never decide about tickets and never block: dialling runs on the event loop,
connecting a link on the link's own thread.

Life of a pair:
 1. the first ``ToReceiver``, or ``warm``: an entry; messages queue in it;
 2. dialled, Hello answered by the right incarnation, link opened, queue flushed;
 3. the stream or the link ends: ``PeerLost`` at once, ``LinkBroken`` when nothing touches a page;
 4. the next ``ToReceiver`` starts at 1 (and dials when the old link is over).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.worker.loop import RoleHost
from kv_transfer.links import Links
from kv_transfer.rendezvous import Rendezvous
from kv_transfer.transport import LinkName
from protocol.errors import InternalError, TandemError, Unavailable
from protocol.events import FromPeer, LinkBroken, PeerLost
from protocol.messages import Hello, ReceiverToSender, SenderToReceiver, TransferHeartbeat
from protocol.types import Peer

_log = logging.getLogger(__name__)


def link_name(sender: Hello, receiver: Hello) -> LinkName:
    """The link that belongs to a stream: both sides derive the same name from the two Hellos."""
    return LinkName(
        sender.worker_id,
        sender.incarnation,
        receiver.worker_id,
        receiver.incarnation,
        sender.link_epoch,
    )


class TransferStream(Protocol):
    """One outgoing Transfer stream (``protocol.wire.clients.TransferClient``)."""

    async def connect(self) -> Hello: ...

    def send_nowait(self, message: SenderToReceiver) -> None: ...

    def messages(self) -> AsyncIterator[ReceiverToSender]: ...

    async def close(self) -> None: ...


class RemoteStore(Rendezvous, Protocol):
    """The receiver's rendezvous map of one link (``protocol.wire.clients.StoreClient``)."""

    def close(self) -> None: ...


class Dialler(Protocol):
    """Makes the clients of one worker's outgoing pairs. Neither call connects."""

    def stream(self, peer: Peer, hello: Hello) -> TransferStream: ...

    def store(self, peer: Peer, link: str) -> RemoteStore: ...


@dataclass(eq=False)
class _Outgoing:
    peer: Peer
    queue: deque[SenderToReceiver] = field(default_factory=deque)
    stream: TransferStream | None = None  # set once up: messages go straight there
    up: asyncio.Event = field(default_factory=asyncio.Event)  # up, or over
    error: TandemError | None = None  # set once over
    task: asyncio.Task[None] | None = None


class OutgoingPeers:
    """Streams that this worker opens, one per receiving worker.

    ``hello(epoch)`` is what this worker says first. ``link_over_s`` bounds the wait for the end
    of an old link. All tables are guarded by the role's lock.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        host: RoleHost,
        links: Links,
        hello: Callable[[int], Hello],
        dialler: Dialler,
        heartbeat_s: float,
        link_over_s: float,
    ) -> None:
        self._loop = loop
        self._host = host
        self._links = links
        self._hello = hello
        self._dialler = dialler
        self._heartbeat_s = heartbeat_s
        self._link_over_s = link_over_s
        self._entries: dict[str, _Outgoing] = {}
        self._epochs = itertools.count(1)
        self._link_over = asyncio.Event()  # raised at every end of an outgoing link
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def __len__(self) -> int:
        return len(self._entries)

    def send(self, peer: Peer, message: SenderToReceiver) -> None:
        """Queue a message, dialling if need be. Under the role's lock, any thread."""
        entry = self._entry(peer)
        if entry is None:
            return
        if entry.stream is None:
            entry.queue.append(message)
        else:
            entry.stream.send_nowait(message)

    def meet(self, peer: Peer) -> None:
        """A ticket names this receiver: an older incarnation's stream is void from here on.

        Called before the role sees the ticket, so that ``PeerLost`` hits old tickets only.
        """
        with self._host.lock:
            entry = self._entries.get(peer.worker_id)
            if entry is not None and entry.peer.incarnation != peer.incarnation:
                self._end(entry, Unavailable(f"worker {peer.worker_id} was restarted"))

    async def warm(self, peers: Iterable[Peer]) -> None:
        """Have streams and links to these before a request needs them. On the event loop.

        Raises the first failure, after every peer has been tried.
        """
        entries = []
        with self._host.lock:
            for peer in peers:
                self.meet(peer)
                if (entry := self._entry(peer)) is not None:
                    entries.append(entry)
        for entry in entries:
            await entry.up.wait()
        for entry in entries:
            if entry.error is not None:
                raise entry.error

    def on_link_broken(self, event: LinkBroken) -> None:
        """An outgoing link is over: the role hears it, the stream ends too. Any thread."""
        with self._host.lock:
            self._links.forget(event.worker_id, outgoing=True)
            self._host.submit(event)
            entry = self._entries.get(event.worker_id)
            if entry is not None and entry.stream is not None:
                self._end(entry, event.error.to_error())
        self._loop.call_soon_threadsafe(self._link_over.set)

    async def close(self) -> None:
        """End every stream. On the event loop."""
        with self._host.lock:
            self._stopping = True
            for entry in list(self._entries.values()):
                self._end(entry, Unavailable("this worker is stopping"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._link_over_s)

    def _entry(self, peer: Peer) -> _Outgoing | None:
        entry = self._entries.get(peer.worker_id)
        if entry is not None and entry.peer.incarnation == peer.incarnation:
            return entry
        if entry is not None:
            self._end(entry, Unavailable(f"worker {peer.worker_id} was restarted"))
        if self._stopping:
            return None
        entry = self._entries[peer.worker_id] = _Outgoing(peer)
        self._loop.call_soon_threadsafe(self._start, entry)
        return entry

    def _start(self, entry: _Outgoing) -> None:
        if entry.error is not None:
            return
        entry.task = self._loop.create_task(self._run(entry), name=f"to {entry.peer.worker_id}")
        self._tasks.add(entry.task)
        entry.task.add_done_callback(self._tasks.discard)

    def _end(self, entry: _Outgoing, error: TandemError) -> None:
        """The stream is over; the role hears it once. Any thread; takes the role's lock."""
        with self._host.lock:
            if entry.error is not None:
                return
            entry.error = error
            entry.queue.clear()
            worker_id = entry.peer.worker_id
            if self._entries.get(worker_id) is entry:
                del self._entries[worker_id]
            had_link = entry.stream is not None
            self._host.submit(PeerLost(worker_id, error.info(), outgoing=True))
            if had_link:
                self._links.close(worker_id, outgoing=True, cause=error.message)
        _log.info("stream to %s ended: %s", worker_id, error.message)
        self._loop.call_soon_threadsafe(self._stop_task, entry)

    def _stop_task(self, entry: _Outgoing) -> None:
        entry.up.set()
        if entry.task is not None:
            entry.task.cancel()

    async def _run(self, entry: _Outgoing) -> None:
        peer, hello = entry.peer, self._hello(next(self._epochs))
        error: TandemError = Unavailable(f"worker {peer.worker_id} ended the stream")
        stream: TransferStream | None = None
        store: RemoteStore | None = None
        heartbeats: asyncio.Task[None] | None = None
        try:
            await self._wait_link_over(peer.worker_id)
            stream = self._dialler.stream(peer, hello)
            name = link_name(hello, await stream.connect())
            store = self._dialler.store(peer, name.key)
            self._come_up(entry, stream, store, name)
            heartbeats = self._loop.create_task(self._beat(stream))
            async for message in stream.messages():
                self._host.submit(FromPeer(peer.worker_id, message))
        except TandemError as failure:
            error = failure
        except Exception as failure:
            _log.exception("stream to %s: unexpected failure", peer.worker_id)
            error = InternalError(f"stream to {peer.worker_id}: {type(failure).__name__}")
        finally:
            entry.task = None  # from here on nobody may cancel: the stream is to be given back
            self._end(entry, error)
            if heartbeats is not None:
                heartbeats.cancel()
            if stream is not None:
                await stream.close()
            if store is not None:
                store.close()

    def _come_up(
        self, entry: _Outgoing, stream: TransferStream, store: RemoteStore, name: LinkName
    ) -> None:
        """Open the link and let the queue go, as one act: a Grant finds its link there."""
        with self._host.lock:
            if entry.error is not None:
                raise entry.error
            self._links.open(name, outgoing=True, rendezvous=store)
            entry.stream = stream
            while entry.queue:
                stream.send_nowait(entry.queue.popleft())
        entry.up.set()

    async def _beat(self, stream: TransferStream) -> None:
        """The receiver hears from this worker also while no ticket is between the two."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            stream.send_nowait(TransferHeartbeat())

    async def _wait_link_over(self, worker_id: str) -> None:
        deadline = self._loop.time() + self._link_over_s
        while self._links.get(worker_id, outgoing=True) is not None:
            self._link_over.clear()
            if self._links.get(worker_id, outgoing=True) is None:
                break
            try:
                await asyncio.wait_for(self._link_over.wait(), deadline - self._loop.time())
            except TimeoutError:
                raise Unavailable(f"the old link to {worker_id} does not end") from None

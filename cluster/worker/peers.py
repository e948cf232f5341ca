"""Transfer streams that others opened to this worker, each with the link it receives on.

This file owns the incoming half of the rule in ``outgoing.py``: a stream and its link share one
life, and there is one link per sending worker at a time. It must never decide about tickets.

Life of a pair: ``attach`` (both sides have agreed) -> link opened, at once or when the old one is
over; until then this stream's messages are held back, so that none meets the old link ->
``detach``, which closes the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.worker.host import EndStream, SendToPeer
from cluster.worker.loop import RoleHost
from cluster.worker.outgoing import OutgoingPeers, link_name
from kv_transfer.links import Links
from kv_transfer.page_link import LinkEvent
from kv_transfer.rendezvous import Rendezvous, RendezvousMap
from kv_transfer.transport import LinkName
from protocol.events import FromPeer, LinkBroken
from protocol.messages import Hello, ReceiverToSender
from protocol.wire.telemetry import Telemetry


@dataclass(eq=False)
class _Incoming:
    hello: Hello
    send: SendToPeer
    end: EndStream
    name: LinkName
    rendezvous: Rendezvous
    held: list[FromPeer] | None = None  # not None: waits for the old link's end


class IncomingPeers:
    """Streams that others opened to this worker. Tables are guarded by the role's lock."""

    def __init__(
        self,
        *,
        host: RoleHost,
        links: Links,
        rendezvous: RendezvousMap,
        hello: Callable[[int], Hello],
        telemetry: Telemetry,
    ) -> None:
        self._host = host
        self._links = links
        self._rendezvous = rendezvous
        self._hello = hello
        self._telemetry = telemetry
        self._entries: dict[str, _Incoming] = {}
        self._opened: dict[str, str] = {}  # worker id -> rendezvous key of its live link

    def __len__(self) -> int:
        return len(self._entries)

    def attach(self, hello: Hello, send: SendToPeer, end: EndStream) -> None:
        """A sending worker's stream is up; its link is opened, or waits for the old one's end.

        The sender may leave its address at once: its map is open in both cases.
        """
        with self._host.lock:
            name = link_name(hello, self._hello(0))
            entry = _Incoming(hello, send, end, name, self._rendezvous.open(name.key))
            self._entries[hello.worker_id] = entry
            if self._links.get(hello.worker_id, outgoing=False) is None:
                self._open(entry)
            else:
                entry.held = []

    def detach(self, worker_id: str) -> None:
        """That stream is over; its link ends with it."""
        with self._host.lock:
            entry = self._entries.pop(worker_id, None)
            if entry is not None and entry.held is None:
                self._links.close(worker_id, outgoing=False, cause="the stream has ended")
            elif entry is not None:
                self._rendezvous.close(entry.name.key)

    def send(self, worker_id: str, message: ReceiverToSender) -> None:
        """Answer a sending worker, if its stream is still there. Under the role's lock."""
        entry = self._entries.get(worker_id)
        if entry is None:
            self._telemetry.count("messages_dropped", type(message).__name__)
        else:
            entry.send(message)

    def take(self, event: FromPeer) -> None:
        """A message of a sending worker: to the role, or held back until the link is new."""
        with self._host.lock:
            entry = self._entries.get(event.worker_id)
            if entry is not None and entry.held is not None:
                entry.held.append(event)
            else:
                self._host.submit(event)

    def on_link_broken(self, event: LinkBroken) -> None:
        """An incoming link is over: so is its stream; a newer stream gets its link now."""
        with self._host.lock:
            self._links.forget(event.worker_id, outgoing=False)
            key = self._opened.pop(event.worker_id, None)
            if key is not None:
                self._rendezvous.close(key)
            self._host.submit(event)
            entry = self._entries.get(event.worker_id)
            if entry is None:
                return
            if entry.held is None:
                if key == entry.name.key:
                    entry.end(event.error.to_error())
            else:
                held, entry.held = entry.held, None
                self._open(entry)
                for message in held:
                    self._host.submit(message)

    def _open(self, entry: _Incoming) -> None:
        self._opened[entry.hello.worker_id] = entry.name.key
        self._links.open(entry.name, outgoing=False, rendezvous=entry.rendezvous)


def route_link_event(
    event: LinkEvent, host: RoleHost, outgoing: OutgoingPeers, incoming: IncomingPeers
) -> None:
    """What a link's thread reports: ends go through the peers, all else straight to the role."""
    if not isinstance(event, LinkBroken):
        host.submit(event)
    elif event.outgoing:
        outgoing.on_link_broken(event)
    else:
        incoming.on_link_broken(event)

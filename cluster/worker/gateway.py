"""The worker's runtime as its gRPC service sees it: ``host.Host`` over role, routers and peers.

This file owns which way an event takes to the role: tickets first void what is known of older
incarnations, a sending worker's messages may have to wait for their link, everything else goes
straight in. It must never block and never decide about tickets.

Life: made by ``process.py`` when the role's host and the peers are there; used by the service
until its last stream has ended.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.worker.effects import Routers
from cluster.worker.host import EndStream, SendToPeer, SendToRouter
from cluster.worker.loop import RoleHost
from cluster.worker.outgoing import OutgoingPeers
from cluster.worker.peers import IncomingPeers
from kv_transfer.rendezvous import RendezvousMap
from protocol.events import Event, FromPeer, FromRouter
from protocol.messages import Hello, Open
from protocol.types import WorkerLoad
from protocol.wire.telemetry import Telemetry


class Gateway:
    """See ``cluster.worker.host.Host`` for the contract of every method."""

    def __init__(
        self,
        *,
        worker_id: str,
        role_host: RoleHost,
        routers: Routers,
        outgoing: OutgoingPeers,
        incoming: IncomingPeers,
        rendezvous: RendezvousMap,
        hello: Callable[[], Hello],
        telemetry: Telemetry,
    ) -> None:
        self._worker_id = worker_id
        self._role_host = role_host
        self._routers = routers
        self._outgoing = outgoing
        self._incoming = incoming
        self._rendezvous = rendezvous
        self._hello = hello
        self._telemetry = telemetry

    @property
    def rendezvous(self) -> RendezvousMap:
        """Where peers leave the addresses of their data links."""
        return self._rendezvous

    def submit(self, event: Event) -> None:
        """Hand one event to the role, by its way."""
        match event:
            case FromPeer():
                self._incoming.take(event)
            case FromRouter(_, Open(ticket)) if ticket.receiver.worker_id != self._worker_id:
                with self._role_host.lock:  # nothing may come between the two
                    self._outgoing.meet(ticket.receiver)
                    self._role_host.submit(event)
            case _:
                self._role_host.submit(event)

    def hello(self) -> Hello:
        """Who this worker is and what a peer must agree with."""
        return self._hello()

    def load(self) -> WorkerLoad:
        """What the next heartbeat says."""
        return self._role_host.load()

    def count(self, metric: str, label: str = "", amount: float = 1) -> None:
        """Raise a counter."""
        self._telemetry.count(metric, label, amount)

    def attach_router(self, router_id: str, send: SendToRouter) -> None:
        """A router's Session is up."""
        with self._role_host.lock:
            self._routers.attach(router_id, send)

    def detach_router(self, router_id: str) -> None:
        """That Session is over."""
        with self._role_host.lock:
            self._routers.detach(router_id)

    def attach_peer(self, hello: Hello, send: SendToPeer, end: EndStream) -> None:
        """A sending worker's Transfer stream is up."""
        self._incoming.attach(hello, send, end)

    def detach_peer(self, worker_id: str) -> None:
        """That Transfer stream is over."""
        self._incoming.detach(worker_id)

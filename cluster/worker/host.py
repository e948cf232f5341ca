"""What a worker's gRPC service needs from the worker's runtime: the seam between the two.

Owns no state. The service (``service.py``) decodes frames, the host (``loop.py``) owns the role
and its lock. Every method may be called on the event loop, so none may block for longer than the
role's lock is held.

Life of a stream, as the host sees it:
 1. ``attach_router`` / ``attach_peer``: from now on ``send`` reaches it. ``send`` never blocks,
    may be called from any thread and under the role's lock, and keeps the order of its calls.
 2. ``submit(FromRouter | FromPeer)`` for every message, in order.
 3. ``detach_router`` / ``detach_peer``, then exactly one ``submit(RouterLost | PeerLost)``; none
    of the stream's messages follows. A newer stream of the same router or peer goes through 3
    for the old one before its own 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from protocol.errors import TandemError
from protocol.events import Event
from protocol.messages import Hello, ReceiverToSender, WorkerToRouter
from protocol.types import WorkerLoad

SendToRouter = Callable[[WorkerToRouter], None]
SendToPeer = Callable[[ReceiverToSender], None]
EndStream = Callable[[TandemError], None]


class RendezvousMap(Protocol):
    """The receiver's key-value maps, one per link (``kv_transfer.rendezvous.RendezvousMap``).

    Every method raises ``WrongState`` when the link is not open. ``get`` blocks for at most
    ``timeout_s`` and answers None when the key did not come.
    """

    def set(self, link: str, key: str, value: bytes) -> None: ...

    def get(self, link: str, key: str, timeout_s: float) -> bytes | None: ...

    def check(self, link: str, keys: Sequence[str]) -> bool: ...

    def delete(self, link: str, key: str) -> bool: ...


class Host(Protocol):
    """The runtime of one worker process, as its gRPC service sees it."""

    @property
    def rendezvous(self) -> RendezvousMap:
        """Where peers leave the addresses of their data links."""
        ...

    def submit(self, event: Event) -> None:
        """Hand one event to the role and carry out its effects."""
        ...

    def hello(self) -> Hello:
        """Who this worker is and what a peer must agree with."""
        ...

    def load(self) -> WorkerLoad:
        """What the next heartbeat says."""
        ...

    def count(self, metric: str, label: str = "", amount: float = 1) -> None:
        """Raise a counter of ``protocol.wire.telemetry``."""
        ...

    def attach_router(self, router_id: str, send: SendToRouter) -> None:
        """A router's Session is up."""
        ...

    def detach_router(self, router_id: str) -> None:
        """That Session is over; its ``send`` drops what it is given."""
        ...

    def attach_peer(self, hello: Hello, send: SendToPeer, end: EndStream) -> None:
        """A sending worker's Transfer stream is up and both sides agree.

        ``end`` ends it from any thread; 3 of its life follows.
        """
        ...

    def detach_peer(self, worker_id: str) -> None:
        """That Transfer stream is over."""
        ...

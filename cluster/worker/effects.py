"""Where a role's effects go: router sessions, peer streams, links, counters.

This file owns the table of attached routers. Every effect is a
non-blocking enqueue, carried out in the order the role gave, under the role's lock: so an
Announce and the send that it announces keep one order. It must never decide anything: what has
no receiver any more is dropped (routers) or answered by the layer below (links).

Life of a router here: ``attach`` when its Session is up -> messages -> ``detach``; a message for
a router that is not attached is dropped and counted, as nobody reads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from protocol.events import (
    BreakLink,
    Count,
    Effect,
    ReceivePages,
    SendPages,
    ToReceiver,
    ToRouter,
    ToSender,
)
from protocol.messages import ReceiverToSender, SenderToReceiver, WorkerToRouter
from protocol.types import Peer
from protocol.wire.telemetry import Telemetry

_log = logging.getLogger(__name__)


class Receivers(Protocol):
    """The streams that this worker opened (``outgoing.OutgoingPeers``)."""

    def send(self, peer: Peer, message: SenderToReceiver) -> None: ...


class Senders(Protocol):
    """The streams that others opened to this worker (``peers.IncomingPeers``)."""

    def send(self, worker_id: str, message: ReceiverToSender) -> None: ...


class LinkTable(Protocol):
    """The links of this worker (``kv_transfer.links.Links``)."""

    def post(self, effect: SendPages | ReceivePages) -> None: ...

    def close(self, worker_id: str, *, outgoing: bool, cause: str) -> bool: ...


class Routers:
    """The attached routers. Called under the role's lock or on the event loop."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._sends: dict[str, Callable[[WorkerToRouter], None]] = {}

    def __len__(self) -> int:
        return len(self._sends)

    def attach(self, router_id: str, send: Callable[[WorkerToRouter], None]) -> None:
        """A router's Session is up."""
        self._sends[router_id] = send

    def detach(self, router_id: str) -> None:
        """That Session is over."""
        self._sends.pop(router_id, None)

    def send(self, router_id: str, message: WorkerToRouter) -> None:
        """Say something to a router, if it is still there."""
        send = self._sends.get(router_id)
        if send is None:
            self._telemetry.count("messages_dropped", type(message).__name__)
        else:
            send(message)


class Effects:
    """Carries out effects. ``on_bug`` hears of an effect that raised; the others go on."""

    def __init__(
        self,
        *,
        routers: Routers,
        receivers: Receivers,
        senders: Senders,
        links: LinkTable,
        telemetry: Telemetry,
        on_bug: Callable[[str], None],
    ) -> None:
        self._routers = routers
        self._receivers = receivers
        self._senders = senders
        self._links = links
        self._telemetry = telemetry
        self._on_bug = on_bug

    def __call__(self, effects: Sequence[Effect]) -> None:
        """Carry these out, in order. The caller holds the role's lock."""
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:
                _log.exception("effect %s raised", type(effect).__name__)
                self._on_bug(f"effect {type(effect).__name__} raised {type(error).__name__}")

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ToRouter(router_id, message):
                self._routers.send(router_id, message)
            case ToReceiver(peer, to_receiver):
                self._receivers.send(peer, to_receiver)
            case ToSender(worker_id, to_sender):
                self._senders.send(worker_id, to_sender)
            case SendPages() | ReceivePages():
                self._links.post(effect)
            case BreakLink(worker_id, outgoing, cause):
                self._links.close(worker_id, outgoing=outgoing, cause=cause)
            case Count(metric, label, amount):
                self._telemetry.count(metric, label, amount)

"""All links of one rank, by the worker at the other end and the direction.

This file owns the table of live links. It must never let two links of one direction to one
worker live at once: until the end of the old one has been handled, its ``LinkBroken`` would be
taken for that of the new one.

Life of an entry: ``open`` after both sides have agreed (Hello) -> ``post`` for every effect ->
``close``, or an error -> ``LinkBroken`` -> gone when that event has been handled (or earlier,
by ``forget`` within the handler). An effect for which no link is open is answered by
``LinkBroken`` too, from a thread as always.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from kv_transfer.page_link import LinkEvent, OnEvent, PageLink
from kv_transfer.pool import KvPool
from kv_transfer.rendezvous import Rendezvous
from kv_transfer.transport import Link, LinkError, LinkName, Transport
from protocol.errors import ConfigError, WrongState
from protocol.events import LinkBroken, ReceivePages, SendPages


class Links:
    """The table. Every method may be called from any thread and none but ``close_all`` blocks.

    ``on_event`` is called from the links' threads with the events of ``protocol.events``; it may
    take the runtime's lock, and may call ``post``, ``open``, ``close`` and ``forget``.
    ``generation_of`` is called from the links' threads without any lock. ``on_stuck`` gets a
    sentence when a link cannot be ended: its pages are never free again, and the process should
    report itself unhealthy and end.
    """

    def __init__(
        self,
        transport: Transport,
        pool: KvPool,
        *,
        generation_of: Callable[[int], int],
        on_event: OnEvent,
        op_timeout_s: float,
        connect_timeout_s: float | None = None,
        on_stuck: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        if pool.device.type not in transport.capabilities.devices:
            raise ConfigError(
                f"transport {transport.name} is for {', '.join(transport.capabilities.devices)}, "
                f"but the KV pool is on {pool.device.type}",
                field="kv.transport",
            )
        self.transport = transport
        self._pool = pool
        self._generation_of = generation_of
        self._on_event = on_event
        self._on_stuck = on_stuck
        self._op_timeout_s = op_timeout_s
        self._connect_timeout_s = connect_timeout_s or op_timeout_s
        self._lock = threading.Lock()
        self._links: dict[tuple[str, bool], PageLink] = {}
        self._ending: set[PageLink] = set()  # forgotten, but their threads may still run

    def open(self, name: LinkName, *, outgoing: bool, rendezvous: Rendezvous) -> PageLink:
        """Start a link; it connects on its own thread, and effects may be posted at once.

        Raises ``WrongState`` while an older one to the same worker is not over: close that, and
        try again when its ``LinkBroken`` has been handled.
        """
        return self._start(
            name,
            outgoing,
            lambda: self.transport.link(name, outgoing=outgoing, rendezvous=rendezvous),
        )

    def get(self, worker_id: str, *, outgoing: bool) -> PageLink | None:
        """The link to or from a worker, also while it is ending; None when there is none."""
        with self._lock:
            return self._links.get((worker_id, outgoing))

    def post(self, effect: SendPages | ReceivePages) -> None:
        """Queue an effect on its link."""
        outgoing = isinstance(effect, SendPages)
        link = self.get(effect.worker_id, outgoing=outgoing)
        if link is None:
            here, there = "this worker", effect.worker_id
            sender, receiver = (here, there) if outgoing else (there, here)
            link = self._start(LinkName(sender, "", receiver, "", 0), outgoing, _NoLink)
        if isinstance(effect, SendPages):
            link.post_send(effect)
        else:
            link.post_receive(effect)

    def close(self, worker_id: str, *, outgoing: bool, cause: str) -> bool:
        """Begin to end a link; whether there was one. ``LinkBroken`` follows."""
        link = self.get(worker_id, outgoing=outgoing)
        if link is not None:
            link.close(cause)
        return link is not None

    def forget(self, worker_id: str, *, outgoing: bool) -> None:
        """Make room for a new link; called first thing by whoever handles a ``LinkBroken``.

        Without this call the room is made when ``on_event`` returns.
        """
        with self._lock:
            link = self._links.pop((worker_id, outgoing), None)
            if link is not None:
                self._ending.add(link)

    def close_all(self, cause: str, timeout_s: float) -> bool:
        """End every link and wait for their threads; whether all of them ended in time."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            links = [*self._links.values(), *self._ending]
        for link in links:
            link.close(cause)
        # A list, not a generator: every thread is waited for, also after one that hangs.
        return all([link.join(max(0.0, deadline - time.monotonic())) for link in links])

    def threads(self) -> int:
        """Links whose thread still runs, for leak checks."""
        with self._lock:
            return sum(link.alive for link in (*self._links.values(), *self._ending))

    def _start(self, name: LinkName, outgoing: bool, make: Callable[[], Link]) -> PageLink:
        worker_id = name.receiver if outgoing else name.sender
        with self._lock:
            old = self._links.get((worker_id, outgoing))
            if old is not None:
                raise WrongState(f"link {old.name} is not over yet")
            self._ending = {link for link in self._ending if link.alive}
            link = PageLink(
                name,
                outgoing=outgoing,
                link=make(),
                capabilities=self.transport.capabilities,
                pool=self._pool,
                generation_of=self._generation_of,
                on_event=lambda event: self._pass_on(link, event),
                on_stuck=self._on_stuck,
                op_timeout_s=self._op_timeout_s,
                connect_timeout_s=self._connect_timeout_s,
            )
            self._links[worker_id, outgoing] = link
        link.start()
        return link

    def _pass_on(self, link: PageLink, event: LinkEvent) -> None:
        try:
            self._on_event(event)
        finally:
            if isinstance(event, LinkBroken):
                with self._lock:
                    if self._links.get((link.worker_id, link.outgoing)) is link:
                        del self._links[link.worker_id, link.outgoing]
                        self._ending.add(link)


class _NoLink:
    """What an effect finds when no link is open."""

    def connect(self, timeout_s: float) -> NoReturn:
        raise LinkError("not connected")

    def send(self, buffers: Sequence[torch.Tensor]) -> NoReturn:
        raise LinkError("not connected")

    def receive(self, buffers: Sequence[torch.Tensor]) -> NoReturn:
        raise LinkError("not connected")

    def abort(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to give back."""

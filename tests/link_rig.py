"""Two ends of a link for tests: pools with known bytes, events that can be waited for.

Used by the tests of links in one process and by the peer process of the p2p tests.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from kv_transfer.links import Links
from kv_transfer.page_link import LinkEvent
from kv_transfer.pool import KvPool
from kv_transfer.rendezvous import RendezvousMap
from kv_transfer.transport import LinkName, Transport
from protocol.events import LinkBroken, ReceivePages, SendPages
from protocol.types import KvGeometry, PageRef, TicketId

TICKET = TicketId("request", 1)
SMALL = KvGeometry(layers=2, kv_heads=1, head_dim=8, page_size=4, dtype="float32")  # 512 bytes
LARGE = KvGeometry(layers=16, kv_heads=2, head_dim=64, page_size=16, dtype="float32")  # 256 KiB


class Side:
    """One rank: a pool, its links, the generations it believes in, and the events it saw."""

    def __init__(
        self, transport: Transport, geometry: KvGeometry, pages: int, op_timeout_s: float = 10.0
    ) -> None:
        self.pool = KvPool(geometry, pages)
        self.generations = [0] * pages
        self.events: queue.Queue[LinkEvent] = queue.Queue()
        self.links = Links(
            transport,
            self.pool,
            generation_of=self.generations.__getitem__,
            on_event=self.events.put,
            op_timeout_s=op_timeout_s,
        )

    def fill(self, seed: int) -> None:
        """Random bytes in every page."""
        generator = torch.Generator().manual_seed(seed)
        self.pool.rows.random_(0, 256, generator=generator)

    def send(self, segment: int, pages: Sequence[int], to: str = "receiver") -> None:
        """Post a send under the present generations."""
        self.links.post(SendPages(to, TICKET, segment, self.refs(pages)))

    def receive(self, segment: int, pages: Sequence[int], *, sink: bool = False) -> None:
        """Post the receive that fits ``send`` of as many pages."""
        n_bytes = len(pages) * self.pool.geometry.page_bytes
        refs = None if sink else self.refs(pages)
        self.links.post(ReceivePages("sender", TICKET, segment, n_bytes, refs))

    def refs(self, pages: Sequence[int]) -> tuple[PageRef, ...]:
        """The pages with their present generations."""
        return tuple(PageRef(page, self.generations[page]) for page in pages)

    def next(self, timeout_s: float = 20.0) -> LinkEvent:
        """The next event; fails the test when none comes."""
        return self.events.get(timeout=timeout_s)

    def broken(self, timeout_s: float = 20.0) -> LinkBroken:
        """The next event, which must be the link's end, and no other after it."""
        event = self.next(timeout_s)
        assert isinstance(event, LinkBroken), event
        return event


def link_name(epoch: int = 0) -> LinkName:
    """The name of the link between the two sides."""
    return LinkName("sender", "s1", "receiver", "r1", epoch)


def open_both(sender: Side, receiver: Side, rendezvous: RendezvousMap, epoch: int = 0) -> None:
    """Open both ends in this process."""
    name = link_name(epoch)
    local = rendezvous.open(name.key)
    receiver.links.open(name, outgoing=False, rendezvous=local)
    sender.links.open(name, outgoing=True, rendezvous=local)


def page_sets(seed: int, segments: int, pages: int, most: int) -> list[tuple[list[int], list[int]]]:
    """For every segment the pages it leaves from and those it arrives in, all distinct there."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, most) for _ in range(segments)]
    assert sum(sizes) <= pages
    sources, targets = list(range(pages)), list(range(pages))
    draw.shuffle(sources)
    draw.shuffle(targets)
    sets = []
    for size in sizes:
        sets.append(([sources.pop() for _ in range(size)], [targets.pop() for _ in range(size)]))
    return sets


class TcpRendezvous:
    """A rendezvous between two test processes over torch's own TCPStore."""

    def __init__(self, port: int, *, serve: bool) -> None:
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            is_master=serve,
            wait_for_workers=False,
            timeout=timedelta(seconds=20),
        )
        self.port = self._store.port

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes are taken too

    def get(self, key: str, timeout_s: float) -> bytes | None:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            return None
        return self._store.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def delete(self, key: str) -> bool:
        return self._store.delete_key(key)

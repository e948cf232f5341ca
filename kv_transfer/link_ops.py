"""Link operations of one direction that were started and have not ended.

This file owns the answer to one question: may these pages be freed? It knows which ticket's
pages a link may still touch, which sinks it still drains, and which link has not moved for too
long. It never starts an operation itself; the role says ``started`` when it emits ``SendPages``
or ``ReceivePages``.

Life of an operation: ``started`` -> ``ended`` (the link's report) or ``broken`` (the link closed,
and with it everything queued on it). A second report of the same operation is unknown: ``ended``
says so, and the role counts it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protocol.types import TicketId


@dataclass(slots=True)
class _Link:
    moved_at: float
    ops: dict[tuple[TicketId, int], deque[bool]] = field(default_factory=dict)  # True: pages
    told: bool = False  # that it is overdue


class LinkOps:
    """Outstanding operations per peer. A link finishes operations of one key in their order."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._touching: dict[TicketId, int] = {}

    def started(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> None:
        """An operation on this ticket's pages joined the link's queue."""
        self._start(worker_id, ticket_id, segment, now, True)
        self._touching[ticket_id] = self._touching.get(ticket_id, 0) + 1

    def started_sink(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> None:
        """A receive into a sink joined the link's queue; it touches no pages."""
        self._start(worker_id, ticket_id, segment, now, False)

    def ended(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> bool | None:
        """True: an operation on pages ended. False: a sink. None: no such operation is known."""
        link = self._links.get(worker_id)
        kinds = link.ops.get((ticket_id, segment)) if link else None
        if link is None or not kinds:
            return None
        pages = kinds.popleft()
        if not kinds:
            del link.ops[ticket_id, segment]
        link.moved_at = now
        if not link.ops:
            del self._links[worker_id]
        if pages:
            self._leave(ticket_id)
        return pages

    def broken(self, worker_id: str) -> list[TicketId]:
        """The link closed: everything on it ended. Returns tickets whose pages it had touched."""
        link = self._links.pop(worker_id, None)
        hit: dict[TicketId, None] = {}
        for (ticket_id, _), kinds in (link.ops if link else {}).items():
            for pages in kinds:
                if pages:
                    hit[ticket_id] = None
                    self._leave(ticket_id)
        return list(hit)

    def touching(self, ticket_id: TicketId) -> int:
        """Operations that may still touch this ticket's pages."""
        return self._touching.get(ticket_id, 0)

    def busy_with(self, worker_id: str) -> bool:
        """Any operation outstanding on this peer's link?"""
        return worker_id in self._links

    def overdue(self, now: float, bound_s: float) -> list[str]:
        """Peers whose link has finished nothing for ``bound_s``; each is named once."""
        late = [w for w, k in self._links.items() if not k.told and now - k.moved_at > bound_s]
        for worker_id in late:
            self._links[worker_id].told = True
        return late

    def __len__(self) -> int:
        return sum(len(kinds) for link in self._links.values() for kinds in link.ops.values())

    def _start(
        self, worker_id: str, ticket_id: TicketId, segment: int, now: float, p: bool
    ) -> None:
        link = self._links.setdefault(worker_id, _Link(moved_at=now))
        link.ops.setdefault((ticket_id, segment), deque()).append(p)

    def _leave(self, ticket_id: TicketId) -> None:
        left = self._touching[ticket_id] - 1
        if left:
            self._touching[ticket_id] = left
        else:
            del self._touching[ticket_id]

"""Who owns which KV page: free list, credits, bindings and generations, without any memory.

This file owns the conservation law of a worker's pages: free = credited + available, and
free + bound = total. It never touches a tensor and never decides who gets pages. Everything that
would break the law (a double release, a foreign reservation, more than is there) raises
``InternalError`` at once; nothing is repaired in silence.

Life of a page:
 1. free, and possibly covered by somebody's credit (a count, no page is named yet);
 2. bound under a reservation: its owner may write it, its generation stays the same;
 3. released: the generation is raised, so that whoever still holds a ``PageRef`` is refused,
    and the page goes to the back of the free list.

``generation`` may be read by link threads at any time: one list read, atomic under the GIL.
Everything else is called by the role, under the runtime's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.errors import InternalError
from protocol.types import PageRef, TicketId


@dataclass(slots=True, eq=False)
class Reservation:
    """A right to pages: ``credit`` of them not yet named, ``bound`` ones in sequence order.

    Only ``Pages`` changes it.
    """

    owner: TicketId
    credit: int
    bound: list[int] = field(default_factory=list)
    open: bool = True

    @property
    def pages(self) -> int:
        """All pages that this reservation covers."""
        return self.credit + len(self.bound)


class Pages:
    """The page accounts of one worker.

    ``page_size`` is in tokens.
    """

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise InternalError(f"a pool of {total} pages of {page_size} tokens cannot exist")
        self.total = total
        self.page_size = page_size
        self._free = deque(range(total))
        self._generations = [0] * total
        self._credited = 0
        self._open: dict[int, Reservation] = {}  # by id(): reservations compare by identity
        self._freed: dict[int, None] = {}  # freed and not bound since, oldest first

    @property
    def available(self) -> int:
        """Pages that a new reservation may cover."""
        return len(self._free) - self._credited

    @property
    def bound(self) -> int:
        """Pages that somebody owns."""
        return self.total - len(self._free)

    @property
    def credited(self) -> int:
        """Free pages that are promised to somebody."""
        return self._credited

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens`` positions."""
        return -(-n_tokens // self.page_size)

    def generation(self, page: int) -> int:
        """How often ``page`` has been freed. Safe from any thread."""
        return self._generations[page]

    def reserve(self, owner: TicketId, n_pages: int) -> Reservation:
        """A credit of ``n_pages``. ``InternalError`` if they are not available: ask first."""
        if n_pages < 1 or n_pages > self.available:
            raise InternalError(f"{owner} reserves {n_pages} pages of {self.available} available")
        reservation = Reservation(owner, n_pages)
        self._credited += n_pages
        self._open[id(reservation)] = reservation
        return reservation

    def bind(self, reservation: Reservation, n_pages: int) -> tuple[int, ...]:
        """Turn ``n_pages`` of a credit into named pages; they join the end of the sequence."""
        self._check_open(reservation)
        if n_pages < 0 or n_pages > reservation.credit:
            raise InternalError(
                f"{reservation.owner} binds {n_pages} pages of a credit of {reservation.credit}"
            )
        pages = tuple(self._free.popleft() for _ in range(n_pages))
        for page in pages:
            self._freed.pop(page, None)
        reservation.credit -= n_pages
        reservation.bound.extend(pages)
        self._credited -= n_pages
        return pages

    def refs(self, pages: Iterable[int]) -> tuple[PageRef, ...]:
        """These pages with the generations that they have now."""
        return tuple(PageRef(page, self._generations[page]) for page in pages)

    def are_current(self, refs: Iterable[PageRef]) -> bool:
        """No page of ``refs`` was freed since they were taken."""
        return all(self._generations[ref.page] == ref.generation for ref in refs)

    def release(self, reservation: Reservation) -> None:
        """End a reservation: the credit returns, bound pages are freed, generations rise."""
        self._check_open(reservation)
        del self._open[id(reservation)]
        reservation.open = False
        self._credited -= reservation.credit
        for page in reservation.bound:
            self._generations[page] += 1
            self._freed[page] = None
        self._free.extend(reservation.bound)
        reservation.credit = 0
        reservation.bound = []

    def take_freed(self) -> tuple[int, ...]:
        """Pages freed since the last call and still free. The debug mode poisons them.

        Call it under the runtime's lock and poison before letting the lock go.
        """
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def check_integrity(self) -> None:
        """Raise ``InternalError`` with the numbers if the conservation law does not hold."""
        credited = sum(r.credit for r in self._open.values())
        bound = [page for r in self._open.values() for page in r.bound]
        if credited != self._credited or credited > len(self._free):
            raise InternalError(
                f"pages: {credited} credited by reservations, {self._credited} by the account, "
                f"{len(self._free)} free"
            )
        if sorted([*self._free, *bound]) != list(range(self.total)):
            raise InternalError(
                f"pages: {len(self._free)} free + {len(bound)} bound, {self.total} in all, "
                f"{len({*self._free, *bound})} different"
            )

    def _check_open(self, reservation: Reservation) -> None:
        if self._open.get(id(reservation)) is not reservation:
            kind = "a foreign" if reservation.open else "an ended"
            raise InternalError(f"{reservation.owner} uses {kind} reservation of pages")

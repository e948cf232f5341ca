"""Who uses which KV page: free list, credits, references, generations, without any memory.

This file owns the conservation law of a worker's pages: free + cached + in use = total, where a
page is in use as often as reservations refer to it, and credits never exceed free + cached. It
never touches a tensor and never decides who gets pages. Everything that would break the law (a
double release, a foreign reservation, more than is there) raises ``InternalError`` at once;
nothing is repaired in silence.

Life of a page:
 1. free, and possibly covered by somebody's credit (a count, no page is named yet);
 2. bound under a reservation: its only owner may write it, its generation stays the same;
 3. published, once its content is final: it has a name (``protocol.page_hash``), is written no
    more, and others may ``match`` it and refer to it too, without a copy;
 4. released by the last who referred to it. Published: it is cached, with its generation, until
    somebody matches it or, least recently used first, its room is needed. Otherwise it is freed.
 5. freed or evicted: the generation is raised, so that whoever still holds a ``PageRef`` is
    refused.

``generation`` may be read by link threads at any time: one list read, atomic under the GIL.
Everything else is called by the role, under the runtime's lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv_transfer.prefix_cache import PrefixCache
from protocol.errors import InternalError
from protocol.types import PageRef, TicketId


@dataclass(slots=True, eq=False)
class Reservation:
    """A right to pages: ``credit`` of them not yet named, ``bound`` ones in sequence order.

    Only ``Pages`` changes it. Leading bound pages may be shared with others.
    """

    owner: TicketId
    credit: int
    bound: list[int] = field(default_factory=list)
    open: bool = True

    @property
    def pages(self) -> int:
        """All pages that this reservation covers, shared ones included."""
        return self.credit + len(self.bound)


class Pages:
    """The page accounts of one worker.

    ``page_size`` is in tokens. No operation costs more than O(1) per page it names.
    """

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise InternalError(f"a pool of {total} pages of {page_size} tokens cannot exist")
        self.total = total
        self.page_size = page_size
        self._free = deque(range(total))
        self._generations = [0] * total
        self._holders = [0] * total  # reservations that refer to a page
        self._references = 0  # the sum of that
        self._credited = 0
        self._cache = PrefixCache(total)
        self._open: dict[int, Reservation] = {}  # by id(): reservations compare by identity
        self._freed: dict[int, None] = {}  # freed and not bound since, oldest first

    # --- what there is ------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that a new reservation may cover: free or only cached, and not promised."""
        return len(self._free) + len(self._cache) - self._credited

    @property
    def bound(self) -> int:
        """Pages in use; a shared one counts once."""
        return self.total - len(self._free) - len(self._cache)

    @property
    def references(self) -> int:
        """Bound pages of all reservations together; a shared one counts for each."""
        return self._references

    @property
    def cached(self) -> int:
        """Published pages that nobody uses."""
        return len(self._cache)

    @property
    def credited(self) -> int:
        """Pages that are promised to somebody and not named yet."""
        return self._credited

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold ``n_tokens`` positions."""
        return -(-n_tokens // self.page_size)

    def generation(self, page: int) -> int:
        """How often ``page`` has been freed or evicted. Safe from any thread."""
        return self._generations[page]

    def refs(self, pages: Iterable[int]) -> tuple[PageRef, ...]:
        """These pages with the generations that they have now."""
        return tuple(PageRef(page, self._generations[page]) for page in pages)

    def are_current(self, refs: Iterable[PageRef]) -> bool:
        """No page of ``refs`` was freed or evicted since they were taken."""
        return all(self._generations[ref.page] == ref.generation for ref in refs)

    def holders(self, page: int) -> int:
        """How many reservations refer to this page."""
        return self._holders[page]

    def may_write(self, page: int) -> bool:
        """Exactly one reservation refers to this page, and its content is not published."""
        return self._holders[page] == 1 and self._cache.content(page) is None

    # --- rights -------------------------------------------------------------------------------

    def room_for(self, n_pages: int, shared: Sequence[int] = ()) -> bool:
        """Whether ``reserve`` with these arguments would succeed."""
        unused = sum(not self._holders[page] for page in shared)
        return n_pages + unused <= self.available

    def reserve(self, owner: TicketId, n_pages: int, shared: Sequence[int] = ()) -> Reservation:
        """A credit of ``n_pages`` beside references on ``shared``, which lead its bound pages.

        ``shared`` comes from ``match``. ``InternalError`` if there is no room: ask first.
        """
        unused = [page for page in shared if not self._holders[page]]
        if n_pages < (0 if shared else 1) or n_pages + len(unused) > self.available:
            raise InternalError(
                f"{owner} reserves {n_pages} pages beside {len(shared)} shared ones; "
                f"{self.available} are available"
            )
        if not self._cache.are_final(shared):
            raise InternalError(f"{owner} shares pages {shared}, not all of which are published")
        for page in unused:
            self._cache.wake(page)
        reservation = Reservation(owner, n_pages)
        self._credited += n_pages
        self._open[id(reservation)] = reservation
        self._refer(reservation, shared)
        return reservation

    def extend(self, reservation: Reservation, n_pages: int) -> None:
        """More credit. ``InternalError`` if the pages are not available: ask ``room_for``."""
        self._check_open(reservation)
        if n_pages < 0 or n_pages > self.available:
            raise InternalError(
                f"{reservation.owner} extends by {n_pages} pages of {self.available} available"
            )
        reservation.credit += n_pages
        self._credited += n_pages

    def fork(
        self, reservation: Reservation, owner: TicketId, n_shared: int, n_pages: int
    ) -> Reservation:
        """A second sequence with the same first ``n_shared`` bound pages, and credit of its own.

        The shared pages need not be published, but neither sequence may write them any more.
        ``InternalError`` if the pages are not available.
        """
        self._check_open(reservation)
        if not 0 <= n_shared <= len(reservation.bound):
            raise InternalError(
                f"{owner} shares {n_shared} pages of {reservation.owner}, which has bound "
                f"{len(reservation.bound)}"
            )
        if n_pages < 0 or n_pages > self.available:
            raise InternalError(f"{owner} forks with {n_pages} pages of {self.available} available")
        fork = Reservation(owner, n_pages)
        self._credited += n_pages
        self._open[id(fork)] = fork
        self._refer(fork, reservation.bound[:n_shared])
        return fork

    def bind(self, reservation: Reservation, n_pages: int) -> tuple[int, ...]:
        """Turn ``n_pages`` of a credit into named pages; they join the end of the sequence.

        Free pages first, then the cached ones that were not used for longest.
        """
        self._check_open(reservation)
        if n_pages < 0 or n_pages > reservation.credit:
            raise InternalError(
                f"{reservation.owner} binds {n_pages} pages of a credit of {reservation.credit}"
            )
        pages = tuple([self._take() for _ in range(n_pages)])
        reservation.credit -= n_pages
        self._credited -= n_pages
        self._refer(reservation, pages)
        return pages

    def release(self, reservation: Reservation) -> None:
        """End a reservation: credit and references return.

        What nobody else refers to is cached if it is published, else freed.
        """
        self._check_open(reservation)
        del self._open[id(reservation)]
        reservation.open = False
        self._credited -= reservation.credit
        self._references -= len(reservation.bound)
        freed: list[int] = []
        for page in reversed(reservation.bound):
            self._holders[page] -= 1
            self._cache.let_go(page)
            if self._holders[page] == 0 and not self._cache.rest(page):
                freed.append(page)
        for page in reversed(freed):
            self._generations[page] += 1
            self._freed[page] = None
            self._free.append(page)
        reservation.credit = 0
        reservation.bound = []

    # --- the prefix cache ---------------------------------------------------------------------

    def match(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """Pages that hold the longest published prefix of this chain; may be shared at once.

        No hash is asked for beyond the first one that is not there.
        """
        return self._cache.match(hashes)

    def publish(self, reservation: Reservation, hashes: Sequence[bytes], first: int = 0) -> None:
        """The bound pages from number ``first`` on are final and hold what ``hashes`` name.

        They are full, their content is known to be right, and all pages before them were
        published. A hash that names a page already keeps that page. Behind a page that was
        unpublished since, nothing is published any more.
        """
        self._check_open(reservation)
        bound = reservation.bound
        if first < 0 or first + len(hashes) > len(bound):
            raise InternalError(
                f"{reservation.owner} publishes pages {first} to {first + len(hashes)} of "
                f"{len(bound)} bound ones"
            )
        if first > 0 and self._cache.content(bound[first - 1]) is None:
            return
        for i, content in enumerate(hashes, first):
            self._cache.name(bound[i], content)

    def unpublish(self, reservation: Reservation) -> None:
        """What this sequence holds cannot be trusted: nobody finds any of its pages again.

        Who shares them already keeps them, and finds out in its own way.
        """
        self._check_open(reservation)
        for page in reservation.bound:
            self._cache.distrust(page)

    # --- checks -------------------------------------------------------------------------------

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
        held = Counter(page for r in self._open.values() for page in r.bound)
        room = len(self._free) + len(self._cache)
        if credited != self._credited or credited > room:
            raise InternalError(
                f"pages: {credited} credited by reservations, {self._credited} by the account, "
                f"{len(self._free)} free, {len(self._cache)} cached"
            )
        apart = [*self._free, *self._cache.resting(), *held]
        if sorted(apart) != list(range(self.total)):
            raise InternalError(
                f"pages: {len(self._free)} free + {len(self._cache)} cached + {len(held)} in use, "
                f"{self.total} in all, {len(set(apart))} different"
            )
        wrong = [p for p in range(self.total) if self._holders[p] != held[p]]
        if wrong or sum(held.values()) != self._references:
            raise InternalError(
                f"pages: reservations refer to {sum(held.values())} pages, the account says "
                f"{self._references}; the counts of pages {wrong} differ"
            )
        named_free = [p for p in self._free if self._cache.content(p) is not None]
        if named_free:
            raise InternalError(f"pages: {named_free} are free and published")
        self._cache.check_integrity()

    # --- the accounts -------------------------------------------------------------------------

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
            self._freed.pop(page, None)
            return page
        page = self._cache.evict()
        self._generations[page] += 1
        return page

    def _refer(self, reservation: Reservation, pages: Sequence[int]) -> None:
        holders = self._holders
        for page in pages:
            holders[page] += 1
        self._references += len(pages)
        reservation.bound.extend(pages)

    def _check_open(self, reservation: Reservation) -> None:
        if self._open.get(id(reservation)) is not reservation:
            kind = "a foreign" if reservation.open else "an ended"
            raise InternalError(f"{reservation.owner} uses {kind} reservation of pages")

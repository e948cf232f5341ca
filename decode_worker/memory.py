"""The pages of a decode worker's sequences: places, growth, sharing, host memory.

This file owns how much an admission leaves free and every change of a sequence's reservation. It
must never let go of pages that the running step touches (``in_step``), and it decides about no
order: who is placed and who is preempted is asked elsewhere.

Life of a sequence's pages:
 1. ``fits`` and ``place``: what the prefix cache holds is shared, the rest of its tokens' pages
    are a credit. Beside them stays a *reserve*: room for the next ``reserve_tokens`` of every
    sequence that has a place.
 2. ``reach`` before every step: pages are bound as its tokens come to them, first from the
    credit, then one by one from the pool.
 3. ``publish`` after every step: a page that is full gets its name, and others may share it.
 4. ``fork``: a further choice shares the full pages and gets a copy of the last one.
 5. ``free``, or for a preempted one ``to_host`` and later ``from_host``.
"""

from __future__ import annotations

from collections.abc import Iterator

from decode_worker.host_pages import HostPages
from decode_worker.sequence import On, Sequence, State
from kv_transfer.pages import Pages
from protocol.errors import InternalError
from protocol.page_hash import matchable_pages
from protocol.role import RoleOptions
from protocol.step import CopyKind, PageCopy

NEVER = 1 << 60  # tokens


class Memory:
    """Pages, seats and host pages of all sequences of one worker."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self._size = pages.page_size
        self._names = bool(options.hash_root)  # pages may be published and found
        self.host = HostPages(options.host_pages)
        self._seated: dict[Sequence, None] = {}
        self.freed = False  # pages or seats came back since somebody last looked

    # --- what there is ------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that nobody uses and nobody was promised."""
        return self._pages.available

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._size

    @property
    def seats(self) -> int:
        """Sequences with a place, counting every choice that will need one."""
        return sum(len(seq.choices) for seq in self._seated)

    def seated(self) -> Iterator[Sequence]:
        """All sequences that have a place."""
        return iter(self._seated)

    def __str__(self) -> str:
        return (
            f"{self._pages.available} of {self._pages.total} pages are free, "
            f"{self.seats} of {self._options.max_num_seqs} sequences are taken"
        )

    def seat_free(self, n: int) -> bool:
        """``n`` more sequences may have a place."""
        return self.seats + n <= self._options.max_num_seqs

    def need(self, seq: Sequence) -> int:
        """Pages of the tokens that it has, and one for each further choice."""
        return self._pages.pages_for(len(seq.tokens)) + len(seq.choices) - 1

    # --- places -------------------------------------------------------------------------------

    def promised(self) -> int:
        """Pages that placed sequences may want for their next ``reserve_tokens``."""
        return sum(self._reserve(seq) for seq in self._seated)

    def fits(self, seq: Sequence, promised: int, held: int | None = None) -> bool:
        """There is room for its tokens beside what is promised.

        ``held``: exactly so many leading pages must be found here. A sequence that has the
        worker for itself needs no reserve.
        """
        beside = promised + self._reserve(seq) if self._seated else 0
        if held is None and self._pages.room_for(self.need(seq) + beside):
            return True  # whatever is found here can only make it less
        shared = self._match(seq, held)
        if held is not None and len(shared) != held:
            return False
        return self._pages.room_for(self.need(seq) - len(shared) + beside, shared)

    def place(self, seq: Sequence, event: On, held: int | None = None) -> int:
        """Give it its pages; how many leading ones were there already. Ask ``fits`` first."""
        shared = self._match(seq, held)
        owner = seq.leg.ticket.id
        credit = self._pages.pages_for(len(seq.tokens)) - len(shared)
        seq.reservation = self._pages.reserve(owner, credit, shared)
        if len(seq.choices) > 1:
            seq.forks = self._pages.reserve(owner, len(seq.choices) - 1)
        self._bound(seq)
        seq.computed = len(shared) * self._size
        self._published(seq, len(shared))
        seq.follow(event)
        self._seated[seq] = None
        return len(shared)

    def seat(self, seq: Sequence) -> None:
        """A choice that parted from another one takes a seat of its own."""
        self._seated[seq] = None

    def stand_up(self, seq: Sequence) -> None:
        """It needs no place any more; its pages go by ``free``."""
        if self._seated.pop(seq, self) is None:
            self.freed = True

    def free(self, seq: Sequence) -> None:
        """Let everything go that it has. Never while a step touches it."""
        if seq.in_step:
            raise InternalError(f"{seq.leg.ticket.id} is freed while a step touches it")
        self.stand_up(seq)
        for reservation in (seq.reservation, seq.forks):
            if reservation is not None:
                self._pages.release(reservation)
                self.freed = True
        seq.reservation = seq.forks = None
        seq.pages, seq.capacity = [], 0
        self.free_host(seq)

    # --- growth -------------------------------------------------------------------------------

    def reach(self, seq: Sequence, n_tokens: int) -> bool:
        """Have pages bound for the next ``n_tokens`` positions. False: the pool has too few."""
        reservation = seq.reservation
        if reservation is None:
            raise InternalError(f"{seq.leg.ticket.id} is computed without a reservation")
        missing = self._pages.pages_for(seq.computed + n_tokens) - len(seq.pages)
        if missing <= 0:
            return True
        if missing > reservation.credit:
            lacking = missing - reservation.credit
            if lacking > self._pages.available:
                return False
            self._pages.extend(reservation, lacking)
        self._pages.bind(reservation, missing)
        seq.capacity = len(seq.pages) * self._size
        return True

    def publish(self, seq: Sequence) -> None:
        """Name the pages that are full now."""
        if seq.computed < seq.publish_at:
            return
        full = seq.computed // self._size
        first = seq.publish_at // self._size - 1
        if seq.reservation is not None:
            self._pages.publish(seq.reservation, seq.chain.reach(seq.tokens, full, first), first)
            self._published(seq, full)

    def received(self, seq: Sequence, held: int) -> None:
        """All its tokens' KV has come and was found right; ``held`` pages were here before."""
        self._bound(seq)
        seq.computed = len(seq.tokens)
        self._published(seq, held)
        self.publish(seq)

    def distrust(self, seq: Sequence) -> None:
        """What it computed is not finite: nobody shall find its pages."""
        if seq.reservation is not None:
            self._pages.unpublish(seq.reservation)

    # --- forks --------------------------------------------------------------------------------

    def fork(self, parent: Sequence) -> tuple[list[Sequence], list[PageCopy], list[Sequence]]:
        """Give the choices that parted from ``parent`` its pages.

        Returns those that run now, the copies that must be made before they do, and those that
        found no room (or no parent any more).
        """
        waiting = [s for s in parent.leg.sequences if s.state is State.FORKING]
        if parent.forks is not None:
            self._pages.release(parent.forks)
            parent.forks = None
        ran: list[Sequence] = []
        copies: list[PageCopy] = []
        left: list[Sequence] = []
        for seq in waiting:
            seq.parent = None
            if parent.reservation is None or not self._pages.room_for(1):
                left.append(seq)
                continue
            full, rest = divmod(parent.computed, self._size)
            owner = seq.leg.ticket.id
            seq.reservation = self._pages.fork(parent.reservation, owner, full, 1)
            (own,) = self._pages.bind(seq.reservation, 1)
            if rest:
                copies.append(PageCopy(CopyKind.WITHIN, parent.pages[full], own))
            self._bound(seq)
            seq.computed = parent.computed
            self._published(seq, full)
            seq.follow(On.FORKED)
            ran.append(seq)
        return ran, copies, left

    # --- host memory --------------------------------------------------------------------------

    def to_host(self, seq: Sequence) -> list[PageCopy]:
        """Move it out: the copies of this step. Its pages go when the step has ended."""
        n_pages = self._pages.pages_for(seq.computed)
        seq.host = self.host.take(n_pages)
        return [
            PageCopy(CopyKind.TO_HOST, page, host)
            for page, host in zip(seq.pages[:n_pages], seq.host, strict=True)
        ]

    def from_host(self, seq: Sequence) -> list[PageCopy]:
        """Move it back: the copies of this step. Pages that the cache has are not copied.

        Its host pages go when the step has ended. Ask ``fits`` first.
        """
        computed = seq.computed
        n_found = self.place(seq, On.BACK)
        n_pages = self._pages.pages_for(computed)
        self.reach(seq, computed - seq.computed)
        seq.computed = computed
        return [
            PageCopy(CopyKind.FROM_HOST, host, page)
            for page, host in list(zip(seq.pages[:n_pages], seq.host, strict=True))[n_found:]
        ]

    def free_host(self, seq: Sequence) -> None:
        """It needs its host pages no more."""
        self.host.give_back(seq.host)
        seq.host = ()

    def check_integrity(self, sequences: Iterator[Sequence]) -> None:
        """Pages add up, and every reservation and host page belongs to one of ``sequences``."""
        self._pages.check_integrity()
        held = on_host = 0
        for seq in sequences:
            held += sum(r.pages for r in (seq.reservation, seq.forks) if r is not None)
            on_host += len(seq.host)
        account = self._pages.references + self._pages.credited
        if held != account:
            raise InternalError(f"decode: tickets hold {held} pages, {account} are in use")
        if on_host != self.host.taken:
            raise InternalError(f"decode: tickets hold {on_host} host pages of {self.host.taken}")

    # --- details ------------------------------------------------------------------------------

    def _match(self, seq: Sequence, held: int | None) -> tuple[int, ...]:
        n_tokens, leg = len(seq.tokens), seq.leg
        if not self._names:
            return ()
        if held is not None:
            most = held
        elif leg.transfer is not None and not leg.running:
            most = n_tokens // self._size  # the sender has computed them all
        elif leg.ticket.sampling.prompt_logprobs is not None and not leg.running:
            return ()  # every prompt position has to be computed
        else:
            most = matchable_pages(n_tokens, self._size)
        return self._pages.match(seq.chain.walk(seq.tokens, most))

    def _reserve(self, seq: Sequence) -> int:
        n_tokens = min(seq.remaining, self._options.reserve_tokens)
        return -(-n_tokens // self._size) * len(seq.choices)

    def _bound(self, seq: Sequence) -> None:
        if seq.reservation is not None:
            seq.pages = seq.reservation.bound
            seq.capacity = len(seq.pages) * self._size

    def _published(self, seq: Sequence, n_pages: int) -> None:
        seq.publish_at = (n_pages + 1) * self._size if self._names else NEVER

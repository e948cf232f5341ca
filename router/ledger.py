"""What this router has dispatched and what the workers reported: the basis of every choice.

This file owns the router's own accounting of pages, seats and prompt tokens per worker. It is
mutable, small and free of I/O. It must never wait for a report: what the router has just
dispatched counts at once, so ten requests in one millisecond do not all see the same idle worker.
It must never decide; ``router.policy`` reads it.

A report says what a worker held when it was sent; the router knows what it sent since. So:
 - pages in use = what the last report showed, less what has ended since, plus the prompts that were
   dispatched since. Only the worker knows how many pages its sequences share and how far they have
   grown; it keeps a queue of its own, so counting one too few for a moment is harmless;
 - prompt tokens not computed = the report's count, less what has ended since, plus the prompts
   that the report may not have seen yet (one is taken to be covered by the second report after
   its dispatch: counting a prompt twice for a moment is harmless, missing it is not).

Life of a worker's book: ``add_worker`` -> ``dispatch``/``release``/``report`` -> ``drop_worker``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.errors import InternalError
from protocol.types import Role, StageTiming, TicketId, WorkerInfo, WorkerLoad

REPORTS_TO_COVER = 2
FIRST_PREFILL_S_PER_TOKEN = 0.002  # until a prefill was measured
LEARNING_RATE = 0.2


@dataclass(slots=True)
class Entry:
    """One leg of ours on one worker."""

    pages: int  # taken there at once; 0 for a sender's leg
    prompt_tokens: int  # that this worker has to compute; 0 for a receiver of a hand-off
    seats: int = 1
    reports: int = 0


@dataclass(slots=True)
class Book:
    """One worker as this router accounts for it."""

    info: WorkerInfo
    load: WorkerLoad | None = None
    entries: dict[TicketId, Entry] = field(default_factory=dict)
    own_pages: int = 0
    own_seats: int = 0
    reported_pages: int = 0
    fresh_pages: int = 0  # of legs dispatched after the last report
    ended_pages: int = 0  # of legs that the last report showed and that ended since
    foreign_seats: int = 0
    fresh_tokens: int = 0  # prompts that no report can have shown yet
    ended_tokens: int = 0  # prompts that the last report showed and that ended since

    @property
    def used_pages(self) -> int:
        """Pages that are, or are about to be, in use."""
        used = max(self.reported_pages - self.ended_pages, 0) + self.fresh_pages
        return min(used, self.info.total_pages)

    @property
    def free_pages(self) -> int:
        """Pages that a new request could reserve."""
        return self.info.total_pages - self.used_pages

    @property
    def seats_taken(self) -> int:
        """Sequences that are there or on their way there."""
        return self.own_seats + self.foreign_seats

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that this worker has not computed yet."""
        reported = self.load.queued_tokens if self.load is not None else 0
        return max(reported - self.ended_tokens, 0) + self.fresh_tokens

    def _finished(self, entry: Entry) -> None:
        if entry.reports >= REPORTS_TO_COVER:
            self.ended_tokens += entry.prompt_tokens
        else:
            self.fresh_tokens -= entry.prompt_tokens
        entry.prompt_tokens = 0


class Ledger:
    """All books of one router."""

    def __init__(self) -> None:
        self._books: dict[str, Book] = {}
        self.prefill_s_per_token = FIRST_PREFILL_S_PER_TOKEN

    def add_worker(self, info: WorkerInfo) -> None:
        """A worker can be used from now on. An older incarnation's book is void."""
        self._books[info.worker_id] = Book(info)

    def drop_worker(self, worker_id: str) -> None:
        """A worker cannot be used any more."""
        self._books.pop(worker_id, None)

    def book(self, worker_id: str) -> Book | None:
        """One worker's book, or None when it cannot be used."""
        return self._books.get(worker_id)

    def books(self, role: Role) -> list[Book]:
        """The usable workers of one role."""
        return [book for book in self._books.values() if book.info.role is role]

    def dispatch(
        self,
        ticket_id: TicketId,
        worker_id: str,
        *,
        pages: int,
        prompt_tokens: int,
        seats: int = 1,
    ) -> None:
        """A leg is about to be opened. ``InternalError`` for one that is there already.

        ``seats`` is how many sequences it will run, one per choice.
        """
        book = self._books[worker_id]
        if ticket_id in book.entries:
            raise InternalError(f"{ticket_id} was dispatched to {worker_id} twice")
        book.entries[ticket_id] = Entry(pages, prompt_tokens, seats)
        book.own_pages += pages
        book.fresh_pages += pages
        book.own_seats += seats
        book.fresh_tokens += prompt_tokens

    def prompt_computed(self, ticket_id: TicketId, worker_id: str) -> None:
        """The worker has computed the whole prompt of this leg."""
        book = self._books.get(worker_id)
        entry = book.entries.get(ticket_id) if book is not None else None
        if book is not None and entry is not None:
            book._finished(entry)

    def release(self, ticket_id: TicketId, worker_id: str) -> None:
        """A leg is over. Nothing happens for one that is unknown: its worker was dropped."""
        book = self._books.get(worker_id)
        entry = book.entries.pop(ticket_id, None) if book is not None else None
        if book is not None and entry is not None:
            book._finished(entry)
            book.own_pages -= entry.pages
            book.own_seats -= entry.seats
            if entry.reports:
                book.ended_pages += entry.pages
            else:
                book.fresh_pages -= entry.pages

    def report(self, worker_id: str, load: WorkerLoad) -> None:
        """A worker's heartbeat."""
        book = self._books.get(worker_id)
        if book is None:
            return
        book.load = load
        book.reported_pages = max(load.total_pages - load.free_pages, 0)
        book.fresh_pages = book.ended_pages = 0
        seats = load.running + load.waiting + load.transferring
        book.foreign_seats = max(seats - book.own_seats, 0)
        book.ended_tokens = 0
        for entry in book.entries.values():
            entry.reports += 1
            if entry.reports == REPORTS_TO_COVER:
                book.fresh_tokens -= entry.prompt_tokens

    def learn(self, timings: Iterable[StageTiming], n_prompt: int) -> None:
        """Take what a request's stages took into the prediction of the next ones."""
        for timing in timings:
            if timing.stage == "prefill" and n_prompt > 0:
                measured = timing.seconds / n_prompt
                self.prefill_s_per_token += LEARNING_RATE * (measured - self.prefill_s_per_token)

    def predicted_prefill_s(self, n_prompt: int) -> float:
        """How long a prompt of this length takes once its turn has come."""
        return n_prompt * self.prefill_s_per_token

    def backlog_s(self) -> float:
        """How long the prompts now queued keep the workers that compute them busy."""
        books = [book for book in self._books.values() if book.queued_tokens > 0]
        queued = sum(book.queued_tokens for book in books)
        return self.predicted_prefill_s(queued) / max(len(books), 1)

    def check_integrity(self) -> None:
        """Raise ``InternalError`` unless every sum agrees with its entries."""
        for worker_id, book in self._books.items():
            pages = sum(entry.pages for entry in book.entries.values())
            fresh = sum(
                entry.prompt_tokens
                for entry in book.entries.values()
                if entry.reports < REPORTS_TO_COVER
            )
            seats = sum(entry.seats for entry in book.entries.values())
            new = sum(entry.pages for entry in book.entries.values() if not entry.reports)
            said = (book.own_pages, book.fresh_tokens, book.own_seats, book.fresh_pages)
            if said != (pages, fresh, seats, new):
                raise InternalError(
                    f"ledger of {worker_id}: pages, fresh tokens, seats and fresh pages are "
                    f"{said}, but its entries have {(pages, fresh, seats, new)}"
                )

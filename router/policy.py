"""Where a request goes: ``choose`` answers Route, Wait or Reject, each with its reason.

This file owns the choice of workers and the order in which requests are served. It is pure over
the ledger: no clock, no I/O, no memory of its own. Every "no" carries a sentence an operator can
read and the numbers behind it.

The rule now is the least predicted load in tokens: a prefill worker by the prompt tokens it has
not computed, a decode worker by the pages in use there, a worker that has to do both by its
uncomputed prompts first. Measured costs, prefix affinity and the ``auto`` mode come later and
change only the keys by which the candidates are ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.config import TandemConfig
from protocol.errors import ErrorInfo, InvalidArgument, NeverFits, Unavailable
from protocol.types import Mode, Request, Role, WorkerInfo
from router.ledger import Book, Ledger


@dataclass(frozen=True, slots=True)
class Route:
    """Dispatch now. ``sender`` None: the receiver computes the prompt itself.

    ``fallback`` names why the configured way was not taken; empty when it was.
    """

    receiver: WorkerInfo
    sender: WorkerInfo | None
    pages: int  # that the receiver takes at once
    reason: str
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can take it now, something will."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Waiting would not help."""

    error: ErrorInfo


def choose(request: Request, ledger: Ledger, config: TandemConfig) -> Route | Wait | Reject:
    """The workers for this request, by the ledger as it stands."""
    receivers = ledger.books(Role.DECODE)
    if not receivers:
        error = Unavailable(
            "no decode worker is ready", retry_after_s=max(config.timing.peer_dead_s, 1.0)
        )
        return Reject(error.info())
    fitting = [book for book in receivers if _ever_fits(request, book)]
    if not fitting:
        return Reject(_never_fits(request, receivers))
    able = [book for book in fitting if _can_reserve(request, book)]
    if not able:
        return Wait(_who_is_full(request, fitting))
    sender, fallback = _choose_sender(request, ledger, config)
    key = _load_of_local if sender is None else _load_of_receiver
    receiver = min(able, key=key)
    where = receiver.info.worker_id
    if sender is None:
        reason = f"{where} does both: {receiver.queued_tokens} prompt tokens queued there"
    else:
        reason = (
            f"{sender.info.worker_id} has {sender.queued_tokens} prompt tokens queued, "
            f"{where} {receiver.used_pages} of {receiver.info.total_pages} pages in use"
        )
    return Route(
        receiver.info,
        None if sender is None else sender.info,
        pages_at_once(request, receiver),
        reason,
        fallback,
    )


def order_key(request: Request, arrival: float, ledger: Ledger, config: TandemConfig) -> float:
    """Least slack: the instant at which the prefill must start to meet the TTFT target.

    Smaller is more urgent. Computed once and used on both legs. It is an instant of this
    router's clock, so it orders the requests of one router exactly; those of routers on other
    hosts only as far as their monotonic clocks agree. A prompt that cannot meet the target
    anyway is ordered by its arrival: being hopeless must not make it the most urgent of all.
    """
    target = config.slo.ttft_ms / 1000
    return arrival + max(target - ledger.predicted_prefill_s(len(request.prompt)), 0.0)


def pages_at_once(request: Request, book: Book) -> int:
    """Pages that this worker takes before the first token: the prompt, and one per further choice.

    Answers grow page by page; how much room they are left is the worker's decision
    (``decode_worker.memory``), and the router's must not be stricter.
    """
    return book.info.model.geometry.pages_for(len(request.prompt)) + request.n_choices - 1


def pages_at_most(request: Request, book: Book) -> int:
    """Pages of the request at its longest; its choices share the prompt's full pages."""
    geometry, n_choices = book.info.model.geometry, request.n_choices
    shared = len(request.prompt) // geometry.page_size if n_choices > 1 else 0
    longest = geometry.pages_for(len(request.prompt) + request.sampling.max_tokens)
    return shared + n_choices * (longest - shared)


def _ever_fits(request: Request, book: Book) -> bool:
    if request.n_choices > book.info.max_num_seqs:
        return False
    return pages_at_most(request, book) <= book.info.total_pages


def _can_reserve(request: Request, book: Book) -> bool:
    # A sequence without a seat would have its first token and then stand still, so seats are
    # given out before any compute, not only pages.
    if book.seats_taken + request.n_choices > book.info.max_num_seqs:
        return False
    return pages_at_once(request, book) <= book.free_pages


def _choose_sender(
    request: Request, ledger: Ledger, config: TandemConfig
) -> tuple[Book | None, str]:
    if config.mode is Mode.COLOCATED:
        return None, ""
    senders = ledger.books(Role.PREFILL)
    if not senders:
        return None, "no_prefill_worker"
    able = [
        book
        for book in senders
        if book.info.model.geometry.pages_for(len(request.prompt)) <= book.info.total_pages
    ]
    if not able:
        return None, "prompt_larger_than_prefill_worker"
    return min(able, key=_load_of_sender), ""


def _load_of_sender(book: Book) -> tuple[int, int, str]:
    return book.queued_tokens, len(book.entries), book.info.worker_id


def _load_of_receiver(book: Book) -> tuple[int, int, int, str]:
    return book.used_pages, book.seats_taken, book.queued_tokens, book.info.worker_id


def _load_of_local(book: Book) -> tuple[int, int, int, str]:
    return book.queued_tokens, book.used_pages, book.seats_taken, book.info.worker_id


def _who_is_full(request: Request, books: Sequence[Book]) -> str:
    each = ", ".join(
        f"{book.info.worker_id} has {book.free_pages} of {book.info.total_pages} pages and "
        f"{max(book.info.max_num_seqs - book.seats_taken, 0)} of {book.info.max_num_seqs} seats"
        for book in books
    )
    n = request.n_choices
    seats = "one seat" if n == 1 else f"{n} seats"
    return f"{pages_at_once(request, books[0])} pages and {seats} are needed; free: {each}"


def _never_fits(request: Request, receivers: Sequence[Book]) -> ErrorInfo:
    largest = max(receivers, key=lambda book: book.info.total_pages)
    most_seqs = max(book.info.max_num_seqs for book in receivers)
    if request.n_choices > most_seqs:
        return InvalidArgument(
            f"{request.n_choices} choices; a decode worker runs {most_seqs} sequences at most",
            field="n",
        ).info()
    page_size = largest.info.model.geometry.page_size
    choices = f", {request.n_choices} choices" if request.n_choices > 1 else ""
    return NeverFits(
        f"the prompt has {len(request.prompt)} tokens and max_tokens is "
        f"{request.sampling.max_tokens}{choices}: together {pages_at_most(request, largest)} pages "
        f"of {page_size} tokens; the largest decode worker has {largest.info.total_pages}",
        field="max_tokens",
    ).info()

"""A step as data: what a role plans, what the device runs, what comes back.

A step is a dictionary from ticket to the number of tokens it advances. Chunked prefill, decode
and recompute are one case; only the numbers differ. This file also owns the token budget rule
and the order keys that both worker kinds share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from protocol.errors import ErrorInfo, InternalError
from protocol.types import SamplingParams, Ticket, TicketId, TokenLogprobs

MAX_OVERTAKES = 8

K = TypeVar("K", bound=Hashable)  # must have an order too


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step, as the device needs it. Never changed once it is made; it
    is not frozen because that makes 256 of them five times as dear (0.35 against 1.8 us each).

    ``tokens`` (at least one) are computed at positions ``start .. start + len(tokens) - 1``;
    ``pages`` cover every position from 0 to the last of them; a list that an earlier step had too
    may only have grown since. ``sample`` set means: draw the token that follows the last one, once
    for each of ``choices``; it will have index ``token_index`` within the answer.

    ``history`` is the whole sequence, prompt (its first ``n_prompt`` tokens) and answer, up to and
    including the last computed token at least; penalties, grammars and prompt logprobs are
    functions of it, so that a sequence goes on anywhere with nothing else. It is read during the
    step only, never changed. ``prompt_logprobs`` k asks for the logprobs of the prompt tokens that
    follow each computed one.
    """

    ticket_id: TicketId
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SamplingParams | None = None
    token_index: int = 0
    choices: tuple[int, ...] = (0,)
    history: Sequence[int] = ()
    n_prompt: int = 0
    prompt_logprobs: int | None = None


class CopyKind(StrEnum):
    """Between which memories a page is copied; the pool is the device's."""

    WITHIN = "within"  # pool to pool: a fork's partly filled page
    TO_HOST = "to_host"  # a preempted sequence leaves
    FROM_HOST = "from_host"  # and comes back


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One page copied before the step's rows run. Host pages are numbered by themselves."""

    kind: CopyKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. ``advance`` is in running order; ``reasons`` says why others were passed over.

    ``advance`` counts a ticket's tokens over all its rows (choices). ``copies`` are carried out
    in order, before the rows; a plan may consist of copies alone. ``repeats`` is how many further
    steps the plan stays the same, each row one token further, if no event arrives.
    """

    advance: Mapping[TicketId, int]
    rows: tuple[StepRow, ...]
    reasons: Mapping[TicketId, str] = field(default_factory=dict)
    copies: tuple[PageCopy, ...] = ()
    repeats: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.advance.values())


@dataclass(slots=True)
class RowResult:
    """What one row produced. Never changed once it is made (see ``StepRow``).

    ``tokens`` has one token per choice if the row sampled, ``logprobs`` as many if it asked for
    them. ``prompt_logprobs`` belong to the prompt tokens at positions ``start + 1`` and on.
    ``error`` set (logits that are not finite, a grammar without a way on) means none of it is.
    Where a plan was run several times (``StepResult.steps``), ``tokens`` has one token per time.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, row by row in the plan's order; ``seconds`` is the device's time.

    ``steps`` above 1 (at most 1 + the plan's ``repeats``): the plan was run so often, each row
    one token further each time, and no row ended before the last time.
    """

    rows: tuple[RowResult, ...]
    seconds: float = 0.0
    steps: int = 1


def prefill_share(budget: int, n_decodes: int, min_prefill_tokens: int) -> int:
    """Tokens of a step that waiting prompts may use: what the decodes leave, and never less than
    ``min_prefill_tokens``. The config refuses a budget in which both could not fit."""
    return max(budget - n_decodes, min_prefill_tokens)


def chunk_tokens(remaining: int, left: int, *, chunked: bool, first: bool) -> int:
    """How many of a prompt's ``remaining`` tokens join a step with ``left`` tokens of its share.

    0: none. Without chunking a prompt is whole or not in the step at all; the first one of a step
    may be larger than its share, or it could never be computed.
    """
    if chunked:
        return min(remaining, left)
    return remaining if first or remaining <= left else 0


class AgeingQueue(Generic[K]):
    """What waits: lower priority first, then smaller order key, then earlier arrival.

    Nobody is passed over for ever. Whoever takes from the queue says ``served`` after every
    decision; when a decision served somebody but not the oldest ticket, the oldest was overtaken,
    and after ``max_overtakes`` times in a row it comes first. Bound: a ticket with ``k`` older
    ones ahead of it that need ``c`` decisions together is served, the next time anybody is, after
    at most ``(max_overtakes + 1) * (c + 1)`` decisions; urgent traffic keeps the share
    ``max_overtakes / (max_overtakes + 1)`` however long the queue is.

    Adding and removing cost a binary search and a move of a short list; nothing grows with the
    tickets served.
    """

    def __init__(self, max_overtakes: int = MAX_OVERTAKES) -> None:
        self._max_overtakes = max_overtakes
        self._by_urgency: list[tuple[int, float, int, Any]] = []  # the last is a K
        self._by_arrival: list[tuple[int, Any]] = []
        self._keys: dict[K, tuple[int, float, int, Any]] = {}
        self._arrivals = 0
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, one: K) -> bool:
        return one in self._keys

    def put(self, one: K, priority: int, order_key: float, arrival: int | None = None) -> int:
        """Let one in; returns its arrival number, with which it may come back later."""
        if one in self._keys:
            raise InternalError(f"{one} waits already")
        if arrival is None:
            arrival = self._arrivals
            self._arrivals += 1
        key = (priority, order_key, arrival, one)
        self._keys[one] = key
        insort(self._by_urgency, key)
        insort(self._by_arrival, (arrival, one))
        if self._by_arrival[0][1] == one:
            self._overtakes = 0
        return arrival

    def remove(self, one: K) -> bool:
        """Take one out; False if it was not in."""
        key = self._keys.pop(one, None)
        if key is None:
            return False
        del self._by_urgency[bisect_left(self._by_urgency, key)]
        place = bisect_left(self._by_arrival, (key[2], one))
        del self._by_arrival[place]
        if place == 0:
            self._overtakes = 0
        return True

    @property
    def aged(self) -> K | None:
        """The oldest, if it was overtaken often enough to come first now."""
        if self._by_arrival and self._overtakes >= self._max_overtakes:
            oldest: K = self._by_arrival[0][1]
            return oldest
        return None

    def in_order(self) -> list[K]:
        """All, most urgent first, an aged one before everybody."""
        order: list[K] = [key[3] for key in self._by_urgency]
        aged = self.aged
        if aged is not None:
            order.remove(aged)
            order.insert(0, aged)
        return order

    def ahead_of(self, one: K) -> int:
        """How many of those that wait are more urgent."""
        return bisect_left(self._by_urgency, self._keys[one])

    def served(self, some: Collection[K]) -> None:
        """A decision was made that served these. Call it before they are removed."""
        if not some or not self._by_arrival:
            return
        oldest: K = self._by_arrival[0][1]
        self._overtakes = 0 if oldest in some else self._overtakes + 1

    def reasons(self, reason: str) -> dict[K, str]:
        """The same reason for everybody who waits (one dictionary copy, no hashing)."""
        return dict.fromkeys(self._keys, reason)


class UrgencyQueue(AgeingQueue[TicketId]):
    """Tickets that wait, by their own priority and order key."""

    def add(self, ticket: Ticket, arrival: int | None = None) -> int:
        """Let a ticket in; see ``put``."""
        return self.put(ticket.id, ticket.priority, ticket.order_key, arrival)

"""One prompt on a prefill worker: how far it has come and on which pages.

This file owns the record. It decides nothing.

Life of a prompt: waits without pages -> gets them, the leading ones out of the prefix cache where
they are there -> ``computed`` grows chunk by chunk -> complete, or dropped and back to waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.pages import Reservation
from protocol.page_hash import PageChain
from protocol.types import Ticket


@dataclass(slots=True, eq=False)
class Prompt:
    """``n_tokens``, ``computed`` and ``found`` are in tokens."""

    ticket: Ticket
    n_tokens: int
    arrival: int
    chain: PageChain | None = None  # None: its pages have no names, nothing is found or kept
    computed: int = 0  # leading positions whose KV is in its pages
    found: int = 0  # of them, those that were in the cache when it got its pages
    spans: tuple[tuple[int, int], ...] = ()  # positions computed before it was dropped
    published: int = 0  # leading pages that others may find
    granted: bool = False
    reservation: Reservation | None = None

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return self.n_tokens - self.computed

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt proper, of those that are done, never computed for this ticket."""
        end = min(self.computed, self.ticket.n_prompt)
        cached, reached = 0, 0
        for first, after in sorted((*self.spans, (self.found, self.computed))):
            cached += max(0, min(first, end) - reached)
            reached = max(reached, after)
        return cached

    def give_up(self) -> None:
        """Its pages are gone, and with them what was computed."""
        self.spans = (*self.spans, (self.found, self.computed))
        self.reservation = None
        self.computed = self.found = self.published = 0

    @property
    def urgency(self) -> tuple[int, float, int]:
        """Smaller is more urgent, ageing apart."""
        return self.ticket.priority, self.ticket.order_key, self.arrival

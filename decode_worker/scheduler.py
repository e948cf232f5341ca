"""How a decode worker fills its steps: decodes first, prompt chunks in what is left.

This file owns the running sequences and the local prompts that have pages. It must never leave
out a running sequence, never compute more than the budget (but for whole prompts when chunking
is off, which exists to show what that does), and never take a page beyond a reservation.

Life of a sequence here: ``join`` with its pages reserved -> prompt chunks, most urgent first ->
its first token makes it ``running``: one token in every step -> ``leave``. A sequence whose KV
came from a prefill worker joins running.
"""

from __future__ import annotations

from decode_worker.leg import Leg
from kv_transfer.pages import Pages
from protocol.errors import InternalError
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepRow, UrgencyQueue, prefill_share
from protocol.types import TicketId


class DecodeScheduler:
    """The sequences that one decode worker computes."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self._running: dict[TicketId, Leg] = {}
        self._prompts: dict[TicketId, Leg] = {}
        self._queue = UrgencyQueue()

    @property
    def n_running(self) -> int:
        """Sequences that get a token in every step."""
        return len(self._running)

    @property
    def n_prompts(self) -> int:
        """Local prompts that are not computed to their end."""
        return len(self._prompts)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute here."""
        return sum(len(leg.tokens) - leg.computed for leg in self._prompts.values())

    def join(self, leg: Leg) -> None:
        """Take in a local prompt, or a sequence that runs already."""
        if leg.running:
            self._running[leg.ticket.id] = leg
        else:
            self._prompts[leg.ticket.id] = leg
            self._queue.add(leg.ticket)

    def leave(self, leg: Leg) -> None:
        """No later step holds this sequence."""
        self._running.pop(leg.ticket.id, None)
        if self._prompts.pop(leg.ticket.id, None) is not None:
            self._queue.remove(leg.ticket.id)

    def started(self, leg: Leg) -> None:
        """A local prompt has its first token: from now on it runs."""
        self.leave(leg)
        leg.running = True
        self.join(leg)

    def plan(self, others: dict[TicketId, str], now: float) -> StepPlan | None:
        """The next step, or None. ``others`` are requests that cannot be computed, with why;
        the dictionary becomes the plan's."""
        options = self._options
        rows = [self._row(leg, 1) for leg in self._running.values()]
        advance = dict.fromkeys(self._running, 1)
        share = prefill_share(options.max_num_batched_tokens, len(rows), options.min_prefill_tokens)
        left = share
        served: list[TicketId] = []
        for ticket_id in self._queue.in_order():
            if left <= 0 or len(rows) >= options.max_num_seqs:
                break
            leg = self._prompts[ticket_id]
            n = len(leg.tokens) - leg.computed
            if options.chunked_prefill:
                n = min(n, left)
            elif served and n > left:
                continue
            leg.began_at = now if leg.began_at is None else leg.began_at
            rows.append(self._row(leg, n))
            advance[ticket_id] = n
            served.append(ticket_id)
            left -= n
        if not rows:
            return None
        self._queue.served(served)
        if len(served) < len(self._queue):
            why = (
                f"{len(served)} more urgent prompts use {share - left} of the {share} tokens "
                f"that {len(self._running)} decodes leave"
            )
            others.update(self._queue.reasons(why))
            for ticket_id in served:
                del others[ticket_id]
        return StepPlan(advance, tuple(rows), others)

    def _row(self, leg: Leg, n: int) -> StepRow:
        start, end = leg.computed, leg.computed + n
        missing = self._pages.pages_for(end) - len(leg.pages)
        if missing > 0:
            if leg.reservation is None:
                raise InternalError(f"{leg.ticket.id} is computed without a reservation")
            leg.pages += self._pages.bind(leg.reservation, missing)
        sample = end == len(leg.tokens)
        return StepRow(
            ticket_id=leg.ticket.id,
            tokens=leg.tokens[start:end],
            start=start,
            pages=leg.pages,
            sample=leg.ticket.sampling if sample else None,
            token_index=leg.n_answer,
        )

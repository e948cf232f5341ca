"""Which prompts a prefill worker advances in its next step, and on whose pages.

This file owns the order of computing and the pages of prompts that are not handed over yet. It
must never let a granted ticket wait for one that is not: work without a grant is droppable, and
a granted ticket may take its pages. It knows nothing of routers, receivers or links.

Life of a prompt:
 1. ``add``: it waits, by priority, order key and age.
 2. A step takes it in: all its pages are reserved and bound before its first chunk, so a prompt
    that has begun can always be finished.
 3. ``advance`` after every step; with the last chunk it leaves the queue and keeps its pages.
 4. Until it is granted it may be dropped: pages gone, computed again later, at its old place.
 5. ``forget``: it is over; its pages are the role's to release.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.pages import Pages, Reservation
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepRow, UrgencyQueue
from protocol.types import Ticket, TicketId


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt and how far it has come. ``n_tokens`` and ``computed`` are in tokens."""

    ticket: Ticket
    n_tokens: int
    arrival: int
    computed: int = 0
    granted: bool = False
    reservation: Reservation | None = None

    @property
    def remaining(self) -> int:
        """Tokens still to compute."""
        return self.n_tokens - self.computed


class PrefillScheduler:
    """The prompts of one prefill worker."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self._queue = UrgencyQueue()
        self._prompts: dict[TicketId, Prompt] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return sum(p.remaining for p in self._prompts.values())

    def add(self, ticket: Ticket) -> Prompt:
        """Let a prompt wait for its turn."""
        prompt = Prompt(ticket, len(ticket.tokens), self._queue.add(ticket))
        self._prompts[ticket.id] = prompt
        return prompt

    def forget(self, prompt: Prompt) -> None:
        """This prompt is computed no further and its pages are nobody's to take."""
        self._queue.remove(prompt.ticket.id)
        self._prompts.pop(prompt.ticket.id, None)

    def plan(self) -> tuple[StepPlan | None, list[Prompt]]:
        """The next step (None when nothing can be computed) and the prompts dropped for it."""
        left = self._options.max_num_batched_tokens
        rows: list[StepRow] = []
        advance: dict[TicketId, int] = {}
        dropped: list[Prompt] = []
        reasons: dict[TicketId, str] = {}
        aged = self._queue.aged
        closed_to_ungranted = closed_to_all = False
        for ticket_id in self._queue.in_order():
            if left <= 0 or len(rows) >= self._options.max_num_seqs:
                break
            prompt = self._prompts[ticket_id]
            n = (
                prompt.remaining
                if not self._options.chunked_prefill
                else min(prompt.remaining, left)
            )
            if rows and n > left:
                reasons[ticket_id] = (
                    f"its {n} tokens are not chunked and {left} are left in the step"
                )
                continue
            if prompt.reservation is None:
                if closed_to_all or (closed_to_ungranted and not prompt.granted):
                    reasons[ticket_id] = f"the next free pages are for {aged}, which waited longest"
                    continue
                if not self._make_room(prompt, advance, dropped):
                    reasons[ticket_id] = self._no_room(prompt)
                    if ticket_id == aged:
                        closed_to_ungranted, closed_to_all = True, prompt.granted
                    continue
            rows.append(self._row(prompt, n))
            advance[ticket_id] = n
            left -= n
        if not rows:
            return None, dropped
        self._queue.served(advance)
        spent = self._options.max_num_batched_tokens - left
        why = f"{len(rows)} more urgent prompts use the step: {spent} tokens"
        everyone = self._queue.reasons(why)
        everyone.update(reasons)
        for ticket_id in advance:
            del everyone[ticket_id]
        return StepPlan(advance, tuple(rows), everyone), dropped

    def advance(self, prompt: Prompt, n_tokens: int) -> None:
        """A step has computed ``n_tokens`` more of this prompt."""
        prompt.computed += n_tokens
        if prompt.remaining == 0:
            self._queue.remove(prompt.ticket.id)

    def final_pages(self, prompt: Prompt) -> int:
        """Leading pages that will not change any more: full ones, all after the last chunk."""
        if prompt.remaining == 0:
            return self._pages.pages_for(prompt.n_tokens)
        return prompt.computed // self._pages.page_size

    def _row(self, prompt: Prompt, n: int) -> StepRow:
        ticket, start = prompt.ticket, prompt.computed
        bound = prompt.reservation.bound if prompt.reservation else []
        return StepRow(
            ticket_id=ticket.id,
            tokens=ticket.tokens[start : start + n],
            start=start,
            pages=tuple(bound[: self._pages.pages_for(start + n)]),
            sample=ticket.sampling if start + n == prompt.n_tokens else None,
            token_index=prompt.n_tokens - ticket.n_prompt,
        )

    def _make_room(
        self, prompt: Prompt, planned: dict[TicketId, int], dropped: list[Prompt]
    ) -> bool:
        """Reserve and bind the prompt's pages, dropping ungranted work for a granted prompt."""
        need = self._pages.pages_for(prompt.n_tokens)
        missing = need - self._pages.available
        if missing > 0:
            if not prompt.granted:
                return False
            victims: list[Prompt] = []
            for victim in self._droppable(planned):
                if missing <= 0:
                    break
                victims.append(victim)
                missing -= self._pages.pages_for(victim.n_tokens)
            if missing > 0:
                return False
            for victim in victims:
                self._drop(victim)
            dropped.extend(victims)
        prompt.reservation = self._pages.reserve(prompt.ticket.id, need)
        self._pages.bind(prompt.reservation, need)
        return True

    def _droppable(self, planned: dict[TicketId, int]) -> list[Prompt]:
        """Ungranted prompts with pages that this step does not use, least urgent first."""
        held = [
            p
            for p in self._prompts.values()
            if p.reservation is not None and not p.granted and p.ticket.id not in planned
        ]
        held.sort(key=lambda p: (p.ticket.priority, p.ticket.order_key, p.arrival), reverse=True)
        return held

    def _drop(self, prompt: Prompt) -> None:
        if prompt.reservation is not None:
            self._pages.release(prompt.reservation)
        prompt.reservation = None
        prompt.computed = 0
        if prompt.ticket.id not in self._queue:
            self._queue.add(prompt.ticket, prompt.arrival)

    def _no_room(self, prompt: Prompt) -> str:
        return (
            f"needs {self._pages.pages_for(prompt.n_tokens)} pages, "
            f"{self._pages.available} of {self._pages.total} are free"
        )

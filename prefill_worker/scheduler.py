"""Which prompts a prefill worker advances in its next step.

This file owns the order of computing. It must never let a granted ticket wait for one that is
not: work without a grant is droppable (``room``). It knows nothing of routers, receivers or
links.

Life of a prompt:
 1. ``add``: it waits, by priority, order key and age.
 2. A step takes it in: it has room for all its pages before its first chunk. What the prefix
    cache holds of it counts as done.
 3. ``advance`` after every step; with the last chunk it leaves the queue and keeps its pages.
 4. Until it is granted it may be dropped: pages gone, computed again later, at its old place.
 5. ``forget``: it is over; its pages are the role's to release.

A plan of this scheduler never repeats (``StepPlan.repeats`` is 0): repeating means that every row
goes one token further, and a prompt goes a chunk further, or ends.
"""

from __future__ import annotations

from kv_transfer.pages import Pages
from prefill_worker.prompt import Prompt
from prefill_worker.room import Room
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepRow, UrgencyQueue, chunk_tokens, prefill_share
from protocol.types import Ticket, TicketId

LOOK_AHEAD = 8  # prompts, granted and ungranted each, tried past the first that finds no room


class PrefillScheduler:
    """The prompts of one prefill worker."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self._share = prefill_share(options.max_num_batched_tokens, 0, options.min_prefill_tokens)
        self._room = Room(pages, options.hash_root)
        self._queue = UrgencyQueue()
        self._prompts: dict[TicketId, Prompt] = {}
        self._queued_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return self._queued_tokens

    def add(self, ticket: Ticket) -> Prompt:
        """Let a prompt wait for its turn."""
        chain = self._room.chain(ticket)
        prompt = Prompt(ticket, len(ticket.tokens), self._queue.add(ticket), chain)
        self._prompts[ticket.id] = prompt
        self._queued_tokens += prompt.remaining
        return prompt

    def forget(self, prompt: Prompt) -> None:
        """This prompt is computed no further and its pages are nobody's to take."""
        self._queue.remove(prompt.ticket.id)
        self._room.forget(prompt)
        if self._prompts.pop(prompt.ticket.id, None) is not None:
            self._queued_tokens -= prompt.remaining

    def distrust(self, prompt: Prompt) -> None:
        """Computing this prompt went wrong: nobody finds the pages that it read."""
        self._room.distrust(prompt)

    def plan(self) -> tuple[StepPlan | None, list[Prompt]]:
        """The next step (None when nothing can be computed) and the prompts dropped for it."""
        left = self._share
        rows: list[StepRow] = []
        advance: dict[TicketId, int] = {}
        dropped: list[Prompt] = []
        reasons: dict[TicketId, str] = {}
        tries = {False: LOOK_AHEAD, True: LOOK_AHEAD}
        closed: dict[bool, str] = {}  # granted or not: why no more of them get pages
        aged = self._queue.aged
        for ticket_id in self._queue.in_order():
            if left <= 0 or len(rows) >= self._options.max_num_seqs:
                break
            prompt = self._prompts[ticket_id]
            waits = prompt.reservation is None
            if waits and prompt.granted in closed:
                reasons[ticket_id] = closed[prompt.granted]
                continue
            found = self._room.find(prompt) if waits else ()
            remaining = prompt.remaining - len(found) * self._pages.page_size
            n = chunk_tokens(remaining, left, chunked=self._options.chunked_prefill, first=not rows)
            if n == 0:
                reasons[ticket_id] = (
                    f"its {remaining} tokens are not chunked and {left} are left in the step"
                )
                continue
            if waits:
                victims = self._room.victims(prompt, found, advance)
                if victims is None:
                    reasons[ticket_id] = self._room.lack(prompt)
                    if ticket_id == aged:
                        why = f"the next free pages are for {aged}, which waited longest"
                        closed |= {False: why, True: why} if prompt.granted else {False: why}
                    elif tries[prompt.granted] == 0:
                        closed[prompt.granted] = _NOT_TRIED
                    tries[prompt.granted] -= 1
                    continue
                for victim in victims:
                    self._drop(victim)
                dropped += victims
                self._room.take(prompt, found)
                self._queued_tokens -= prompt.computed
            rows.append(self._row(prompt, n))
            advance[ticket_id] = n
            left -= n
        if not rows:
            return None, dropped
        self._queue.served(advance)
        everyone = self._queue.reasons(
            f"{len(rows)} more urgent prompts use the step: {self._share - left} tokens"
        )
        everyone.update(reasons)
        for ticket_id in advance:
            del everyone[ticket_id]
        return StepPlan(advance, tuple(rows), everyone), dropped

    def advance(self, prompt: Prompt, n_tokens: int) -> None:
        """A step has computed ``n_tokens`` more of this prompt."""
        prompt.computed += n_tokens
        self._queued_tokens -= n_tokens
        self._room.keep(prompt)
        if prompt.remaining == 0:
            self._queue.remove(prompt.ticket.id)

    def final_pages(self, prompt: Prompt) -> int:
        """Leading pages that will not change any more: full ones, all after the last chunk."""
        if prompt.remaining == 0:
            return self._pages.pages_for(prompt.n_tokens)
        return prompt.computed // self._pages.page_size

    def _drop(self, prompt: Prompt) -> None:
        self._queued_tokens += prompt.computed
        self._room.drop(prompt)
        if prompt.ticket.id not in self._queue:
            self._queue.add(prompt.ticket, prompt.arrival)

    def _row(self, prompt: Prompt, n: int) -> StepRow:
        ticket, start = prompt.ticket, prompt.computed
        bound = prompt.reservation.bound if prompt.reservation else []
        last = start + n == prompt.n_tokens
        return StepRow(
            ticket_id=ticket.id,
            tokens=ticket.tokens[start : start + n],
            start=start,
            pages=tuple(bound[: self._pages.pages_for(start + n)]),
            sample=ticket.sampling if last else None,
            token_index=prompt.n_tokens - ticket.n_prompt,
            choices=tuple(range(ticket.n_choices)) if last else (0,),
            history=ticket.tokens,
            n_prompt=ticket.n_prompt,
            prompt_logprobs=ticket.sampling.prompt_logprobs,
        )


_NOT_TRIED = f"{LOOK_AHEAD + 1} more urgent prompts found no room for their pages"

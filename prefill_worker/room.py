"""The pages of prompts: found in the prefix cache, reserved, taken from ungranted work, kept.

This file owns which prompt holds pages and whose work makes way. It must never take pages from a
granted prompt, or from one that the step being planned computes, and never let a prompt find its
own last token: that one is computed, as its logits give the first token.

Life of a prompt's pages:
 1. ``find``: the longest prefix that is in the cache. Prompts that want logprobs of the prompt
    itself find nothing, as these come out of computing it.
 2. ``take``: references on what was found and fresh pages for all the rest, at once, so that a
    prompt which has begun can always be finished. A granted prompt may have ungranted ones
    dropped for it, the least urgent first (``victims``).
 3. ``keep`` after every chunk: full pages are published, and others find them while this prompt
    is still being computed.
 4. ``drop``, or the end of the ticket: published pages stay cached until their room is needed. A
    dropped prompt finds again what is still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from kv_transfer.pages import Pages
from prefill_worker.prompt import Prompt
from protocol.page_hash import PageChain, matchable_pages, salted
from protocol.types import Ticket, TicketId


class Room:
    """Who holds pages on one prefill worker. ``hash_root`` empty: nothing is found or kept."""

    def __init__(self, pages: Pages, hash_root: bytes) -> None:
        self._pages = pages
        self._hash_root = hash_root
        self._held: dict[TicketId, Prompt] = {}

    def chain(self, ticket: Ticket) -> PageChain | None:
        """The names of this ticket's pages, each computed when it is asked for."""
        if not self._hash_root:
            return None
        return PageChain(self._pages.page_size, salted(self._hash_root, ticket.salt))

    def find(self, prompt: Prompt) -> Sequence[int]:
        """Leading pages that need not be computed now; they are its own only after ``take``."""
        if prompt.chain is None or prompt.ticket.sampling.prompt_logprobs is not None:
            return ()
        n_pages = matchable_pages(prompt.n_tokens, self._pages.page_size)
        return self._pages.match(prompt.chain.walk(prompt.ticket.tokens, n_pages))

    def victims(
        self, prompt: Prompt, found: Sequence[int], planned: Collection[TicketId]
    ) -> list[Prompt] | None:
        """Whom to ``drop`` so that ``take`` succeeds; None if that cannot be had now."""
        need = self._pages.pages_for(prompt.n_tokens) - len(found)
        if self._pages.room_for(need, found):
            return []
        if not prompt.granted:
            return None
        missing = need + sum(not self._pages.holders(p) for p in found) - self._pages.available
        droppable = [p for p in self._held.values() if not p.granted]
        droppable = [p for p in droppable if p.ticket.id not in planned]
        droppable.sort(key=lambda p: p.urgency, reverse=True)
        wanted = set(found)
        victims: list[Prompt] = []
        let_go: Counter[int] = Counter()
        for victim in droppable:
            victims.append(victim)
            for page in victim.reservation.bound if victim.reservation else ():
                let_go[page] += 1
                # A page that others use too comes free with the last of them.
                if page not in wanted and let_go[page] == self._pages.holders(page):
                    missing -= 1
            if missing <= 0:
                return victims
        return None

    def take(self, prompt: Prompt, found: Sequence[int]) -> None:
        """Give a prompt all its pages, those that were found first."""
        need = self._pages.pages_for(prompt.n_tokens) - len(found)
        prompt.reservation = self._pages.reserve(prompt.ticket.id, need, found)
        self._pages.bind(prompt.reservation, need)
        prompt.published = len(found)
        prompt.computed = prompt.found = len(found) * self._pages.page_size
        self._held[prompt.ticket.id] = prompt

    def keep(self, prompt: Prompt) -> None:
        """Publish the pages that the last chunk filled."""
        full = prompt.computed // self._pages.page_size
        if prompt.chain is None or prompt.reservation is None or full <= prompt.published:
            return
        hashes = prompt.chain.reach(prompt.ticket.tokens, full, prompt.published)
        self._pages.publish(prompt.reservation, hashes, prompt.published)
        prompt.published = full

    def distrust(self, prompt: Prompt) -> None:
        """Computing this prompt went wrong: nobody finds the pages that it read."""
        if prompt.reservation is not None:
            self._pages.unpublish(prompt.reservation)

    def drop(self, prompt: Prompt) -> None:
        """Its pages are nobody's now; it begins again, with what it finds then."""
        del self._held[prompt.ticket.id]
        if prompt.reservation is not None:
            self._pages.release(prompt.reservation)
        prompt.give_up()

    def forget(self, prompt: Prompt) -> None:
        """Its pages are the role's to release, and nobody else's to take."""
        self._held.pop(prompt.ticket.id, None)

    def lack(self, prompt: Prompt) -> str:
        """Why there is no room, with the numbers."""
        return (
            f"needs {self._pages.pages_for(prompt.n_tokens)} pages, "
            f"{self._pages.available} of {self._pages.total} are free"
        )

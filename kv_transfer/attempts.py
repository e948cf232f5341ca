"""Which attempt of a request is the newest one this worker knows: the fence against old ones.

This file owns invariant 4 of the hand-off: attempt n+1 of a request drops attempt n, an older one
is refused, a repeated one is nothing new. Live requests are always remembered; finished ones in
a bounded memory, least recently finished forgotten first, so that a worker's size does not grow
with the requests it has served.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from protocol.types import TicketId


class Standing(StrEnum):
    """How a ticket stands to what is known of its request."""

    NEW = "new"
    NEWER = "newer"  # a live attempt of the request must make way
    DUPLICATE = "duplicate"
    STALE = "stale"


class Attempts:
    """Live and finished attempts, by request."""

    def __init__(self, remembered: int) -> None:
        self._remembered = remembered
        self._live: dict[str, set[int]] = {}  # two at most: one making way for the other
        self._finished: OrderedDict[str, set[int]] = OrderedDict()

    def standing(self, ticket_id: TicketId) -> Standing:
        """What this ticket is to this worker; changes nothing."""
        live = self._live.get(ticket_id.request_id, _NONE)
        known = live | self._finished.get(ticket_id.request_id, _NONE)
        if ticket_id.attempt in known:
            return Standing.DUPLICATE
        if known and ticket_id.attempt < max(known):
            return Standing.STALE
        return Standing.NEWER if live else Standing.NEW

    def live_attempt(self, ticket_id: TicketId) -> TicketId | None:
        """The newest live attempt of the same request, if there is one."""
        live = self._live.get(ticket_id.request_id)
        return TicketId(ticket_id.request_id, max(live)) if live else None

    def begin(self, ticket_id: TicketId) -> None:
        """This attempt is the live one now."""
        self._live.setdefault(ticket_id.request_id, set()).add(ticket_id.attempt)

    def finish(self, ticket_id: TicketId) -> None:
        """This attempt is over (or was refused); repeats of it are duplicates from now on."""
        request_id = ticket_id.request_id
        live = self._live.get(request_id)
        if live is not None:
            live.discard(ticket_id.attempt)
            if not live:
                del self._live[request_id]
        self._finished.setdefault(request_id, set()).add(ticket_id.attempt)
        self._finished.move_to_end(request_id)
        while len(self._finished) > self._remembered:
            self._finished.popitem(last=False)

    def is_over(self, ticket_id: TicketId) -> bool:
        """This attempt can never be opened here any more, as far as is remembered."""
        return self.standing(ticket_id) in (Standing.DUPLICATE, Standing.STALE)


_NONE: frozenset[int] = frozenset()

"""The hand-off as the prefill worker drives it: grants in, announcements, pages and commits out.

This file owns the link operations of the sending side and turns what a transfer may do now into
effects. It must never announce without sending, or send without announcing: the two effects are
made together, so the order of announcements is the order of bytes. It ends no ticket; the role
does.

Life of a segment: cut (``kv_transfer.sender``) -> announced and queued on the link -> its end
reported by the link, with a checksum -> named in the commit.
"""

from __future__ import annotations

from kv_transfer.link_ops import LinkOps
from kv_transfer.pages import Pages
from prefill_worker.leg import Leg
from protocol.events import Effect, SendPages, ToReceiver
from protocol.lifecycle import SendState
from protocol.messages import Announce, Grant, Window
from protocol.role import RoleOptions


class HandOff:
    """Outgoing pages of all tickets of one worker."""

    def __init__(self, pages: Pages, options: RoleOptions) -> None:
        self._pages = pages
        self._options = options
        self.ops = LinkOps()

    def granted(self, leg: Leg, message: Grant, now: float) -> list[Effect] | None:
        """The receiver has room. None: it was granted before."""
        if leg.transfer.state is not SendState.OFFERED:
            return None
        leg.transfer.grant(message.window, message.prefix_tokens // self._pages.page_size)
        leg.prompt.granted = True
        return self.go_on(leg, now)

    def widened(self, leg: Leg, message: Window, now: float) -> list[Effect] | None:
        """The receiver took more segments. None: it was never granted."""
        if not leg.transfer.granted:
            return None
        leg.transfer.widen(message.segments)
        return self.go_on(leg, now)

    def go_on(self, leg: Leg, now: float) -> list[Effect]:
        """Announce and send what may go now; commit when all is sent."""
        leg.moved_at = now
        receiver, ticket_id = leg.ticket.receiver, leg.ticket.id
        bound = leg.prompt.reservation.bound if leg.prompt.reservation else []
        effects: list[Effect] = []
        for segment in leg.transfer.take_segments():
            first, count, index = segment.first_page, segment.n_pages, segment.index
            n_bytes = count * self._options.page_bytes
            refs = self._pages.refs(bound[first : first + count])
            effects.append(ToReceiver(receiver, Announce(ticket_id, index, first, count, n_bytes)))
            effects.append(SendPages(receiver.worker_id, ticket_id, index, refs))
            self.ops.started(receiver.worker_id, ticket_id, index, now)
        if leg.first_tokens and leg.transfer.can_commit:
            commit = leg.transfer.commit(
                leg.first_tokens,
                leg.logprobs,
                cached_tokens=leg.prompt.cached_tokens,
                prompt_logprobs=leg.prompt_logprobs,
            )
            effects.append(ToReceiver(receiver, commit))
        return effects

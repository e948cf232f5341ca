"""The sending end of one hand-off: what may be announced now, and when it is committed.

This file owns the progress of one ticket's pages out of this worker. It is pure: it computes
segments and messages; the role emits them. It must never announce a page that is not final, more
segments than the receiver's window allows, or a commit while the link still reads a page. Pages
count from the start of the sequence; the leading ones that the receiver holds are not sent, which
may leave nothing to send.

Life (``protocol.lifecycle.SEND_TABLE``):
 1. OFFERED: the prompt is being computed, nobody has granted yet; all of it is droppable.
 2. SENDING: granted. Complete pages go out after every chunk, those found in the prefix cache at
    once, the partly filled last one with the last chunk. A prompt that was complete before the
    grant, or that fits one chunk, goes out as one bulk segment.
 3. COMMITTED: every segment has left, its checksum is known, the first tokens are known.
 4. SEALED: the receiver owns the sequence. ABORTED: over for any other reason.
"""

from __future__ import annotations

from kv_transfer.layout import Segment, SegmentRule
from protocol.lifecycle import SEND_TABLE, SendEvent, SendState, follow
from protocol.messages import Commit
from protocol.types import TicketId, TokenLogprobs


class SendTransfer:
    """One ticket's outgoing pages. ``n_pages`` is what the whole prompt covers."""

    def __init__(self, ticket_id: TicketId, n_pages: int, rule: SegmentRule) -> None:
        self.ticket_id = ticket_id
        self.state = SendState.OFFERED
        self._rule = rule
        self._n_pages = n_pages
        self._first_page = 0  # pages before it are held by the receiver already
        self._announced = 0  # pages of the sequence before this one are announced
        self._final = 0  # pages of the sequence before this one never change again
        self._window = 0
        self._segments: list[Segment] = []
        self._checksums: dict[int, int] = {}

    @property
    def granted(self) -> bool:
        """The receiver has room and this end is alive."""
        return self.state in (SendState.SENDING, SendState.COMMITTED)

    @property
    def over(self) -> bool:
        """Sealed or aborted."""
        return self.state in (SendState.SEALED, SendState.ABORTED)

    @property
    def can_commit(self) -> bool:
        """All pages are announced and the link has read every one of them."""
        return (
            self.state is SendState.SENDING
            and self._announced == self._n_pages
            and len(self._checksums) == len(self._segments)
        )

    @property
    def can_announce(self) -> bool:
        """Something is final, granted, within the window and not announced."""
        return (
            self.state is SendState.SENDING and self._window > 0 and self._final > self._announced
        )

    @property
    def waits_for_receiver(self) -> bool:
        """Nothing can go on here until the receiver says something."""
        if self.state is SendState.COMMITTED:
            return True
        starved = self._window == 0 and self._final > self._announced
        return self.state is SendState.SENDING and starved

    def grant(self, window: int, prefix_pages: int) -> None:
        """The receiver has room, takes ``window`` segments at once and holds leading pages."""
        self.state = follow(SEND_TABLE, self.state, SendEvent.GRANT)
        self._window = window
        self._first_page = self._announced = min(prefix_pages, self._n_pages)

    def widen(self, segments: int) -> None:
        """The receiver has taken ``segments`` more."""
        self._window += segments

    def computed(self, final_pages: int) -> None:
        """The first ``final_pages`` pages of the sequence will not change any more."""
        self._final = final_pages

    def dropped(self) -> None:
        """The pages went to a granted ticket; the prompt will be computed again."""
        self._final = 0

    def take_segments(self) -> list[Segment]:
        """Segments to announce and send now, in order."""
        taken: list[Segment] = []
        while self.state is SendState.SENDING and self._window > 0:
            cut = self._rule.cut(self._announced, self._final)
            if cut is None:
                break
            segment = Segment(len(self._segments), *cut)
            self._segments.append(segment)
            self._announced += segment.n_pages
            self._window -= 1
            taken.append(segment)
        return taken

    def sent(self, segment: int, checksum: int) -> None:
        """The link reads this segment no more."""
        self._checksums[segment] = checksum

    def commit(
        self,
        first_tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        cached_tokens: int = 0,
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> Commit:
        """The message that ends the sending; ask ``can_commit`` first.

        ``first_tokens``, and ``logprobs`` if asked for, have one entry per choice.
        """
        self.state = follow(SEND_TABLE, self.state, SendEvent.COMMIT)
        n_pages = self._announced - self._first_page
        return Commit(
            ticket_id=self.ticket_id,
            first_tokens=first_tokens,
            n_pages=n_pages,
            n_bytes=n_pages * self._rule.page_bytes,
            checksums=tuple(self._checksums[s.index] for s in self._segments),
            logprobs=logprobs,
            cached_tokens=cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )

    def seal(self) -> None:
        """The receiver owns the sequence."""
        self.state = follow(SEND_TABLE, self.state, SendEvent.SEAL)

    def abort(self) -> None:
        """Over; nothing more is announced."""
        self.state = follow(SEND_TABLE, self.state, SendEvent.ABORT)

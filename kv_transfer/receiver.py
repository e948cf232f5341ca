"""The receiving end of one hand-off: is what arrives complete, in order and untouched?

This file owns the judgement that lets foreign KV become a sequence of this worker. It is pure:
the role binds pages and emits effects. It must never call a transfer whole unless counts,
generations and checksums agree; a failed transfer has no way back.

Pages count from the start of the sequence. The leading ones that this worker holds already
(``held``) are not sent: announcements begin after them and the commit counts the rest, which may
be nothing at all.

Life (``protocol.lifecycle.RECEIVE_TABLE``):
 1. RESERVING: in the queue for pages. RESERVED: has its credit, the sender has not offered yet.
 2. GRANTED: offer and credit met. A credit that nothing was announced for becomes LAPSED: the
    pages are with others; an announcement that comes after all must find room again.
 3. RECEIVING: every announcement is checked, gets its pages and exactly one receive.
 4. COMMITTED: the sender said what it sent (at once after GRANTED if that is nothing). When the
    last receive has ended, ``fault`` gives the verdict: SEALED, or ABORTED with the difference
    named.
"""

from __future__ import annotations

from protocol.errors import DataLoss, ErrorInfo, InternalError
from protocol.lifecycle import RECEIVE_TABLE, ReceiveEvent, ReceiveState, follow
from protocol.messages import Announce, Commit, Offer
from protocol.types import PageRef, TicketId

LIVE = (
    ReceiveState.GRANTED,
    ReceiveState.RECEIVING,
    ReceiveState.COMMITTED,
)


class ReceiveTransfer:
    """One ticket's incoming pages.

    ``n_pages`` is what the whole prompt covers here, ``n_choices`` how many first tokens come.
    """

    def __init__(
        self,
        ticket_id: TicketId,
        worker_id: str,
        n_pages: int,
        page_bytes: int,
        n_choices: int = 1,
    ) -> None:
        self.ticket_id = ticket_id
        self.worker_id = worker_id
        self.state = ReceiveState.RESERVING
        self.offer: Offer | None = None
        self.heard_at = 0.0  # when the sender last said anything about this ticket
        self.starts_at = 0.0  # when the sender means to start
        self.commit: Commit | None = None
        self._n_pages = n_pages
        self._page_bytes = page_bytes
        self._n_choices = n_choices
        self._held_pages = 0  # leading pages that are here already
        self._announced_pages = 0  # pages of the sequence before this one are here or coming
        self._refs: list[tuple[PageRef, ...]] = []  # by segment
        self._checksums: dict[int, int] = {}

    @property
    def over(self) -> bool:
        """Sealed or aborted."""
        return self.state in (ReceiveState.SEALED, ReceiveState.ABORTED)

    @property
    def live(self) -> bool:
        """Granted and not over: the sender is expected to name it in its heartbeats."""
        return self.state in LIVE

    @property
    def held_pages(self) -> int:
        """Leading pages that are not sent, because they are here already."""
        return self._held_pages

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The tokens that the sender sampled, one per choice; only after a commit."""
        if self.commit is None:
            raise DataLoss(f"{self.ticket_id} has no first token before its commit")
        return self.commit.first_tokens

    @property
    def first_token(self) -> int:
        """The first choice's first token; only after a commit."""
        return self.first_tokens[0]

    def held(self, pages: int) -> None:
        """The first ``pages`` pages are here already, and the grant says so to the sender.

        From then on they must stay here. ``InternalError`` once something was announced.
        """
        if self._refs or not 0 <= pages <= self._n_pages:
            raise InternalError(
                f"{self.ticket_id} holds {pages} pages of {self._n_pages} after "
                f"{len(self._refs)} announcements"
            )
        self._held_pages = self._announced_pages = pages

    def follow(self, event: ReceiveEvent) -> None:
        """Go to the next state; ``InternalError`` if the table does not have the pair."""
        self.state = follow(RECEIVE_TABLE, self.state, event)

    def announce_fault(self, message: Announce) -> ErrorInfo | None:
        """Why this announcement cannot be the next one of this transfer, or None."""
        expected = (len(self._refs), self._announced_pages)
        if (message.segment, message.first_page) != expected:
            return self._loss(
                f"segment {message.segment} from page {message.first_page} was announced, "
                f"segment {expected[0]} from page {expected[1]} was due"
            )
        if message.n_pages < 1 or message.first_page + message.n_pages > self._n_pages:
            return self._loss(
                f"{message.n_pages} pages from page {message.first_page} were announced for a "
                f"prompt of {self._n_pages} pages"
            )
        if message.n_bytes != message.n_pages * self._page_bytes:
            return self._loss(
                f"{message.n_bytes} bytes were announced for {message.n_pages} pages of "
                f"{self._page_bytes}"
            )
        return None

    def announced(self, refs: tuple[PageRef, ...]) -> None:
        """The next segment will be received into these pages."""
        self.follow(ReceiveEvent.ANNOUNCE)
        self._refs.append(refs)
        self._announced_pages += len(refs)

    def received(self, segment: int, checksum: int) -> None:
        """The link has written this segment and touches its pages no more."""
        self._checksums[segment] = checksum

    def committed(self, message: Commit) -> None:
        """The sender has sent everything."""
        self.follow(ReceiveEvent.COMMIT)
        self.commit = message

    @property
    def complete(self) -> bool:
        """Committed, and no receive is outstanding: the verdict is due."""
        return self.state is ReceiveState.COMMITTED and len(self._checksums) == len(self._refs)

    def refs(self) -> list[PageRef]:
        """All pages received into, with the generations they had when they were bound.

        They follow the held ones in the sequence.
        """
        return [ref for refs in self._refs for ref in refs]

    def fault(self, generations_agree: bool) -> ErrorInfo | None:
        """Why a complete transfer must not be sealed, or None."""
        commit = self.commit
        if commit is None:
            return self._loss("no commit")
        came = self._announced_pages - self._held_pages
        here = (came, came * self._page_bytes)
        if (commit.n_pages, commit.n_bytes) != here or self._announced_pages != self._n_pages:
            held = f", {self._held_pages} of which were here" if self._held_pages else ""
            return self._loss(
                f"{commit.n_pages} pages of {commit.n_bytes} bytes were committed, {here[0]} of "
                f"{here[1]} bytes came, the prompt covers {self._n_pages}{held}"
            )
        if len(commit.first_tokens) != self._n_choices:
            return self._loss(
                f"{len(commit.first_tokens)} first tokens for {self._n_choices} choices"
            )
        if len(commit.logprobs) not in (0, self._n_choices):
            return self._loss(f"{len(commit.logprobs)} logprobs for {self._n_choices} choices")
        sums = tuple(self._checksums[i] for i in range(len(self._refs)))
        if commit.checksums != sums:
            wrong = [
                i for i, (a, b) in enumerate(zip(commit.checksums, sums, strict=False)) if a != b
            ]
            return self._loss(
                f"checksums of segments {wrong} differ"
                if wrong
                else f"{len(commit.checksums)} checksums for {len(sums)} segments"
            )
        if not generations_agree:
            return self._loss("a page changed its owner while it was received into")
        return None

    def _loss(self, what: str) -> ErrorInfo:
        return DataLoss(f"transfer {self.ticket_id} from {self.worker_id}: {what}").info()

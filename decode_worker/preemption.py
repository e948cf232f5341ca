"""Who gives way when pages run out, how it leaves, and when it comes back.

This file owns the sequences that are away. It must never choose the first in rank (so somebody
always advances, and in the end everybody), nor a sequence whose pages a link writes or a fork
still copies, and never let a newcomer of the same class in before one that is away.

Life of a preemption:
 1. ``victim``: the last in rank: lowest class, then youngest. Often preempted ones rank before
    all classes (``sequence.MAX_PREEMPTIONS``).
 2. It leaves. Its pages go at once and its tokens are computed anew later (its published pages
    are found again if they last so long), or, where that is cheaper by ``protocol.costs`` and
    there is host memory, they are copied out within the next step. A copy needs a step, so it is
    begun one step before the pages are needed (``worth_moving``).
 3. Away, at its old place. While it waits only more urgent classes are placed, and
    ``MAX_OVERTAKES`` of them at most.
 4. ``next_back``: there is room for its tokens and the reserve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from decode_worker.memory import Memory
from decode_worker.sequence import MAX_PREEMPTIONS, On, Sequence, State
from kv_transfer.pages import Pages
from protocol.costs import StepCosts
from protocol.events import Count
from protocol.step import MAX_OVERTAKES, PageCopy
from protocol.types import TicketId


class Preemption:
    """The sequences of one worker that have lost their place for a while."""

    def __init__(self, pages: Pages, memory: Memory, costs: StepCosts) -> None:
        self._pages = pages
        self._memory = memory
        self._costs = costs
        self._away: dict[Sequence, None] = {}
        self._counts: list[Count] = []

    def __len__(self) -> int:
        return len(self._away)

    def take_counts(self) -> list[Count]:
        """What was preempted since the last call."""
        counts, self._counts = self._counts, []
        return counts

    # --- leaving ------------------------------------------------------------------------------

    def victim(self, pinned: Collection[Sequence]) -> Sequence | None:
        """The last in rank of those that could leave now, if that is not the only one."""
        able = [
            seq
            for seq in self._memory.seated()
            if seq.state in (State.RUNNING, State.PROMPT) and seq not in pinned
        ]
        return max(able, key=lambda seq: seq.rank) if len(able) > 1 else None

    def worth_moving(self, seq: Sequence) -> bool:
        """Copying its pages out and back is cheaper than computing its tokens again."""
        n_pages = self._pages.pages_for(seq.computed)
        if seq.state is not State.RUNNING or self._memory.host.free < n_pages:
            return False
        return self._costs.copy_s(2 * n_pages) < self._costs.recompute_s(len(seq.tokens))

    def drop(self, seq: Sequence) -> None:
        """Its pages go now; its tokens will be computed again."""
        self._memory.free(seq)
        self.missed(seq)

    def missed(self, seq: Sequence) -> None:
        """It has no pages: it waits until its tokens can be computed."""
        self._memory.stand_up(seq)
        seq.follow(On.PREEMPT)
        seq.computed = 0
        if not seq.leg.running:
            seq.leg.prompt_logprobs = ()
        self._leaves(seq, "recompute")

    def move_out(self, seq: Sequence) -> tuple[list[PageCopy], int]:
        """The copies that take it out in this step, and how many pages that will free."""
        copies = self._memory.to_host(seq)
        self._memory.stand_up(seq)
        seq.follow(On.PREEMPT)
        seq.in_step = True
        self._leaves(seq, "offload")
        return copies, sum(self._pages.holders(page) == 1 for page in seq.pages)

    def moved_out(self, seq: Sequence) -> None:
        """The step with its copies has ended well."""
        host, seq.host = seq.host, ()
        self._memory.free(seq)
        seq.host = host
        if seq.state is State.OVER:
            self._memory.free_host(seq)

    def not_moved(self, seq: Sequence) -> None:
        """The step with its copies failed: what is in host memory is nothing."""
        self._memory.free(seq)
        seq.computed = 0

    def forget(self, seq: Sequence) -> None:
        """It has ended."""
        self._away.pop(seq, None)

    # --- coming back --------------------------------------------------------------------------

    def bars(self, priority: int) -> bool:
        """A newcomer of this class must wait, because somebody who is away comes first."""
        if not self._away:
            return False
        head = self._head()
        return head.preempted >= MAX_PREEMPTIONS or priority >= head.leg.ticket.priority

    def passed_over(self) -> None:
        """A newcomer was placed all the same. That happens only so often."""
        if self._away:
            head = self._head()
            head.overtaken += 1
            if head.overtaken >= MAX_OVERTAKES:
                head.preempted = MAX_PREEMPTIONS

    def next_back(self) -> Sequence | None:
        """Who has its place again now, still without pages; nobody before the first in rank."""
        if not self._away:
            return None
        head = self._head()
        if not self._memory.seat_free(len(head.choices)):
            return None
        if not self._memory.fits(head, self._memory.promised()):
            return None
        del self._away[head]
        return head

    def reasons(self) -> Iterator[tuple[TicketId, str]]:
        """Why those that are away do not advance."""
        for seq in self._away:
            where = f"{len(seq.host)} in host memory, " if seq.host else ""
            yield (
                seq.leg.ticket.id,
                f"preempted: needs {self._memory.need(seq)} pages ({where}{self._memory})",
            )

    def _head(self) -> Sequence:
        return min(self._away, key=lambda seq: seq.rank)

    def _leaves(self, seq: Sequence, how: str) -> None:
        seq.preempted += 1
        seq.overtaken = 0
        self._away[seq] = None
        self._counts.append(Count("preemptions", how))

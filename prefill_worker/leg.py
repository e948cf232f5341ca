"""One ticket on a prefill worker, from ``Open`` to ``Done``, and whether it may be opened at all.

This file owns the record and the refusals. It decides nothing about time, pages or links.

Life of a leg: made by ``Open`` -> ``began_at`` with its first step -> ``computed_at`` with its
last chunk -> ``outcome`` set once -> its pages drain.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.pages import Pages
from kv_transfer.sender import SendTransfer
from prefill_worker.scheduler import Prompt
from protocol.errors import DeadlineExceeded, ErrorInfo, NeverFits, Overloaded, WrongState
from protocol.role import RoleOptions
from protocol.types import Outcome, Peer, StageTiming, Ticket, stage_timings


@dataclass(slots=True, eq=False)
class Leg:
    """One ticket on this worker. Instants are the runtime's monotonic seconds."""

    router_id: str
    ticket: Ticket
    prompt: Prompt
    transfer: SendTransfer
    opened_at: float
    deadline: float
    moved_at: float  # when the hand-off last went on
    began_at: float | None = None  # first step
    computed_at: float | None = None  # last chunk done
    first_token: int | None = None
    outcome: Outcome | None = None  # set: over, and nothing more is decided about it
    error: ErrorInfo | None = None

    def drop_work(self) -> None:
        """Its pages went to a granted ticket: everything is computed again."""
        self.transfer.dropped()
        self.first_token = self.computed_at = None

    def timings(self, worker_id: str) -> tuple[StageTiming, ...]:
        """How long its stages took, as far as it came."""
        marks = [
            ("queue", self.opened_at, self.began_at),
            ("prefill", self.began_at, self.computed_at),
            ("transfer", self.computed_at, self.moved_at),
        ]
        return stage_timings(worker_id, marks)


def refusal(
    ticket: Ticket, me: Peer, pages: Pages, options: RoleOptions, waiting: int
) -> ErrorInfo | None:
    """Why this worker does not take the ticket, with the numbers, or None."""
    if ticket.sender != me:
        named = ticket.sender
        sender = f"{named.worker_id} ({named.incarnation})" if named else "nobody"
        return WrongState(
            f"the ticket's sender is {sender}, this is {me.worker_id} ({me.incarnation})"
        ).info()
    if (error := options.refusal(ticket)) is not None:
        return error
    need = pages.pages_for(len(ticket.tokens))
    if need > pages.total:
        return NeverFits(
            f"the prompt's {len(ticket.tokens)} tokens need {need} pages of {pages.page_size}; "
            f"{me.worker_id} has {pages.total}"
        ).info()
    if ticket.remaining_s <= 0:
        return DeadlineExceeded("the deadline passed before the ticket came").info()
    if waiting >= options.max_waiting:
        return Overloaded(
            f"{waiting} prompts wait on {me.worker_id}", retry_after_s=options.retry_after_s
        ).info()
    return None

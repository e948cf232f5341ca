"""One ticket on a prefill worker, from ``Open`` to ``Done``, and whether it may be opened at all.

This file owns the record and the refusals. It decides nothing about time, pages or links.

Life of a leg: made by ``Open`` -> ``began_at`` with its first step -> ``computed_at`` with its
last chunk -> ``outcome`` set once -> its pages drain.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.pages import Pages
from kv_transfer.sender import SendTransfer
from prefill_worker.prompt import Prompt
from protocol.errors import (
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    NeverFits,
    Overloaded,
    WrongState,
)
from protocol.role import RoleOptions
from protocol.step import RowResult, StepRow
from protocol.types import Outcome, Peer, StageTiming, Ticket, TokenLogprobs, stage_timings


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
    first_tokens: tuple[int, ...] = ()  # one per choice, once its last chunk is computed
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # as far as it is computed
    in_step: bool = False  # the running step computes it
    outcome: Outcome | None = None  # set: over, and nothing more is decided about it
    error: ErrorInfo | None = None

    def drop_work(self) -> None:
        """Its pages went to a granted ticket: what the cache does not keep is computed again."""
        self.transfer.dropped()
        self.first_tokens = self.logprobs = self.prompt_logprobs = ()
        self.computed_at = None

    def take(self, row: StepRow, got: RowResult, now: float) -> ErrorInfo | None:
        """Keep what a step gave for this prompt. Why that must fail it, if it must."""
        if got.error is not None:
            return got.error
        due = min(row.start + len(row.tokens), row.n_prompt - 1) - row.start
        counts = [
            ("tokens", len(got.tokens), len(row.choices) if row.sample else 0),
            ("logprobs", len(got.logprobs), len(row.choices) if self._wants(row) else 0),
            (
                "prompt logprobs",
                len(got.prompt_logprobs),
                max(0, due) if row.prompt_logprobs is not None else 0,
            ),
        ]
        for what, came, expected in counts:
            if came != expected:
                return InternalError(
                    f"the step gave {came} {what} for {self.ticket.id}, {expected} were due"
                ).info()
        self.prompt_logprobs += got.prompt_logprobs
        if row.sample is not None:
            self.first_tokens, self.logprobs, self.computed_at = got.tokens, got.logprobs, now
        return None

    def _wants(self, row: StepRow) -> bool:
        return row.sample is not None and row.sample.logprobs is not None

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
    if (error := options.refusal(ticket, one_sequence=True)) is not None:
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

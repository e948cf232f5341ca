"""One ticket on a decode worker: a sequence of tokens, the pages of its KV, how far it has come.

This file owns the record, the refusals and the rule by which an answer ends. It decides nothing
about time, pages or links.

Life of a leg: ``Open`` -> waits for a place -> reserved -> local: its prompt is computed here; or
remote: its KV arrives (``transfer``) -> ``running``: one token per step -> ``outcome`` set once
-> its pages drain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.pages import Pages, Reservation
from kv_transfer.receiver import ReceiveTransfer
from protocol.errors import DeadlineExceeded, ErrorInfo, NeverFits, Overloaded, WrongState
from protocol.messages import TokenItem
from protocol.role import RoleOptions
from protocol.types import FinishReason, Outcome, Peer, StageTiming, Ticket, stage_timings


@dataclass(slots=True, eq=False)
class Leg:
    """One ticket on this worker. Instants are the runtime's monotonic seconds."""

    router_id: str
    ticket: Ticket
    opened_at: float
    deadline: float
    tokens: list[int]  # prompt and answer; the last one's KV is not computed yet
    transfer: ReceiveTransfer | None = None  # None: local
    computed: int = 0  # leading positions whose KV is in our pages
    reservation: Reservation | None = None
    pages: tuple[int, ...] = ()  # what ``reservation`` has bound, as steps use it
    running: bool = False  # it has its first token here
    reserved_at: float | None = None
    began_at: float | None = None  # first chunk of a local prompt
    running_at: float | None = None
    outcome: Outcome | None = None  # set: over, and nothing more is decided about it
    error: ErrorInfo | None = None
    waits_for: str = field(default="")  # why no step takes it in

    @property
    def n_answer(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.ticket.n_prompt

    def take(self, token: int, eos_token_ids: tuple[int, ...]) -> TokenItem:
        """Append a sampled token: what its router hears, and why the answer ends, if it does."""
        index = self.n_answer
        self.tokens.append(token)
        reason: FinishReason | None = None
        if token in eos_token_ids and not self.ticket.sampling.ignore_eos:
            reason = FinishReason.STOP
        elif index + 1 >= self.ticket.sampling.max_tokens:
            reason = FinishReason.LENGTH
        return TokenItem(self.ticket.id, index, (token,), reason)

    def timings(self, worker_id: str, now: float) -> tuple[StageTiming, ...]:
        """How long its stages took, as far as it came. The sender reports those of a hand-off."""
        marks = [("reserve", self.opened_at, self.reserved_at), ("decode", self.running_at, now)]
        if self.transfer is None:
            marks.insert(1, ("queue", self.reserved_at, self.began_at))
            marks.insert(2, ("prefill", self.began_at, self.running_at))
        return stage_timings(worker_id, marks)


def refusal(
    ticket: Ticket, me: Peer, pages: Pages, options: RoleOptions, waiting: int
) -> ErrorInfo | None:
    """Why this worker does not take the ticket, with the numbers, or None."""
    if ticket.receiver != me:
        named = ticket.receiver
        return WrongState(
            f"the ticket's receiver is {named.worker_id} ({named.incarnation}), "
            f"this is {me.worker_id} ({me.incarnation})"
        ).info()
    if (error := options.refusal(ticket)) is not None:
        return error
    need = pages.pages_for(ticket.n_tokens_reserved)
    if need > pages.total:
        return NeverFits(
            f"a prompt of {ticket.n_prompt} tokens and max_tokens {ticket.sampling.max_tokens} "
            f"need {need} pages of {pages.page_size}; {me.worker_id} has {pages.total}"
        ).info()
    if ticket.remaining_s <= 0:
        return DeadlineExceeded("the deadline passed before the ticket came").info()
    if waiting >= options.max_waiting:
        return Overloaded(
            f"{waiting} requests wait for a place on {me.worker_id}",
            retry_after_s=options.retry_after_s,
        ).info()
    return None

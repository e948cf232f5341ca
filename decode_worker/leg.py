"""One ticket on a decode worker: its sequences, its hand-off, how it ends.

This file owns the record, the refusals and the parting of a ticket's choices. It decides nothing
about time, pages or links.

Life of a leg: ``Open`` -> waits for a place -> local: its prompt is computed here; or remote: its
KV arrives (``transfer``) -> ``part``: the first tokens are there, one sequence per choice runs ->
``outcome`` set once, at the latest when the last choice has ended -> its pages drain.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from decode_worker.sequence import On, Sequence, State
from kv_transfer.pages import Pages
from kv_transfer.receiver import ReceiveTransfer
from protocol.errors import DeadlineExceeded, ErrorInfo, NeverFits, Overloaded, WrongState
from protocol.messages import TokenItem
from protocol.page_hash import PageChain, salted
from protocol.role import RoleOptions
from protocol.types import (
    Outcome,
    Peer,
    StageTiming,
    Ticket,
    TokenLogprobs,
    stage_timings,
)


@dataclass(slots=True, eq=False)
class Leg:
    """One ticket on this worker. Instants are the runtime's monotonic seconds."""

    router_id: str
    ticket: Ticket
    opened_at: float
    deadline: float
    transfer: ReceiveTransfer | None = None  # None: local
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that nobody computed for this ticket
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    reserved_at: float | None = None
    began_at: float | None = None  # first chunk of a local prompt
    running_at: float | None = None
    outcome: Outcome | None = None  # set: over, and nothing more is decided about it
    error: ErrorInfo | None = None
    waits_for: str = field(default="")  # why no step takes it in

    @property
    def first(self) -> Sequence:
        """The sequence that all choices began with."""
        return self.sequences[0]

    @property
    def running(self) -> bool:
        """Its first tokens are known."""
        return self.running_at is not None

    @property
    def in_step(self) -> bool:
        """A running step touches one of its sequences."""
        return any(seq.in_step for seq in self.sequences)

    @property
    def all_over(self) -> bool:
        """Every choice has ended."""
        return all(seq.state is State.OVER for seq in self.sequences)

    def choice(self, choice: int) -> Sequence | None:
        """The sequence of one choice, if it has not ended."""
        for seq in self.sequences:
            if seq.choices == (choice,) and seq.state is not State.OVER:
                return seq
        return None

    def part(
        self,
        tokens: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs],
        eos_token_ids: tuple[int, ...],
    ) -> list[TokenItem]:
        """The first token of every choice: from now on each is a sequence of its own.

        The prompt's pages stay with the first choice that goes on; the others are ``forking``, or
        over if their answer ends with this token. Those have their reason in their item.
        """
        first = self.first
        parts = [
            Sequence(self, (c,), list(first.tokens), first.serial, first.longest, first.chain)
            for c in first.choices
        ]
        items = [
            TokenItem(
                self.ticket.id,
                seq.n_answer,
                (tokens[i],),
                seq.take(tokens[i], eos_token_ids),
                choice=seq.choices[0],
                logprobs=tuple(logprobs[i : i + 1]),
                cached_tokens=self.cached_tokens,
                prompt_logprobs=self.prompt_logprobs,
            )
            for i, seq in enumerate(parts)
        ]
        going_on = [i for i, seq in enumerate(parts) if seq.finish_reason is None]
        heir = going_on[0] if going_on else 0
        first.choices, first.tokens = parts[heir].choices, parts[heir].tokens
        first.finish_reason = parts[heir].finish_reason
        parts[heir] = first
        for seq in parts:
            if seq is first:
                continue
            if seq.finish_reason is None:
                seq.state, seq.parent, seq.chain = State.FORKING, first, first.chain.fork()
            else:
                seq.follow(On.END)
        self.sequences, self.prompt_logprobs = parts, ()
        return items

    def timings(self, worker_id: str, now: float) -> tuple[StageTiming, ...]:
        """How long its stages took, as far as it came. The sender reports those of a hand-off."""
        marks = [("reserve", self.opened_at, self.reserved_at), ("decode", self.running_at, now)]
        if self.transfer is None:
            marks.insert(1, ("queue", self.reserved_at, self.began_at))
            marks.insert(2, ("prefill", self.began_at, self.running_at))
        return stage_timings(worker_id, marks)


def begin(
    router_id: str, ticket: Ticket, serial: int, now: float, pages: Pages, options: RoleOptions
) -> Leg:
    """A new leg with its one sequence for all choices."""
    leg = Leg(router_id, ticket, now, now + ticket.remaining_s)
    chain = PageChain(pages.page_size, salted(options.hash_root, ticket.salt))
    choices = tuple(range(ticket.n_choices))
    longest = ticket.n_tokens_reserved
    leg.sequences.append(Sequence(leg, choices, list(ticket.tokens), serial, longest, chain))
    if ticket.sender is not None:
        n_pages = pages.pages_for(len(ticket.tokens))
        leg.transfer = ReceiveTransfer(
            ticket.id, ticket.sender.worker_id, n_pages, options.page_bytes, ticket.n_choices
        )
    return leg


def most_pages(ticket: Ticket, pages: Pages) -> int:
    """Pages of the whole ticket at its longest; its choices share the full pages of the prompt."""
    n_shared = len(ticket.tokens) // pages.page_size if ticket.n_choices > 1 else 0
    return n_shared + ticket.n_choices * (pages.pages_for(ticket.n_tokens_reserved) - n_shared)


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
    need = most_pages(ticket, pages)
    if need > pages.total:
        choices = f", {ticket.n_choices} choices," if ticket.n_choices > 1 else ""
        return NeverFits(
            f"a prompt of {ticket.n_prompt} tokens and max_tokens {ticket.sampling.max_tokens}"
            f"{choices} need {need} pages of {pages.page_size}; {me.worker_id} has {pages.total}"
        ).info()
    if ticket.remaining_s <= 0:
        return DeadlineExceeded("the deadline passed before the ticket came").info()
    if waiting >= options.max_waiting:
        return Overloaded(
            f"{waiting} requests wait for a place on {me.worker_id}",
            retry_after_s=options.retry_after_s,
        ).info()
    return None

"""How a decode worker fills its steps: decodes first, prompt chunks in what is left.

This file owns the running sequences and the prompts that have pages. It must never leave out a
running sequence (but one for which there is not one page, and whose turn to give way it is not),
never compute more than the budget (but for whole prompts when chunking is off, which exists to
show what that does), and never write a page that two sequences share.

A plan is made in this order: parted choices get their pages; running sequences get the page of
their next token, and if there are too few, somebody is preempted; those that are away come back
if there is room; one row per running sequence; prompt chunks, most urgent first.

Life of a sequence here: ``join`` with its pages reserved -> prompt chunks -> ``run``: one token in
every step -> ``leave``. One whose KV came from a prefill worker begins with ``run``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from decode_worker.memory import Memory
from decode_worker.preemption import Preemption
from decode_worker.sequence import On, Sequence, SequenceId, State
from protocol.costs import StepShape, attended_by
from protocol.errors import InternalError
from protocol.role import RoleOptions
from protocol.step import AgeingQueue, PageCopy, StepPlan, StepRow, prefill_share
from protocol.types import TicketId

_FOR_EVER = 1 << 30


@dataclass(slots=True)
class Step:
    """A plan and whom it is about. ``sequences`` is parallel to the plan's rows."""

    plan: StepPlan
    sequences: list[Sequence]
    shape: StepShape
    leaving: list[Sequence]  # copied to host memory
    returning: list[Sequence]  # copied back


@dataclass(slots=True)
class _Draft:
    """A step in the making."""

    rows: list[StepRow] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    advance: dict[TicketId, int] = field(default_factory=dict)
    copies: list[PageCopy] = field(default_factory=list)
    leaving: list[Sequence] = field(default_factory=list)
    returning: list[Sequence] = field(default_factory=list)
    pinned: set[Sequence] = field(default_factory=set)  # nobody preempts these in this plan
    stalled: set[Sequence] = field(default_factory=set)  # not one page for their next token
    preempts: bool = False
    attended: int = 0


def _nothing_to_revoke() -> bool:
    return False


class DecodeScheduler:
    """The sequences that one decode worker computes.

    ``revoke`` takes a credit back that nobody uses yet; whether there was one.
    """

    def __init__(
        self,
        memory: Memory,
        preemption: Preemption,
        options: RoleOptions,
        revoke: Callable[[], bool] = _nothing_to_revoke,
    ) -> None:
        self._memory = memory
        self._preemption = preemption
        self._options = options
        self._revoke = revoke
        self._running: dict[Sequence, None] = {}
        self._prompts: dict[SequenceId, Sequence] = {}
        self._queue: AgeingQueue[SequenceId] = AgeingQueue()
        self._parted: list[Sequence] = []  # whose further choices wait for their pages

    @property
    def n_running(self) -> int:
        """Sequences that get a token in every step."""
        return len(self._running)

    @property
    def n_prompts(self) -> int:
        """Prompts that are not computed to their end."""
        return len(self._prompts)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute here."""
        return sum(len(seq.tokens) - seq.computed for seq in self._prompts.values())

    def join(self, seq: Sequence, *, again: bool = False) -> None:
        """Take in a prompt that has its pages. ``again``: it was away, and comes first."""
        ticket = seq.leg.ticket
        self._prompts[seq.id] = seq
        self._queue.put(seq.id, ticket.priority, -inf if again else ticket.order_key, seq.serial)

    def run(self, seq: Sequence) -> None:
        """It has its next token: from now on it runs."""
        self._leave_prompts(seq)
        self._running[seq] = None

    def part(self, parent: Sequence) -> None:
        """Choices have parted from ``parent``: they get their pages with the next plan."""
        self._parted.append(parent)

    def leave(self, seq: Sequence) -> None:
        """No later step holds this sequence."""
        self._running.pop(seq, None)
        self._leave_prompts(seq)
        self._preemption.forget(seq)

    def plan(self, others: dict[TicketId, str], now: float) -> Step | None:
        """The next step, or None. ``others`` are requests that cannot be computed, with why;
        the dictionary becomes the plan's."""
        draft = _Draft()
        if self._parted:
            self._fork(draft)
        self._grow(draft)
        if self._memory.host.total:
            self._make_way(draft)
        if len(self._preemption):
            # Not in the same breath as somebody gives way, unless nobody else is there.
            beside = self._running or self._prompts or draft.leaving
            if not (draft.preempts and beside):
                self._bring_back(draft)
        fewest = self._decodes(draft)
        why = self._chunks(draft, now)
        if not draft.rows and not draft.copies:
            return None
        self._explain(draft, why, others)
        for seq in draft.sequences:
            seq.in_step = True
        return Step(
            StepPlan(
                draft.advance,
                tuple(draft.rows),
                others,
                tuple(draft.copies),
                self._repeats(draft, fewest),
            ),
            draft.sequences,
            StepShape(sum(draft.advance.values()), draft.attended, len(draft.copies)),
            draft.leaving,
            draft.returning,
        )

    def grow_again(self, sequences: list[Sequence]) -> None:
        """A repeat of the last plan: every sequence gets the page of its next token.

        ``InternalError`` where the plan's ``repeats`` did not allow it.
        """
        for seq in sequences:
            if seq.computed >= seq.capacity and not self._memory.reach(seq, 1):
                raise InternalError("a plan was repeated more often than its pages allow")

    # --- pages --------------------------------------------------------------------------------

    def _fork(self, draft: _Draft) -> None:
        for parent in self._parted:
            ran, copies, left = self._memory.fork(parent)
            draft.copies += copies
            draft.pinned.update(ran, (parent,))
            self._running.update(dict.fromkeys(ran))
            for seq in left:
                draft.preempts = True
                self._preemption.missed(seq)
        self._parted.clear()

    def _grow(self, draft: _Draft) -> None:
        """Bind the page of every running sequence's next token, or let somebody give way."""
        growing = [seq for seq in self._running if seq.computed >= seq.capacity]
        if len(growing) > self._memory.available:
            growing.sort(key=lambda seq: seq.rank)
        for seq in growing:
            while seq.state is State.RUNNING and not self._memory.reach(seq, 1):
                if self._revoke():
                    continue
                victim = self._preemption.victim(draft.pinned)
                if victim is None or victim.rank < seq.rank:
                    draft.stalled.add(seq)
                    break
                draft.preempts = True
                self._out(victim)
                self._preemption.drop(victim)

    def _make_way(self, draft: _Draft) -> None:
        """Begin to move somebody to host memory if the next step will lack pages."""
        soon = {seq for seq in self._running if seq.computed + 1 >= seq.capacity}
        room = self._memory.available
        while len(soon) > room:
            victim = self._preemption.victim(draft.pinned)
            if victim is None or not self._preemption.worth_moving(victim):
                return
            draft.preempts = True
            self._out(victim)
            soon.discard(victim)
            copies, freed = self._preemption.move_out(victim)
            draft.copies += copies
            draft.leaving.append(victim)
            room += freed

    def _bring_back(self, draft: _Draft) -> None:
        while (seq := self._preemption.next_back()) is not None:
            if not seq.host:
                self._memory.place(seq, On.AGAIN)
                self.join(seq, again=True)
                continue
            draft.copies += self._memory.from_host(seq)
            draft.returning.append(seq)
            self._memory.reach(seq, 1)
            self._running[seq] = None

    # --- rows ---------------------------------------------------------------------------------

    def _decodes(self, draft: _Draft) -> int:
        """A row per running sequence; how often all of them could repeat it."""
        rows, advance, stalled = draft.rows, draft.advance, draft.stalled
        fewest, fewest_free, attended = _FOR_EVER, _FOR_EVER, 0
        running = [s for s in self._running if s not in stalled] if stalled else self._running
        for seq in running:
            ticket, tokens, start = seq.leg.ticket, seq.tokens, seq.computed
            n_tokens, n_prompt = len(tokens), ticket.n_prompt
            rows.append(
                StepRow(
                    ticket.id,
                    tokens[start:],
                    start,
                    seq.pages,
                    ticket.sampling,
                    n_tokens - n_prompt,
                    seq.choices,
                    tokens,
                    n_prompt,
                )
            )
            if len(seq.leg.sequences) == 1:
                advance[ticket.id] = 1
            else:
                advance[ticket.id] = advance.get(ticket.id, 0) + 1
            attended += n_tokens
            fewest = min(fewest, seq.longest - n_tokens)
            fewest_free = min(fewest_free, seq.capacity - n_tokens)
        draft.sequences.extend(running)
        draft.attended = attended
        if not rows:
            return 0
        each = self._memory.available // len(rows)  # pages that every sequence may take
        if self._memory.host.total:  # somebody would be moved out as soon as there is not one each
            each, fewest_free = each - 1, 0
        return min(fewest - 1, max(fewest_free, each * self._memory.page_size - 1))

    def _chunks(self, draft: _Draft, now: float) -> str:
        """Prompt chunks in what is left; why whoever is left out is left out."""
        options, n_decodes = self._options, len(draft.rows)
        share = prefill_share(options.max_num_batched_tokens, n_decodes, options.min_prefill_tokens)
        left = share
        served: list[SequenceId] = []
        for one in self._queue.in_order():
            if left <= 0 or len(draft.rows) >= options.max_num_seqs:
                break
            seq = self._prompts[one]
            n = len(seq.tokens) - seq.computed
            if options.chunked_prefill:
                n = min(n, left)
            elif served and n > left:
                continue
            seq.leg.began_at = now if seq.leg.began_at is None else seq.leg.began_at
            draft.attended += attended_by(seq.computed, n)
            draft.rows.append(self._chunk(seq, n))
            draft.sequences.append(seq)
            ticket_id = one[0]
            draft.advance[ticket_id] = draft.advance.get(ticket_id, 0) + n
            served.append(one)
            left -= n
        self._queue.served(served)
        return (
            f"{len(served)} more urgent prompts use {share - left} of the {share} tokens "
            f"that {n_decodes} decodes leave"
        )

    def _chunk(self, seq: Sequence, n: int) -> StepRow:
        if not self._memory.reach(seq, n):
            raise InternalError(f"{seq.leg.ticket.id} has no pages for its prompt")
        leg, start, end = seq.leg, seq.computed, seq.computed + n
        sampling = leg.ticket.sampling
        return StepRow(
            ticket_id=leg.ticket.id,
            tokens=seq.tokens[start:end],
            start=start,
            pages=seq.pages,
            sample=sampling if end == len(seq.tokens) else None,
            token_index=seq.n_answer,
            choices=seq.choices,
            history=seq.tokens,
            n_prompt=leg.ticket.n_prompt,
            prompt_logprobs=None if leg.running else sampling.prompt_logprobs,
        )

    # --- what is said of it -------------------------------------------------------------------

    def _explain(self, draft: _Draft, why: str, others: dict[TicketId, str]) -> None:
        """Add the reasons of everybody who has pages, or had, and does not advance."""
        reasons = {ticket_id: why for ticket_id, _ in self._prompts}
        if len(self._preemption):
            reasons.update(self._preemption.reasons())
        for seq in draft.stalled:
            reasons[seq.leg.ticket.id] = (
                f"not one page for its next token, and nobody may give way: {self._memory}"
            )
        for ticket_id, reason in reasons.items():
            if ticket_id not in draft.advance:
                others[ticket_id] = reason

    def _repeats(self, draft: _Draft, fewest: int) -> int:
        """How often the plan could be run again, each row one token further.

        Only a plan of decodes alone: until the first answer reaches its length, and as long as
        the pages last without anybody giving way.
        """
        if self._prompts or draft.copies or draft.stalled or draft.preempts:
            return 0
        return 0 if len(self._preemption) else max(fewest, 0)

    # --- details ------------------------------------------------------------------------------

    def _out(self, seq: Sequence) -> None:
        self._running.pop(seq, None)
        self._leave_prompts(seq)

    def _leave_prompts(self, seq: Sequence) -> None:
        if self._prompts.pop(seq.id, None) is not None:
            self._queue.remove(seq.id)

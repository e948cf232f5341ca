"""One decode role in a small world of its own: a device with real page memory, senders, routers.

A page is a list of (position, token) cells; a copy copies cells; freed pages are wiped; a row may
only write pages that nobody else refers to. Before a token is drawn, every cell of the sequence
must hold its own token at its own position, so a page used too early, too late or by two owners
shows at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from unit.decode_worker.decode_traffic import ME, SIZE, answer, next_token

from decode_worker.role import DecodeRole
from decode_worker.sequence import State
from kv_transfer.pages import Pages
from protocol.errors import ErrorInfo
from protocol.events import (
    Count,
    Effect,
    Event,
    FromPeer,
    FromRouter,
    ReceivePages,
    SegmentReceived,
    ToRouter,
    ToSender,
)
from protocol.messages import (
    Announce,
    Cancel,
    Commit,
    Done,
    Grant,
    Offer,
    Open,
    Stop,
    TokenItem,
    Tokens,
)
from protocol.role import RoleOptions
from protocol.step import CopyKind, PageCopy, RowResult, StepPlan, StepResult, StepRow
from protocol.types import FinishReason, Outcome, PageRef, Ticket, TicketId

BROKEN = ErrorInfo("INTERNAL", "broken")
Cell = tuple[int, int] | None


@dataclass
class Faults:
    """How likely each is, per occasion."""

    cancel: float = 0.0
    stop: float = 0.0
    row: float = 0.0
    step: float = 0.0


@dataclass(eq=False)
class Record:
    """What the router knows about one ticket."""

    ticket: Ticket
    opened: int  # steps so far
    said: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    cached: int = 0
    done: Done | None = None


class DecodeWorld:
    """Everything around one role."""

    def __init__(
        self, seed: int, total: int, options: RoleOptions, faults: Faults | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.options = options
        self.faults = faults or Faults()
        self.pages = Pages(total, SIZE)
        self.role = DecodeRole(ME, self.pages, options)
        self.memory: list[list[Cell]] = [[None] * SIZE for _ in range(total)]
        self.host: list[list[Cell]] = [[None] * SIZE for _ in range(options.host_pages)]
        self.records: dict[TicketId, Record] = {}
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self.steps = 0
        self.waited = 0  # most steps between an Open and its Done
        self._first_page: dict[tuple[TicketId, int], int] = {}
        self._later: list[Callable[[], None]] = []  # what senders and links will do
        self._plan: StepPlan | None = None
        self._result: StepResult | None = None

    # --- the world's turns --------------------------------------------------------------------

    def open(self, ticket: Ticket) -> None:
        """A router opens a ticket; its sender offers it."""
        self.records[ticket.id] = Record(ticket, self.steps)
        self.submit(FromRouter("r", Open(ticket)))
        if ticket.sender is not None:
            offer = Offer(ticket.id, len(ticket.tokens), 0.0)
            self._later.append(lambda: self.submit(FromPeer("prefill-0", offer)))

    def turn(self) -> None:
        """One thing happens."""
        self.now += self.random.random() * 0.02
        pick = self.random.random()
        if self._later and pick < 0.4:
            # One stream and one link: in order.
            self._later.pop(0)()
        elif pick < 0.45:
            self._effects(self.role.tick(self.now))
        elif self._plan is None:
            self.begin_step()
        else:
            self.end_step()

    def run(self, turns: int) -> None:
        """Go on until nothing is left to do; it must come to that."""
        for _ in range(turns):
            if self.role.is_idle() and not self._later:
                return
            self.turn()
        left = [str(r.ticket.id) for r in self.records.values() if r.done is None]
        raise AssertionError(f"after {self.steps} steps these go on: {left[:9]}")

    def submit(self, event: Event) -> None:
        """Something arrives at the role."""
        self._effects(self.role.handle(event, self.now))

    # --- the device ---------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Ask for a plan; its work happens now or, as late as possible, when it ends."""
        able = [
            seq for seq in self.role._memory.seated() if seq.state in (State.RUNNING, State.PROMPT)
        ]
        first = min(able, key=lambda seq: seq.rank, default=None)
        self._plan = plan = self.role.plan(self.now)
        self._wipe()
        assert first is None or first.state is not State.AWAY, "the first in rank gave way"
        if plan is None:
            return
        self.steps += 1
        self._check_plan(plan)
        self._result = self._compute(plan) if self.random.random() < 0.5 else None

    def end_step(self) -> None:
        """The step is over."""
        plan, self._plan = self._plan, None
        assert plan is not None
        result = self._result or self._compute(plan)
        if self.random.random() < self.faults.step:
            self._effects(self.role.step_failed(BROKEN, self.now))
        else:
            self._effects(self.role.step_done(result, self.now))

    def _check_plan(self, plan: StepPlan) -> None:
        options = self.options
        assert len(plan.rows) <= options.max_num_seqs
        if options.chunked_prefill:
            assert plan.n_tokens <= options.max_num_batched_tokens
        stalled = [why for why in plan.reasons.values() if why.startswith("not one page")]
        self.counts["stalled"] += len(stalled)
        total: Counter[TicketId] = Counter()
        for row in plan.rows:
            total[row.ticket_id] += len(row.tokens)
        assert dict(plan.advance) == dict(total)
        running = {i for i, r in self.records.items() if r.done is None}
        assert set(plan.advance) <= running
        assert not running - set(plan.advance) - set(plan.reasons), "no reason is given"
        assert not set(plan.reasons) & set(plan.advance)
        written = [p for row in plan.rows for p in self._pages_written(row)]
        assert len(written) == len(set(written)), "two rows write one page"
        assert all(self.pages.may_write(p) for p in written), "a shared page is written"

    def _pages_written(self, row: StepRow) -> set[int]:
        end = row.start + len(row.tokens)
        return {row.pages[i // SIZE] for i in range(row.start, end)}

    def _compute(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            self._copy(copy)
        return StepResult(tuple(self._row(row) for row in plan.rows))

    def _copy(self, copy: PageCopy) -> None:
        source = self.host if copy.kind is CopyKind.FROM_HOST else self.memory
        target = self.host if copy.kind is CopyKind.TO_HOST else self.memory
        target[copy.target] = list(source[copy.source])
        self.counts[copy.kind] += 1

    def _row(self, row: StepRow) -> RowResult:
        ticket = self.records[row.ticket_id].ticket
        for i, token in enumerate(row.tokens, row.start):
            self.memory[row.pages[i // SIZE]][i % SIZE] = (i, token)
        if row.sample is None:
            return RowResult()
        end = row.start + len(row.tokens)
        seen = [self.memory[row.pages[i // SIZE]][i % SIZE] for i in range(end)]
        assert seen == list(enumerate(row.history[:end])), f"{row.ticket_id}: foreign KV"
        assert end == len(row.history) and row.n_prompt == ticket.n_prompt
        assert row.token_index == end - ticket.n_prompt
        if self.random.random() < self.faults.row:
            return RowResult(error=BROKEN)
        seed = row.sample.seed
        return RowResult(tuple(next_token(row.history, seed, c) for c in row.choices))

    # --- senders, links, routers --------------------------------------------------------------

    def _wipe(self) -> None:
        for page in self.pages.take_freed():
            self.memory[page] = [None] * SIZE

    def _effects(self, effects: list[Effect]) -> None:
        self._wipe()
        for effect in effects:
            match effect:
                case ToRouter(_, Tokens(items)):
                    for item in items:
                        self._hear(item)
                case ToRouter(_, Done() as done):
                    record = self.records[done.ticket_id]
                    assert record.done is None
                    record.done = done
                    self.waited = max(self.waited, self.steps - record.opened)
                case ToSender(_, Grant() as grant):
                    self._later.append(lambda g=grant: self._send(g))
                case ReceivePages() as receive:
                    self._later.append(lambda r=receive: self._received(r))
                case Count(metric, label):
                    self.counts[f"{metric} {label}"] += 1
        self.role.check_integrity()

    def _hear(self, item: TokenItem) -> None:
        record, choice = self.records[item.ticket_id], item.choice
        said = record.said.setdefault(choice, [])
        assert record.done is None and choice not in record.reasons, item
        before = len(record.ticket.tokens) - record.ticket.n_prompt
        assert item.index == len(said) + before, item
        said += item.token_ids
        if item.cached_tokens:
            assert len(said) == 1, "cached tokens ride on the first item"
            record.cached = item.cached_tokens
        if item.finish_reason is not None:
            record.reasons[choice] = item.finish_reason
        elif self.random.random() < self.faults.stop:
            record.stopped.add(choice)
            stop = Stop(item.ticket_id, item.index, choice)
            self._later.append(lambda: self.submit(FromRouter("r", stop)))
        if self.random.random() < self.faults.cancel:
            cancel = Cancel(item.ticket_id, "gone")
            self._later.append(lambda: self.submit(FromRouter("r", cancel)))

    def _send(self, grant: Grant) -> None:
        """Announce what the receiver lacks, then commit."""
        ticket = self.records[grant.ticket_id].ticket
        n_pages = -(-len(ticket.tokens) // SIZE)
        first = held = grant.prefix_tokens // SIZE
        segment = 0
        while first < n_pages:
            count = min(self.random.randint(1, 3), n_pages - first)
            self._first_page[ticket.id, segment] = first
            announce = Announce(ticket.id, segment, first, count, count * self.options.page_bytes)
            self.submit(FromPeer("prefill-0", announce))
            segment, first = segment + 1, first + count
        params = ticket.sampling
        tokens = tuple(next_token(ticket.tokens, params.seed, c) for c in range(ticket.n_choices))
        n_sent = n_pages - held
        commit = Commit(
            ticket.id,
            tokens,
            n_sent,
            n_sent * self.options.page_bytes,
            tuple(range(segment)),
            cached_tokens=held * SIZE,
        )
        self.submit(FromPeer("prefill-0", commit))

    def _received(self, receive: ReceivePages) -> None:
        if receive.pages is not None:
            ticket = self.records[receive.ticket_id].ticket
            self._write(ticket, receive.segment, receive.pages)
        event = SegmentReceived("prefill-0", receive.ticket_id, receive.segment, receive.segment)
        self.submit(event)

    def _write(self, ticket: Ticket, segment: int, refs: tuple[PageRef, ...]) -> None:
        assert self.pages.are_current(refs), "pages were freed while a link writes them"
        for page, ref in enumerate(refs, self._first_page[ticket.id, segment]):
            tokens = ticket.tokens[page * SIZE : (page + 1) * SIZE]
            cells: list[Cell] = [(page * SIZE + i, token) for i, token in enumerate(tokens)]
            self.memory[ref.page] = cells + [None] * (SIZE - len(cells))

    # --- what must hold in the end ------------------------------------------------------------

    def check_end(self) -> Counter[str]:
        """Every ticket is done; who ended well said exactly what the reference says."""
        outcomes: Counter[str] = Counter()
        for record in self.records.values():
            ticket = record.ticket
            assert record.done is not None, ticket.id
            outcomes[record.done.outcome] += 1
            for choice, said in record.said.items():
                right, reason = answer(ticket, choice)
                assert said == right[: len(said)], (ticket.id, choice)
                if choice in record.reasons:
                    assert said == right and record.reasons[choice] is reason
            if record.done.outcome is Outcome.OK:
                ended = set(record.reasons) | record.stopped
                assert ended == set(range(ticket.n_choices)), ticket.id
        assert self.role.is_idle()
        self.role.check_integrity()
        assert self.pages.available == self.pages.total and self.pages.bound == 0
        return outcomes

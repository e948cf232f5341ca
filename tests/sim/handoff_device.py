"""The devices of the small world: page memory that is real, and a model that reads all of it.

A page is a list of (position, token, salt); a sampled token is a function of everything read
through the page table. What a page held is wiped as soon as it is freed or evicted. So any page
that is used too early, too late, by two owners or under a wrong name shows as a wrong token or a
failed assertion.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from sim.handoff_traffic import next_token

from kv_transfer.pages import Pages
from protocol.errors import ErrorInfo
from protocol.step import CopyKind, PageCopy, RowResult, StepPlan, StepResult, StepRow
from protocol.types import Ticket, TicketId, TokenLogprobs

NAN = ErrorInfo("INTERNAL", "logits are not finite")
Cells = list[object]


def logprob_of(token: int) -> TokenLogprobs:
    """What the model says of any token."""
    return TokenLogprobs(token, -1.0, 1)


@dataclass
class Device:
    """The memory of one worker and the step that runs on it."""

    pages: Pages
    ticket_of: Callable[[TicketId], Ticket]
    memory: list[Cells] = field(default_factory=list)
    host: dict[int, Cells] = field(default_factory=dict)
    computed: dict[TicketId, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    evictions: int = 0
    found: int = 0  # tokens of prompts that began behind what was cached
    _seen: list[int] = field(default_factory=list)  # generations at the last wipe
    _used: dict[int, int] = field(default_factory=dict)  # of the running step's pages

    def __post_init__(self) -> None:
        self.memory = [self._blank() for _ in range(self.pages.total)]
        self._seen = [0] * self.pages.total

    def wipe(self) -> None:
        """Forget what freed and evicted pages held; none of them is in the running step."""
        freed = set(self.pages.take_freed())
        for page, seen in enumerate(self._seen):
            now = self.pages.generation(page)
            if now != seen:
                assert page not in self._used, "a page was freed while a step used it"
                self._seen[page] = now
                self.memory[page] = self._blank()
                self.evictions += page not in freed

    def begin(self, plan: StepPlan) -> None:
        """Its pages are this step's own until ``end``; what it writes is shared with nobody."""
        size = self.pages.page_size
        self._used = {p: self.pages.generation(p) for r in plan.rows for p in r.pages}
        written: Counter[int] = Counter()
        for row in plan.rows:
            last = (row.start + len(row.tokens) - 1) // size
            for page in row.pages[row.start // size : last + 1]:
                assert self.pages.may_write(page), f"{row.ticket_id} writes a shared page"
                written[page] += 1
        written.update(c.target for c in plan.copies if c.kind is not CopyKind.TO_HOST)
        assert all(n == 1 or self._copied(p, plan) for p, n in written.items())

    def end(self) -> None:
        """No page of the step has changed its owner meanwhile."""
        for page, generation in self._used.items():
            assert self.pages.generation(page) == generation
        self._used = {}

    def compute(self, plan: StepPlan, fails: Callable[[], bool]) -> StepResult:
        """Run the step; ``fails`` says of each sampling row whether its logits are not finite."""
        for copy in plan.copies:
            self._copy(copy)
        return StepResult(tuple(self._row(row, fails) for row in plan.rows))

    def _row(self, row: StepRow, fails: Callable[[], bool]) -> RowResult:
        size = self.pages.page_size
        salt = self.ticket_of(row.ticket_id).salt
        if row.ticket_id not in self.computed and row.token_index == 0:
            self.found += row.start
        for i, token in enumerate(row.tokens, row.start):
            self.memory[row.pages[i // size]][i % size] = (i, token, salt)
            self.computed[row.ticket_id][i] += 1
        end = row.start + len(row.tokens)
        cells = [self.memory[row.pages[i // size]][i % size] for i in range(end)]
        known = [(i, token, salt) for i, token in enumerate(row.history[:end])]
        assert cells == known, f"{row.ticket_id} reads foreign KV"
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if row.prompt_logprobs is not None:
            follows = row.history[row.start + 1 : min(end + 1, row.n_prompt)]
            prompt_logprobs = tuple(logprob_of(t) for t in follows)
        if row.sample is None:
            return RowResult(prompt_logprobs=prompt_logprobs)
        if fails():
            return RowResult(error=NAN)
        read = tuple(c[1] for c in cells)  # type: ignore[index]
        tokens = tuple(next_token(read, row.sample.seed, choice) for choice in row.choices)
        asked = row.sample.logprobs is not None
        logprobs = tuple(logprob_of(t) for t in tokens) if asked else ()
        return RowResult(tokens, logprobs, prompt_logprobs)

    def _copy(self, copy: PageCopy) -> None:
        match copy.kind:
            case CopyKind.WITHIN:
                self.memory[copy.target] = list(self.memory[copy.source])
            case CopyKind.TO_HOST:
                self.host[copy.target] = list(self.memory[copy.source])
            case CopyKind.FROM_HOST:
                self.memory[copy.target] = self.host.pop(copy.source)

    def _copied(self, page: int, plan: StepPlan) -> bool:
        """A page may be filled by a copy and then written on by the one row that owns it."""
        rows = sum(page in row.pages for row in plan.rows)
        return rows == 1 and any(c.target == page for c in plan.copies)

    def _blank(self) -> Cells:
        return [None] * self.pages.page_size

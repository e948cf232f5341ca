"""The rule of a prefill step, slow and obvious, and random traces that hold the real one to it.

Both run over page accounts of their own, which must end up the same, page for page.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from kv_transfer.pages import Pages, Reservation
from prefill_worker.prompt import Prompt
from prefill_worker.scheduler import LOOK_AHEAD, PrefillScheduler
from protocol.page_hash import page_hashes, root, salted
from protocol.role import RoleOptions
from protocol.step import MAX_OVERTAKES
from protocol.types import Peer, SamplingParams, Ticket, TicketId

ME = Peer("prefill-0", "i", "e")
D = Peer("decode-0", "i", "e")
ROOT = root("fp", "float32", 4)


def options(budget: int = 16, seqs: int = 4, chunked: bool = True) -> RoleOptions:
    return RoleOptions(
        page_bytes=100,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_model_len=1000,
        min_prefill_tokens=4,
        chunked_prefill=chunked,
        hash_root=ROOT,
    )


def ticket(name: str, n: int, priority: int = 0, order_key: float = 0.0) -> Ticket:
    return Ticket(
        TicketId(name),
        ME,
        D,
        tuple(i + 100 * (sum(name.encode())) for i in range(n)),
        n,
        SamplingParams(max_tokens=4),
        priority=priority,
        order_key=order_key,
    )


@dataclass(eq=False)
class Entry:
    """One prompt of the reference."""

    ticket: Ticket
    arrival: int
    granted: bool = False
    computed: int = 0
    published: int = 0
    reservation: Reservation | None = None

    @property
    def left(self) -> int:
        return len(self.ticket.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, float, int]:
        return (self.ticket.priority, self.ticket.order_key, self.arrival)


@dataclass
class Slow:
    """The rule, spelled out over a plain list that is sorted for every step.

    Its own page account does what the scheduler's should do, page for page.
    """

    options: RoleOptions
    pages: Pages
    entries: list[Entry] = field(default_factory=list)
    overtakes: int = 0
    hits: int = 0
    drops: int = 0

    def waiting(self) -> list[Entry]:
        return sorted((e for e in self.entries if e.left), key=lambda e: e.arrival)

    def oldest(self) -> Entry | None:
        return next(iter(self.waiting()), None)

    def found(self, entry: Entry) -> tuple[int, ...]:
        ticket = entry.ticket
        if ticket.sampling.prompt_logprobs is not None:
            return ()
        tokens = ticket.tokens[:-1]  # never the last one
        return self.pages.match(page_hashes(tokens, 4, salted(ROOT, ticket.salt)))

    def would_fit(self, need: int, found: tuple[int, ...], gone: list[Entry]) -> bool:
        """Whether there is room once all of ``gone`` are dropped, by counting pages one by one."""
        others = [e for e in self.entries if e.reservation and e not in gone]
        used = {p for e in others if e.reservation for p in e.reservation.bound} | set(found)
        return need <= self.pages.total - len(used)

    def make_way(self, entry: Entry, found: tuple[int, ...], plan: dict[str, int]) -> bool:
        need = self.pages.pages_for(len(entry.ticket.tokens)) - len(found)
        gone: list[Entry] = []
        candidates = [
            e
            for e in sorted(self.entries, key=lambda e: e.rank)
            if e.reservation and not e.granted and e.ticket.id.request_id not in plan
        ]
        while not self.would_fit(need, found, gone):
            if not entry.granted or not candidates:
                return False
            gone.append(candidates.pop())
        for victim in gone:
            assert victim.reservation is not None
            self.pages.release(victim.reservation)
            victim.reservation, victim.computed, victim.published = None, 0, 0
            self.drops += 1
        entry.reservation = self.pages.reserve(entry.ticket.id, need, found)
        self.pages.bind(entry.reservation, need)
        entry.published, entry.computed = len(found), 4 * len(found)
        self.hits += len(found)
        return True

    def plan(self) -> dict[str, int]:
        oldest = self.oldest()
        order = sorted(self.waiting(), key=lambda e: e.rank)
        aged = oldest if self.overtakes >= MAX_OVERTAKES else None
        if aged:
            order = [aged, *(e for e in order if e is not aged)]
        left, plan = self.options.max_num_batched_tokens, {}
        tries, shut = {True: 0, False: 0}, {True: False, False: False}
        for e in order:
            if left <= 0 or len(plan) == self.options.max_num_seqs:
                break
            if e.reservation is None and shut[e.granted]:
                continue
            found = () if e.reservation else self.found(e)
            n = e.left - 4 * len(found)
            if self.options.chunked_prefill:
                n = min(n, left)
            elif plan and n > left:
                continue
            if e.reservation is None and not self.make_way(e, found, plan):
                tries[e.granted] += 1
                if e is aged:
                    shut = {False: True, True: e.granted}
                elif tries[e.granted] > LOOK_AHEAD:
                    shut[e.granted] = True
                continue
            plan[e.ticket.id.request_id] = n
            left -= n
        if plan and oldest:
            now_oldest = self.oldest()  # a drop may have brought an older one back
            if now_oldest is not oldest:
                self.overtakes = 0
            served = now_oldest is not None and now_oldest.ticket.id.request_id in plan
            self.overtakes = 0 if served else self.overtakes + 1
        return plan

    def advance(self, plan: dict[str, int]) -> None:
        oldest = self.oldest()
        entries = {e.ticket.id.request_id: e for e in self.entries}
        for name, n in plan.items():
            e = entries[name]
            e.computed += n
            if e.reservation:
                hashes = page_hashes(e.ticket.tokens[: e.computed], 4, salted(ROOT, e.ticket.salt))
                self.pages.publish(e.reservation, hashes[e.published :], e.published)
                e.published = len(hashes)
        if oldest and not oldest.left:
            self.overtakes = 0

    def leave(self, name: str) -> None:
        (entry,) = [e for e in self.entries if e.ticket.id.request_id == name]
        if entry is self.oldest():
            self.overtakes = 0
        if entry.reservation:
            self.pages.release(entry.reservation)
        self.entries.remove(entry)


class Trace:
    """Random prompts, grants, drops and endings, in the scheduler and in the reference."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.options = options(rng.choice((8, 16, 40)), rng.choice((1, 3, 4)), rng.random() < 0.8)
        total = rng.choice((16, 24, 60))
        self.pages = Pages(total, 4)
        self.fast = PrefillScheduler(self.pages, self.options)
        self.slow = Slow(self.options, Pages(total, 4))
        self.prompts: dict[str, Prompt] = {}
        self.roots = [[rng.randrange(9) for _ in range(60)] for _ in range(3)]

    def ticket(self, name: str) -> Ticket:
        rng = self.rng
        n = rng.randint(1, 60)
        tokens = [rng.randrange(9) for _ in range(n)]
        if rng.random() < 0.7:  # as in a conversation
            shared = rng.randint(0, n)
            tokens[:shared] = rng.choice(self.roots)[:shared]
        t = ticket(name, n, rng.choice((0, 0, 1)), rng.randint(0, 5))
        asks = replace(t.sampling, prompt_logprobs=0) if rng.random() < 0.1 else t.sampling
        salt = rng.choice(("", "", "", "tenant"))
        return replace(t, tokens=tuple(tokens), sampling=asks, salt=salt)

    def add(self, name: str) -> None:
        t = self.ticket(name)
        self.prompts[name] = self.fast.add(t)
        if not self.slow.waiting():
            self.slow.overtakes = 0
        self.slow.entries.append(Entry(t, self.prompts[name].arrival))

    def leave(self, name: str) -> None:
        prompt = self.prompts.pop(name)
        self.fast.forget(prompt)
        if prompt.reservation:
            self.pages.release(prompt.reservation)
        self.slow.leave(name)

    def step(self) -> None:
        plan, _ = self.fast.plan()
        expected = self.slow.plan()
        got = {t.request_id: n for t, n in plan.advance.items()} if plan else {}
        assert got == expected
        self.check()
        if plan is None:
            return
        assert len(plan.rows) <= self.options.max_num_seqs and plan.repeats == 0
        assert plan.n_tokens <= self.options.max_num_batched_tokens or (
            not self.options.chunked_prefill and len(plan.rows) == 1
        )
        waiting = {name for name, p in self.prompts.items() if p.remaining}
        assert {t.request_id for t in plan.reasons} == waiting - set(got)
        assert all(plan.reasons.values())
        for row in plan.rows:
            prompt = self.prompts[row.ticket_id.request_id]
            assert (row.start, row.history) == (prompt.computed, prompt.ticket.tokens)
            first = row.start // 4
            assert all(self.pages.may_write(p) for p in row.pages[first:]), "a shared page"
            self.fast.advance(prompt, len(row.tokens))
        self.slow.advance(expected)

    def check(self) -> None:
        self.pages.check_integrity()
        mine, other = self.pages, self.slow.pages
        for what in ("available", "cached", "references"):
            assert getattr(mine, what) == getattr(other, what), what
        assert self.fast.queued_tokens == sum(p.remaining for p in self.prompts.values())
        for entry in self.slow.entries:
            assert self.prompts[entry.ticket.id.request_id].computed == entry.computed

    def run(self, steps: int) -> None:
        rng = self.rng
        for i in range(steps):
            if rng.random() < 0.5:
                self.add(f"q{i}")
            for entry in self.slow.entries:
                if not entry.granted and rng.random() < 0.1:
                    entry.granted = True
                    self.prompts[entry.ticket.id.request_id].granted = True
            self.step()
            for name, prompt in list(self.prompts.items()):
                handed_over = prompt.remaining == 0 and prompt.granted and rng.random() < 0.5
                if handed_over or rng.random() < 0.02:
                    self.leave(name)
        self.finish()

    def finish(self) -> None:
        """Nothing new comes: everybody gets a grant, is computed and leaves."""
        for _ in range(3000):
            for name, prompt in list(self.prompts.items()):
                if prompt.remaining == 0 and prompt.granted:
                    self.leave(name)
            if not self.prompts:
                break
            ungranted = [e for e in self.slow.entries if not e.granted]
            if ungranted:
                entry = self.rng.choice(ungranted)
                entry.granted = self.prompts[entry.ticket.id.request_id].granted = True
            self.step()
        assert not self.prompts, "somebody never finished"
        assert self.pages.available == self.pages.total and self.fast.queued_tokens == 0

"""A small world around real roles: routers, ordered streams, links, devices, and a virtual clock.

Owns what the runtime owns in the product (queues, order, steps) in the simplest form that keeps
the promises of ``protocol.events``, and checks the promises of the roles on the way. Page memory
is real: a page is a list of (position, token), a sampled token is a function of everything read
through the page table, and freed pages are wiped, so that any page that is used too early, too
late or by two owners shows as a wrong token or a failed assertion.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decode_worker.role import DecodeRole
from kv_transfer.pages import Pages
from prefill_worker.role import PrefillRole
from protocol.errors import ErrorInfo
from protocol.events import (
    BreakLink,
    Count,
    Effect,
    Event,
    FromPeer,
    FromRouter,
    LinkBroken,
    PeerLost,
    ReceivePages,
    RouterLost,
    SegmentReceived,
    SegmentSent,
    SendPages,
    ToReceiver,
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
    Sealed,
    Stop,
    Tokens,
)
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepResult
from protocol.types import FinishReason, Outcome, Peer, SamplingParams, Ticket, TicketId

EOS = 0
VOCAB = 29
BROKEN = ErrorInfo("UNAVAILABLE", "the link broke")


def next_token(tokens: tuple[int, ...], seed: int) -> int:
    """The model: what follows ``tokens``."""
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB


def answer(ticket: Ticket) -> list[int]:
    """The whole answer, by one worker that never fails."""
    tokens = list(ticket.tokens)
    while True:
        token = next_token(tuple(tokens), ticket.sampling.seed)
        tokens.append(token)
        made = len(tokens) - ticket.n_prompt
        if (token == EOS and not ticket.sampling.ignore_eos) or made >= ticket.sampling.max_tokens:
            return tokens[len(ticket.tokens) :]


@dataclass(eq=False)
class Worker:
    """One role with its pages and its device."""

    me: Peer
    role: PrefillRole | DecodeRole
    pages: Pages
    options: RoleOptions
    memory: list[list[object]]
    step: StepPlan | None = None
    generations: dict[int, int] = field(default_factory=dict)  # of the running step's pages


@dataclass(eq=False)
class Pair:
    """Stream and link from one prefill worker to one decode worker."""

    sends: deque[SendPages] = field(default_factory=deque)
    receives: deque[ReceivePages] = field(default_factory=deque)
    pipe: deque[tuple[TicketId, int, list[list[object]], int]] = field(default_factory=deque)
    up: bool = True
    epoch: int = 0
    told: set[str] = field(default_factory=set)  # workers that know that it is down
    arrivals: dict[str, float] = field(default_factory=dict)  # last arrival per direction


@dataclass(eq=False)
class Record:
    """What the routers know about one ticket."""

    ticket: Ticket
    router_id: str
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stopped: bool = False
    done: dict[str, Done] = field(default_factory=dict)


@dataclass
class Chances:
    """How likely each fault is, per occasion."""

    cancel: float = 0.0
    stop: float = 0.0
    break_link: float = 0.0  # per segment
    dial_fails: float = 0.0
    corrupt: float = 0.0
    step_fails: float = 0.0
    row_fails: float = 0.0
    router_lost: float = 0.0  # per ticket
    noise: float = 0.0  # duplicates and strangers, per message
    retry: float = 0.0  # a newer attempt while the old one lives
    short_deadline: float = 0.0
    stall: float = 0.0  # a message, a step or a link operation takes seconds


class World:
    """Everything, on one virtual clock."""

    def __init__(
        self, seed: int, chances: Chances, *, n_prefill: int = 2, n_decode: int = 2, **sizes: int
    ) -> None:
        self.random = random.Random(seed)
        self.chances = chances
        self.now = 0.0
        self.events = 0  # handed to roles
        self.counts: Counter[str] = Counter()
        self.records: dict[TicketId, Record] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._past: list[tuple[Worker, Event]] = []
        self._arrivals: dict[tuple[str, str], float] = {}
        self.workers: dict[str, Worker] = {}
        self.pairs: dict[tuple[str, str], Pair] = {}
        for i in range(n_prefill):
            self._worker(f"prefill-{i}", PrefillRole, sizes.get("prefill_pages", 24), sizes)
        for i in range(n_decode):
            self._worker(f"decode-{i}", DecodeRole, sizes.get("decode_pages", 40), sizes)
        self.prefills = [w for w in self.workers.values() if isinstance(w.role, PrefillRole)]
        self.decodes = [w for w in self.workers.values() if isinstance(w.role, DecodeRole)]
        for p in self.prefills:
            for d in self.decodes:
                self.pairs[p.me.worker_id, d.me.worker_id] = Pair()

    def _worker(
        self,
        name: str,
        role: type[PrefillRole] | type[DecodeRole],
        total: int,
        sizes: dict[str, int],
    ) -> None:
        page_size = sizes.get("page_size", 4)
        options = RoleOptions(
            page_size=page_size,
            page_bytes=100,
            max_num_batched_tokens=sizes.get("budget", 24),
            max_num_seqs=sizes.get("max_num_seqs", 6),
            min_prefill_tokens=4,
            max_model_len=sizes.get("max_model_len", 100),
            chunked_prefill=bool(sizes.get("chunked_prefill", 1)),
            eos_token_ids=(EOS,),
            window=sizes.get("window", 3),
            max_segment_bytes=300,
            lease_s=sizes.get("lease_s", 4),
            link_op_s=2.0,
            heartbeat_s=1.0,
            max_waiting=sizes.get("max_waiting", 64),
            max_parked=64,
        )
        pages = Pages(total, page_size)
        me = Peer(name, f"inc-{name}", f"{name}:1")
        memory: list[list[object]] = [[None] * page_size for _ in range(total)]
        self.workers[name] = Worker(me, role(me, pages, options), pages, options, memory)

    # --- the clock ----------------------------------------------------------------------------

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._at(self.now + delay, action)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def delay(self) -> float:
        """A network delay: mostly short, sometimes long."""
        if self.random.random() < self.chances.stall:
            return self.random.choice((3.0, 5.0, 7.0))
        return self.random.choice((0.0, 0.001, 0.005, 0.02, 0.3))

    def link_delay(self) -> float:
        """Until a link has moved a segment."""
        return self.delay() if self.random.random() < self.chances.stall else self.delay() / 4

    def in_order(self, a: str, b: str, action: Callable[[], None]) -> None:
        """Deliver on the ordered channel from ``a`` to ``b``."""
        at = max(self._arrivals.get((a, b), 0.0), self.now + self.delay())
        self._arrivals[a, b] = at
        self._at(at, action)

    def run(self, until: float) -> None:
        """Let time pass, with a tick of every role each 100 ms, until ``until`` or all is idle."""
        next_tick = self.now
        while self.now < until:
            if self._heap and self._heap[0][0] <= next_tick:
                self.now, _, action = heapq.heappop(self._heap)
                action()
                continue
            self.now = next_tick
            next_tick += 0.1
            for worker in self.workers.values():
                self._carry_out(worker, worker.role.tick(self.now))
                self._start_step(worker)
            if not self._heap and all(w.role.is_idle() for w in self.workers.values()):
                return

    # --- roles --------------------------------------------------------------------------------

    def submit(self, worker: Worker, event: Event, *, noise: bool = False) -> None:
        """Hand an event to a role and carry out its effects, as the runtime does."""
        self.events += 1
        effects = worker.role.handle(event, self.now)
        receives = [e for e in effects if isinstance(e, ReceivePages)]
        announce = isinstance(event, FromPeer) and isinstance(event.message, Announce)
        assert len(receives) == (1 if announce else 0), (event, effects)
        self._carry_out(worker, effects)
        self._start_step(worker)
        if noise:
            return
        if len(self._past) < 400:
            self._past.append((worker, event))
        else:
            self._past[self.random.randrange(400)] = (worker, event)
        if self.random.random() < self.chances.noise:
            self._make_noise()

    def _make_noise(self) -> None:
        """Repeat something of the past; the role must shrug."""
        worker, event = self.random.choice(self._past)
        harmless = (Offer, Grant, Sealed, Commit, Cancel, Open)
        if isinstance(event, SegmentSent | SegmentReceived) or (
            isinstance(event, FromPeer | FromRouter)
            and isinstance(event.message, harmless)
            and not (
                isinstance(event.message, Cancel) and event.message.ticket_id not in self.records
            )
        ):
            self.submit(worker, event, noise=True)

    def _carry_out(self, worker: Worker, effects: list[Effect]) -> None:
        for page in worker.pages.take_freed():
            worker.memory[page] = [None] * worker.pages.page_size
            assert page not in worker.generations, "a page was freed while a step used it"
        name = worker.me.worker_id
        for i, effect in enumerate(effects):
            match effect:
                case ToRouter(_, message):
                    self._hear(worker, message)
                case ToReceiver(peer, message):
                    if isinstance(message, Announce):
                        send = effects[i + 1]
                        assert isinstance(send, SendPages)
                        assert (send.ticket_id, send.segment) == (
                            message.ticket_id,
                            message.segment,
                        )
                        assert len(send.pages) == message.n_pages
                    self._to_receiver(name, peer.worker_id, message)
                case ToSender(sender, message):
                    pair = self.pairs[sender, name]
                    if pair.up:
                        self._stream(pair, name, sender, FromPeer(name, message))
                case SendPages():
                    pair = self.pairs[name, effect.worker_id]
                    pair.sends.append(effect)
                    self._pump(name, effect.worker_id, pair)
                    self._answer_dead(pair, name, effect.worker_id, True)
                case ReceivePages():
                    pair = self.pairs[effect.worker_id, name]
                    pair.receives.append(effect)
                    self._pump(effect.worker_id, name, pair)
                    self._answer_dead(pair, name, effect.worker_id, False)
                case BreakLink(other, outgoing):
                    key = (name, other) if outgoing else (other, name)
                    self.break_pair(*key)
                case Count(metric, label):
                    self.counts[label or metric] += 1

    def _start_step(self, worker: Worker) -> None:
        if worker.step is not None:
            return
        plan = worker.role.plan(self.now)
        if plan is None:
            return
        options = worker.options
        assert len(plan.rows) <= options.max_num_seqs
        if options.chunked_prefill:
            assert plan.n_tokens <= options.max_num_batched_tokens
        assert not set(plan.reasons) & set(plan.advance)
        worker.step = plan
        worker.generations = {p: worker.pages.generation(p) for r in plan.rows for p in r.pages}
        seconds = self.random.choice((0.01, 0.05, 0.2))
        if self.random.random() < self.chances.stall:
            seconds = 6.0
        self.after(seconds, lambda: self._end_step(worker))

    def _end_step(self, worker: Worker) -> None:
        plan, worker.step = worker.step, None
        assert plan is not None
        for page, generation in worker.generations.items():
            assert worker.pages.generation(page) == generation
        if self.random.random() < self.chances.step_fails:
            effects = worker.role.step_failed(ErrorInfo("INTERNAL", "the device failed"), self.now)
        else:
            effects = worker.role.step_done(self._compute(worker, plan), self.now)
        worker.generations = {}
        self._carry_out(worker, effects)
        worker.role.check_integrity()
        self._start_step(worker)

    def _compute(self, worker: Worker, plan: StepPlan) -> StepResult:
        size = worker.pages.page_size
        tokens: dict[TicketId, tuple[int, ...]] = {}
        failed: dict[TicketId, ErrorInfo] = {}
        for row in plan.rows:
            for i, token in enumerate(row.tokens, row.start):
                worker.memory[row.pages[i // size]][i % size] = (i, token)
            if row.sample is None:
                continue
            end = row.start + len(row.tokens)
            cells = [worker.memory[row.pages[i // size]][i % size] for i in range(end)]
            assert [c and c[0] for c in cells] == list(range(end)), f"{row.ticket_id}: foreign KV"
            if self.random.random() < self.chances.row_fails:
                failed[row.ticket_id] = ErrorInfo("INTERNAL", "logits are not finite")
            else:
                tokens[row.ticket_id] = (next_token(tuple(c[1] for c in cells), row.sample.seed),)
        return StepResult(tokens, failed, 0.0)

    # --- streams and links --------------------------------------------------------------------

    def _stream(self, pair: Pair, a: str, b: str, event: Event) -> None:
        epoch = pair.epoch

        def arrive() -> None:
            if pair.epoch == epoch and pair.up:
                self.submit(self.workers[b], event)

        self.in_order(a, b, arrive)

    def _to_receiver(self, sender: str, receiver: str, message: object) -> None:
        pair = self.pairs[sender, receiver]
        if not pair.up:
            if sender not in pair.told:
                return  # it will hear of it
            if self.random.random() < self.chances.dial_fails:
                lost = PeerLost(receiver, BROKEN, outgoing=True)
                self.after(self.delay(), lambda: self.submit(self.workers[sender], lost))
                return
            self._tell(sender, receiver, pair, receiver)  # the new stream ends the old one first
            assert not pair.sends and not pair.receives
            pair.pipe.clear()
            pair.up, pair.told = True, set()
        self._stream(pair, sender, receiver, FromPeer(sender, message))  # type: ignore[arg-type]

    def break_pair(self, sender: str, receiver: str) -> None:
        """Cut stream and link; each side hears of it some time later."""
        pair = self.pairs[sender, receiver]
        if not pair.up:
            return
        self.counts["breaks"] += 1
        pair.up, pair.told = False, set()
        pair.epoch += 1
        epoch = pair.epoch
        for side in (sender, receiver):

            def tell(side: str = side) -> None:
                if pair.epoch == epoch and not pair.up:
                    self._tell(sender, receiver, pair, side)

            self.after(self.delay(), tell)

    def _tell(self, sender: str, receiver: str, pair: Pair, side: str) -> None:
        if side in pair.told:
            return
        outgoing = side == sender
        other = receiver if outgoing else sender
        (pair.sends if outgoing else pair.receives).clear()
        events: list[Event] = [
            LinkBroken(other, BROKEN, outgoing),
            PeerLost(other, BROKEN, outgoing),
        ]
        self.random.shuffle(events)
        for event in events:
            self.submit(self.workers[side], event)
        pair.told.add(side)

    def _answer_dead(self, pair: Pair, name: str, other: str, outgoing: bool) -> None:
        """An operation for which there is no link is answered by ``LinkBroken``."""
        if pair.up or name not in pair.told:
            return

        def answer_() -> None:
            (pair.sends if outgoing else pair.receives).clear()
            self.submit(self.workers[name], LinkBroken(other, BROKEN, outgoing))

        self.after(0.0, answer_)

    def _pump(self, sender: str, receiver: str, pair: Pair) -> None:
        epoch = pair.epoch

        def move() -> None:
            if pair.epoch != epoch or not pair.up:
                return
            if pair.sends and (not pair.pipe or self.random.random() < 0.7):
                self._send_one(sender, receiver, pair)
            elif pair.receives and pair.pipe:
                self._receive_one(sender, receiver, pair)
            if pair.up and (pair.sends or (pair.receives and pair.pipe)):
                self.after(self.link_delay(), move)

        self.after(self.link_delay(), move)

    def _send_one(self, sender: str, receiver: str, pair: Pair) -> None:
        if self.random.random() < self.chances.break_link:
            self.break_pair(sender, receiver)
            return
        worker, op = self.workers[sender], pair.sends.popleft()
        assert worker.pages.are_current(op.pages), "a page was freed while it was sent"
        content = [list(worker.memory[ref.page]) for ref in op.pages]
        checksum = hash(repr(content))
        if self.random.random() < self.chances.corrupt:
            content[0][0] = "corrupt"
        pair.pipe.append((op.ticket_id, op.segment, content, len(content) * 100))
        self.submit(worker, SegmentSent(receiver, op.ticket_id, op.segment, checksum))

    def _receive_one(self, sender: str, receiver: str, pair: Pair) -> None:
        worker, op = self.workers[receiver], pair.receives.popleft()
        ticket_id, segment, content, n_bytes = pair.pipe.popleft()
        assert (op.ticket_id, op.segment, op.n_bytes) == (ticket_id, segment, n_bytes)
        if op.pages is not None:
            assert worker.pages.are_current(op.pages), "a page was freed while it was received into"
            for ref, cells in zip(op.pages, content, strict=True):
                worker.memory[ref.page] = list(cells)
        event = SegmentReceived(sender, ticket_id, segment, hash(repr(content)))
        self.submit(worker, event)

    # --- routers ------------------------------------------------------------------------------

    def open(self, ticket: Ticket, router_id: str = "r0") -> None:
        """Open both legs at once, as a router does."""
        self.records[ticket.id] = Record(ticket, router_id)
        for peer in (ticket.receiver, ticket.sender):
            if peer is not None:
                self.to_worker(router_id, peer.worker_id, Open(ticket))

    def to_worker(self, router_id: str, worker_id: str, message: Open | Cancel | Stop) -> None:
        """Say something on a Session."""
        worker = self.workers[worker_id]
        event = FromRouter(router_id, message)
        self.in_order(router_id, worker_id, lambda: self.submit(worker, event))

    def lose_router(self, router_id: str) -> None:
        """Its Sessions end everywhere."""
        for worker in self.workers.values():
            self.in_order(
                router_id,
                worker.me.worker_id,
                lambda w=worker: self.submit(w, RouterLost(router_id)),
            )

    def cancel(self, record: Record) -> None:
        """The client went away: both legs are cancelled."""
        for peer in (record.ticket.receiver, record.ticket.sender):
            if peer is not None:
                cancel = Cancel(record.ticket.id, "the client went away")
                self.to_worker(record.router_id, peer.worker_id, cancel)

    def _hear(self, worker: Worker, message: object) -> None:
        name = worker.me.worker_id
        if isinstance(message, Tokens):
            for item in message.items:
                record = self.records[item.ticket_id]
                assert name not in record.done and record.reason is None, item
                assert worker.me == record.ticket.receiver
                assert item.index == len(record.tokens) + record.ticket.n_delivered, item
                record.tokens += item.token_ids
                record.reason = item.finish_reason
                if item.finish_reason is None and self.random.random() < self.chances.stop:
                    record.stopped = True
                    self.to_worker(record.router_id, name, Stop(item.ticket_id, item.index))
        elif isinstance(message, Done):
            record = self.records[message.ticket_id]
            assert name not in record.done, f"a second Done: {message}"
            assert (message.error is not None) == (message.outcome is Outcome.FAILED)
            record.done[name] = message
            if message.outcome is not Outcome.OK:
                for peer in (record.ticket.receiver, record.ticket.sender):
                    if peer is not None and peer.worker_id not in record.done:
                        cancel = Cancel(message.ticket_id, "the other leg ended")
                        self.to_worker(record.router_id, peer.worker_id, cancel)

    # --- what must hold -----------------------------------------------------------------------

    def check_end(self) -> Counter[str]:
        """After the last event: one Done per leg, right tokens, all pages home."""
        outcomes: Counter[str] = Counter()
        for record in self.records.values():
            ticket = record.ticket
            legs = {p.worker_id for p in (ticket.receiver, ticket.sender) if p}
            assert set(record.done) == legs, (ticket.id, record.done)
            expected = answer(ticket)
            assert record.tokens == expected[: len(record.tokens)], ticket.id
            done = record.done[ticket.receiver.worker_id]
            outcomes[done.outcome] += 1
            if done.outcome is Outcome.OK and not record.stopped:
                assert record.tokens == expected
                last = record.tokens[-1]
                eos = last == EOS and not ticket.sampling.ignore_eos
                assert record.reason is (FinishReason.STOP if eos else FinishReason.LENGTH)
        for worker in self.workers.values():
            assert worker.role.is_idle(), worker.me.worker_id
            worker.role.check_integrity()
            assert worker.pages.available == worker.pages.total
            assert worker.pages.bound == 0
        return outcomes

    # --- random traffic -----------------------------------------------------------------------

    def random_ticket(self, number: int) -> Ticket:
        """Any ticket: local or remote, short or long, page boundaries included."""
        rng = self.random
        size = self.prefills[0].pages.page_size if self.prefills else 4
        n = rng.choice((1, size - 1, size, size + 1, rng.randint(1, 12), rng.randint(12, 60)))
        local = not self.prefills or rng.random() < 0.2
        hurried = rng.random() < self.chances.short_deadline
        return Ticket(
            id=TicketId(f"q{number}"),
            sender=None if local else rng.choice(self.prefills).me,
            receiver=rng.choice(self.decodes).me,
            tokens=tuple(rng.randrange(VOCAB) for _ in range(n)),
            n_prompt=n,
            sampling=SamplingParams(
                max_tokens=rng.choice((1, 2, rng.randint(1, 20))),
                seed=rng.randrange(1 << 30),
                ignore_eos=rng.random() < 0.3,
            ),
            priority=rng.choice((0, 0, 0, 1, -1)),
            order_key=rng.random() * 10,
            remaining_s=rng.random() * 3 if hurried else 600.0,
        )

    def traffic(self, n_tickets: int, spacing_s: float) -> None:
        """Open tickets at random instants, with the faults that chance asks for."""
        at = 0.0
        for number in range(n_tickets):
            at += self.random.random() * 2 * spacing_s
            ticket = self.random_ticket(number)
            router_id = f"r{number % 3}"
            self.after(at, lambda t=ticket, r=router_id: self.open(t, r))
            if self.random.random() < self.chances.cancel:
                self.after(at + self.random.random() * 2, lambda t=ticket: self._cancel_id(t.id))
            if self.random.random() < self.chances.retry:
                again = replace(ticket, id=TicketId(ticket.id.request_id, 2))
                self.after(
                    at + 0.3 + self.random.random(), lambda t=again, r=router_id: self.open(t, r)
                )
            if self.random.random() < self.chances.router_lost:
                self.after(at + self.random.random(), lambda r=router_id: self.lose_router(r))

    def _cancel_id(self, ticket_id: TicketId) -> None:
        self.cancel(self.records[ticket_id])

"""A small world around real roles: routers, ordered streams, links, devices, and a virtual clock.

Owns what the runtime owns in the product (queues, order, steps) in the simplest form that keeps
the promises of ``protocol.events``, and checks the promises of the roles on the way. Page memory
is real: a page is a list of (position, token), a sampled token is a function of everything read
through the page table, and freed pages are wiped, so that any page that is used too early, too
late or by two owners shows as a wrong token or a failed assertion.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sim.handoff_network import Network
from sim.handoff_traffic import EOS, Chances, answer, next_token, random_ticket

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
from protocol.step import RowResult, StepPlan, StepResult
from protocol.types import FinishReason, Outcome, Peer, Ticket, TicketId


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
class Record:
    """What the routers know about one ticket."""

    ticket: Ticket
    router_id: str
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    stopped: bool = False
    done: dict[str, Done] = field(default_factory=dict)


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
        for i in range(n_prefill):
            self._worker(f"prefill-{i}", PrefillRole, sizes.get("prefill_pages", 24), sizes)
        for i in range(n_decode):
            self._worker(f"decode-{i}", DecodeRole, sizes.get("decode_pages", 40), sizes)
        self.prefills = [w for w in self.workers.values() if isinstance(w.role, PrefillRole)]
        self.decodes = [w for w in self.workers.values() if isinstance(w.role, DecodeRole)]
        self.network = Network(
            self, ((p.me.worker_id, d.me.worker_id) for p in self.prefills for d in self.decodes)
        )

    def _worker(
        self,
        name: str,
        role: type[PrefillRole] | type[DecodeRole],
        total: int,
        sizes: dict[str, int],
    ) -> None:
        page_size = sizes.get("page_size", 4)
        options = RoleOptions(
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
                    self.network.to_receiver(name, peer.worker_id, message)
                case ToSender(sender, message):
                    self.network.to_sender(name, sender, message)
                case SendPages():
                    self.network.post_send(name, effect)
                case ReceivePages():
                    self.network.post_receive(name, effect)
                case BreakLink(other, outgoing):
                    key = (name, other) if outgoing else (other, name)
                    self.network.break_pair(*key)
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
        results: list[RowResult] = []
        for row in plan.rows:
            for i, token in enumerate(row.tokens, row.start):
                worker.memory[row.pages[i // size]][i % size] = (i, token)
            if row.sample is None:
                results.append(RowResult())
                continue
            end = row.start + len(row.tokens)
            cells = [worker.memory[row.pages[i // size]][i % size] for i in range(end)]
            assert [c and c[0] for c in cells] == list(range(end)), f"{row.ticket_id}: foreign KV"
            if self.random.random() < self.chances.row_fails:
                nan = ErrorInfo("INTERNAL", "logits are not finite")
                results.append(RowResult(error=nan))
            else:
                token = next_token(tuple(c[1] for c in cells), row.sample.seed)
                results.append(RowResult((token,)))
        return StepResult(tuple(results))

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

    def traffic(self, n_tickets: int, spacing_s: float) -> None:
        """Open tickets at random instants, with the faults that chance asks for."""
        at = 0.0
        prefills, decodes = [w.me for w in self.prefills], [w.me for w in self.decodes]
        size = self.decodes[0].pages.page_size
        for number in range(n_tickets):
            at += self.random.random() * 2 * spacing_s
            ticket = random_ticket(number, self.random, self.chances, prefills, decodes, size)
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

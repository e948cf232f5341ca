"""A small world around real roles: routers, ordered streams, links, devices, and a virtual clock.

Owns what the runtime owns in the product (queues, order, steps) in the simplest form that keeps
the promises of ``protocol.events``, and checks the promises of the roles on the way. Its parts:
``handoff_routers`` (tickets and answers), ``handoff_network`` (streams and links),
``handoff_device`` (page memory and the model), ``handoff_traffic`` (what is asked).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from sim.handoff_device import Device
from sim.handoff_network import Network
from sim.handoff_routers import Routers
from sim.handoff_traffic import EOS, Chances, Draw, Habits

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
    Grant,
    Offer,
    Open,
    Sealed,
)
from protocol.role import RoleOptions
from protocol.step import StepPlan
from protocol.types import Peer, TicketId

ROOT = b"the small world's"


@dataclass(eq=False)
class Worker:
    """One role with its pages and its device."""

    me: Peer
    role: PrefillRole | DecodeRole
    pages: Pages
    options: RoleOptions
    device: Device
    step: StepPlan | None = None


class World:
    """Everything, on one virtual clock."""

    def __init__(
        self,
        seed: int,
        chances: Chances,
        habits: Habits | None = None,
        *,
        n_prefill: int = 2,
        n_decode: int = 2,
        **sizes: int,
    ) -> None:
        self.random = random.Random(seed)
        self.chances = chances
        self.habits = habits or Habits()
        self.now = 0.0
        self.events = 0  # handed to roles
        self.counts: Counter[str] = Counter()
        self.routers = Routers(self)
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
            hash_root=ROOT if sizes.get("cache", 1) else b"",
        )
        pages = Pages(total, page_size)
        me = Peer(name, f"inc-{name}", f"{name}:1")
        device = Device(pages, lambda ticket_id: self.routers.records[ticket_id].ticket)
        self.workers[name] = Worker(me, role(me, pages, options), pages, options, device)

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
            isinstance(event, FromPeer | FromRouter) and isinstance(event.message, harmless)
        ):
            self.submit(worker, event, noise=True)

    def _carry_out(self, worker: Worker, effects: list[Effect]) -> None:
        worker.device.wipe()
        name = worker.me.worker_id
        for i, effect in enumerate(effects):
            match effect:
                case ToRouter(_, message):
                    self.routers.hear(worker, message)
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
                    if isinstance(message, Grant):
                        self.counts["held"] += message.prefix_tokens
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
        worker.device.wipe()
        if plan is None:
            return
        options = worker.options
        assert len(plan.rows) <= options.max_num_seqs
        if options.chunked_prefill:
            assert plan.n_tokens <= options.max_num_batched_tokens
        assert not set(plan.reasons) & set(plan.advance)
        worker.step = plan
        worker.device.begin(plan)
        seconds = self.random.choice((0.01, 0.05, 0.2))
        if self.random.random() < self.chances.stall:
            seconds = 6.0
        self.after(seconds, lambda: self._end_step(worker))

    def _end_step(self, worker: Worker) -> None:
        plan, worker.step = worker.step, None
        assert plan is not None
        worker.device.end()
        if self.random.random() < self.chances.step_fails:
            effects = worker.role.step_failed(ErrorInfo("INTERNAL", "the device failed"), self.now)
        else:
            result = worker.device.compute(
                plan, lambda: self.random.random() < self.chances.row_fails
            )
            effects = worker.role.step_done(result, self.now)
        self._carry_out(worker, effects)
        worker.role.check_integrity()
        self._start_step(worker)

    # --- what must hold -----------------------------------------------------------------------

    def check_end(self) -> Counter[str]:
        """After the last event: one Done per leg, right tokens, all pages home."""
        outcomes = self.routers.check_end()
        for worker in self.workers.values():
            assert worker.role.is_idle(), worker.me.worker_id
            worker.role.check_integrity()
            assert worker.pages.available == worker.pages.total
            assert worker.pages.bound == 0
            assert not worker.device.host, "pages were left on the host"
        return outcomes

    # --- random traffic -----------------------------------------------------------------------

    def traffic(self, n_tickets: int, spacing_s: float) -> None:
        """Open tickets at random instants, with the faults that chance asks for."""
        at = 0.0
        prefills, decodes = [w.me for w in self.prefills], [w.me for w in self.decodes]
        size = self.decodes[0].pages.page_size
        draw = Draw(self.random, self.chances, self.habits, prefills, decodes, size)
        for number in range(n_tickets):
            at += self.random.random() * 2 * spacing_s
            ticket = draw.ticket(number)
            router_id = f"r{number % 3}"
            self.after(at, lambda t=ticket, r=router_id: self.routers.open(t, r))
            if self.random.random() < self.chances.cancel:
                gone = at + self.random.random() * 2
                self.after(gone, lambda t=ticket: self.routers.cancel(t.id))
            if self.random.random() < self.chances.retry:
                again = replace(ticket, id=TicketId(ticket.id.request_id, 2))
                later = at + 0.3 + self.random.random()
                self.after(later, lambda t=again, r=router_id: self.routers.open(t, r))
            if self.random.random() < self.chances.router_lost:
                self.after(at + self.random.random(), lambda r=router_id: self.routers.lose(r))

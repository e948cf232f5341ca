"""What a decode worker decides: give places, receive KV, seal, run, stop.

This file owns the tickets whose receiver is this worker, and is the only writer of their tokens.
It must never free pages that a link or the running step may still touch, never turn a failed
transfer into tokens, and never let an event from outside raise: late, duplicate and unknown ones
are counted.

Life of a ticket here:
 1. ``Open``: checked, fenced against older attempts, queued for a place (``intake``).
 2. Placed. Local: its prompt is computed in chunks (``scheduler``). Remote: granted as soon as
    the sender's offer is there, received (``receiving``), sealed; the sender's first token is
    token 0 of the answer.
 3. Running: one token in every step, until EOS, ``max_tokens`` or ``Stop``.
 4. Over: Done to the router, at once or when the step that holds it has ended; Abort to a sender
    that still works on it. Then it drains: pages go when nothing touches them any more.
"""

from __future__ import annotations

from decode_worker.clocks import Clocks
from decode_worker.intake import Intake
from decode_worker.leg import begin, refusal
from decode_worker.memory import Memory
from decode_worker.preemption import Preemption
from decode_worker.receiving import Receiving, late
from decode_worker.scheduler import DecodeScheduler
from decode_worker.steps import Steps
from decode_worker.tickets import Tickets
from kv_transfer.attempts import Standing
from kv_transfer.link_ops import LinkOps
from kv_transfer.pages import Pages
from protocol.costs import StepCosts
from protocol.errors import Cancelled, ErrorInfo, StaleAttempt
from protocol.events import (
    Effect,
    Event,
    FromPeer,
    FromRouter,
    LinkBroken,
    PeerLost,
    RouterLost,
    SegmentReceived,
    SegmentStale,
    ToRouter,
    ToSender,
)
from protocol.messages import Abort, Cancel, Done, Open, RouterHeartbeat, Stop
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepResult
from protocol.types import Outcome, Peer, Ticket, WorkerLoad


class DecodeRole:
    """The decode worker's decisions; see ``protocol.role.WorkerRole``."""

    def __init__(self, me: Peer, pages: Pages, options: RoleOptions) -> None:
        self._me = me
        self._pages = pages
        self._options = options
        self._opened = 0  # tickets so far: their order
        self._costs = StepCosts(options.page_bytes)
        self._memory = Memory(pages, options)
        self._preemption = Preemption(pages, self._memory, self._costs)
        self._intake = Intake(self._memory, self._preemption, options)
        self._scheduler = DecodeScheduler(
            self._memory, self._preemption, options, self._intake.revoke
        )
        self._ops = LinkOps()
        self._tickets = Tickets(
            me.worker_id,
            self._memory,
            self._scheduler,
            self._intake,
            self._ops,
            options.remembered,
        )
        self._receiving = Receiving(
            me,
            pages,
            self._memory,
            options,
            self._intake,
            self._tickets,
            self._scheduler,
            self._ops,
        )
        self._steps = Steps(
            self._memory,
            self._preemption,
            self._scheduler,
            self._intake,
            self._tickets,
            self._costs,
            options,
        )
        self._clocks = Clocks(self._tickets, self._intake, self._ops, options)

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; see ``WorkerRole.handle``."""
        effects = self._take_in(event, now)
        return effects + self._admit(now)

    def _take_in(self, event: Event, now: float) -> list[Effect]:
        match event:
            case FromRouter(router_id, Open(ticket)):
                return self._open(router_id, ticket, now)
            case FromRouter(_, Cancel(ticket_id, cause)):
                leg = self._tickets.live(ticket_id)
                if leg is None:
                    return [late("Cancel")]
                return self._tickets.end(leg, Outcome.CANCELLED, Cancelled(cause).info(), now)
            case FromRouter(_, Stop(ticket_id, choice=choice)):
                leg = self._tickets.live(ticket_id)
                seq = leg.choice(choice) if leg is not None and leg.running else None
                if seq is None:
                    return [late("Stop")]
                return self._tickets.end_choice(seq, now)
            case FromRouter(_, RouterHeartbeat()):
                return []
            case RouterLost(router_id):
                gone = Cancelled(f"router {router_id} is gone").info()
                legs = [leg for leg in self._tickets if leg.router_id == router_id]
                return [
                    e for leg in legs for e in self._tickets.end(leg, Outcome.CANCELLED, gone, now)
                ]
            case FromPeer(worker_id, message):
                return self._receiving.from_peer(worker_id, message, now)
            case (
                SegmentReceived()
                | SegmentStale()
                | LinkBroken(outgoing=False)
                | PeerLost(outgoing=False)
            ):
                return self._receiving.from_link(event, now)
            case _:
                return [late(type(event).__name__)]

    def tick(self, now: float) -> list[Effect]:
        """End what a clock ends; see ``WorkerRole.tick``."""
        return self._clocks.tick(now) + self._admit(now)

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step over running sequences and prompts, or None."""
        return self._steps.plan(now)

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """The planned step ran: one token for every sequence that sampled."""
        return self._steps.done(result, now) + self._admit(now)

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """Every sequence of the step fails; the others go on."""
        return self._steps.failed(error, now) + self._admit(now)

    # --- reports ------------------------------------------------------------------------------

    def load(self, now: float) -> WorkerLoad:
        """See ``WorkerRole.load``."""
        return WorkerLoad(
            running=self._scheduler.n_running,
            waiting=self._intake.n_waiting + self._scheduler.n_prompts + len(self._preemption),
            transferring=sum(
                leg.transfer is not None and leg.transfer.live for leg in self._tickets
            ),
            free_pages=self._pages.available,
            total_pages=self._pages.total,
            steps=self._steps.count,
            step_s=self._steps.step_s,
            busy_s=self._steps.busy_s(now),
            queued_tokens=self._scheduler.queued_tokens,
        )

    def is_idle(self) -> bool:
        """See ``WorkerRole.is_idle``."""
        live = len(self._tickets) + len(self._ops) + self._intake.n_parked
        return not live and not self._steps.running

    def check_integrity(self) -> None:
        """See ``WorkerRole.check_integrity``."""
        self._tickets.check_integrity()

    # --- opening ------------------------------------------------------------------------------

    def _open(self, router_id: str, ticket: Ticket, now: float) -> list[Effect]:
        standing = self._tickets.attempts.standing(ticket.id)
        if standing is Standing.DUPLICATE:
            return [late("Open")]
        if standing is Standing.STALE:
            self._tickets.attempts.finish(ticket.id)
            stale = StaleAttempt(f"{ticket.id} is older than an attempt known here").info()
            return [ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=stale))]
        effects: list[Effect] = []
        old = self._tickets.attempts.live_attempt(ticket.id) if standing is Standing.NEWER else None
        if old is not None and (held := self._tickets.live(old)) is not None:
            newer = Cancelled(f"{ticket.id} took its place").info()
            effects += self._tickets.end(held, Outcome.CANCELLED, newer, now)
        sender = ticket.sender
        parked = self._intake.unpark(sender.worker_id, ticket.id) if sender else None
        error = refusal(ticket, self._me, self._pages, self._options, self._intake.n_waiting)
        if error is not None:
            self._tickets.attempts.finish(ticket.id)
            if sender is not None and parked is not None:
                effects.append(ToSender(sender.worker_id, Abort(ticket.id, error)))
            return [*effects, ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=error))]
        self._opened += 1
        leg = begin(router_id, ticket, self._opened, now, self._pages, self._options)
        self._tickets.add(leg)
        self._intake.wait(leg)
        if parked is not None:
            effects += self._receiving.meet(leg, *parked, now)
        effects += self._admit(now)
        if leg.outcome is None and self._intake.waits(leg):
            effects.append(self._intake.queued(leg))
        return effects

    def _admit(self, now: float) -> list[Effect]:
        placed, effects = self._intake.admit(now)
        for leg in placed:
            if leg.transfer is None:
                self._scheduler.join(leg.first)
        return [*self._preemption.take_counts(), *effects]

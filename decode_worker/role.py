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

from decode_worker.intake import Intake
from decode_worker.leg import Leg, refusal
from decode_worker.receiving import Receiving, late
from decode_worker.scheduler import DecodeScheduler
from decode_worker.tickets import Tickets
from kv_transfer.attempts import Standing
from kv_transfer.link_ops import LinkOps
from kv_transfer.pages import Pages
from kv_transfer.receiver import ReceiveTransfer
from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    StaleAttempt,
    Unavailable,
)
from protocol.events import (
    BreakLink,
    Count,
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
from protocol.lifecycle import ReceiveState
from protocol.messages import (
    Abort,
    Cancel,
    Done,
    Open,
    RouterHeartbeat,
    Stop,
    TokenItem,
    Tokens,
    TransferHeartbeat,
)
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepResult
from protocol.types import Outcome, Peer, Ticket, TicketId, WorkerLoad

MID_TRANSFER = (ReceiveState.RECEIVING, ReceiveState.COMMITTED)


class DecodeRole:
    """The decode worker's decisions; see ``protocol.role.WorkerRole``."""

    def __init__(self, me: Peer, pages: Pages, options: RoleOptions) -> None:
        self._me = me
        self._pages = pages
        self._options = options
        self._scheduler = DecodeScheduler(pages, options)
        self._intake = Intake(pages, options)
        self._ops = LinkOps()
        self._tickets = Tickets(
            me.worker_id, pages, self._scheduler, self._intake, self._ops, options.remembered
        )
        self._receiving = Receiving(
            me, pages, options, self._intake, self._tickets, self._scheduler, self._ops
        )
        self._step_began = 0.0
        self._steps = 0
        self._step_s = 0.0
        self._beat_at = 0.0

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
            case FromRouter(_, Stop(ticket_id)):
                leg = self._tickets.live(ticket_id)
                if leg is None or not leg.running:
                    return [late("Stop")]
                return self._tickets.end(leg, Outcome.OK, None, now)
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
        """End what a clock ends: deadlines, credits, parked offers, silent senders."""
        effects: list[Effect] = []
        for leg in self._tickets:
            if leg.outcome is not None:
                continue
            silent = now - leg.transfer.heard_at if leg.transfer else 0.0
            if now >= leg.deadline:
                over = DeadlineExceeded(f"deadline passed after {now - leg.opened_at:.1f} s").info()
                effects += self._tickets.end(leg, Outcome.FAILED, over, now)
            elif (
                leg.transfer is not None
                and leg.transfer.state in MID_TRANSFER
                and silent > self._options.lease_s
            ):
                lost = Unavailable(
                    f"{leg.transfer.worker_id} said nothing about the hand-off for {silent:.1f} s"
                ).info()
                effects += [Count("leases_ended", "silence"), *self._tickets.lose(leg, lost, now)]
        for leg in self._intake.lapse(now):
            effects += [Count("leases_ended", "credit"), self._intake.queued(leg)]
        for worker_id, ticket_id in self._intake.stale_offers(now):
            unopened = Unavailable(f"no router opened {ticket_id} here within the lease").info()
            effects += [
                Count("leases_ended", "offer"),
                ToSender(worker_id, Abort(ticket_id, unopened)),
            ]
        bound = self._options.lease_s + self._options.link_op_s
        for worker_id in self._ops.overdue(now, bound):
            effects.append(BreakLink(worker_id, False, f"no segment came for {bound} s"))
        if now - self._beat_at >= self._options.heartbeat_s:
            self._beat_at = now
            live: dict[str, list[TicketId]] = {}
            for leg in self._tickets:
                if leg.outcome is None and leg.transfer and leg.transfer.live:
                    live.setdefault(leg.transfer.worker_id, []).append(leg.ticket.id)
            effects += [ToSender(w, TransferHeartbeat(tuple(ids))) for w, ids in live.items()]
        return effects + self._admit(now)

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step: every running sequence, and prompt chunks in what is left."""
        if self._tickets.step is not None:
            raise InternalError("a step is planned while another one is running")
        self._tickets.step = self._scheduler.plan(self._intake.reasons(), now)
        self._step_began = now
        return self._tickets.step

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """Deliver the step's tokens, one message per router; end the answers that are over."""
        plan = self._take_step(now, result.seconds)
        items: dict[str, list[TokenItem]] = {}
        ended: list[Leg] = []
        effects: list[Effect] = []
        for row, got in zip(plan.rows, result.rows, strict=True):
            leg = self._in_step(row.ticket_id)
            if leg.outcome is not None:
                effects += self._tickets.finish(leg, now)
                continue
            error, tokens = got.error, got.tokens
            if error is None and row.sample is not None and not tokens:
                error = InternalError(f"the step gave no token for {row.ticket_id}").info()
            if error is not None:
                effects += self._tickets.end(leg, Outcome.FAILED, error, now)
                continue
            leg.computed += len(row.tokens)
            if row.sample is None or not tokens:
                continue
            if not leg.running:
                self._scheduler.started(leg)
                leg.running_at = now
            item = leg.take(tokens[0], self._options.eos_token_ids)
            items.setdefault(leg.router_id, []).append(item)
            if item.finish_reason is not None:
                ended.append(leg)
        effects += [ToRouter(router_id, Tokens(tuple(i))) for router_id, i in items.items()]
        for leg in ended:
            effects += self._tickets.end(leg, Outcome.OK, None, now)
        return effects + self._admit(now)

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """Every sequence of the step fails; the others go on."""
        effects: list[Effect] = []
        for ticket_id in self._take_step(now, 0.0).advance:
            leg = self._in_step(ticket_id)
            if leg.outcome is not None:
                effects += self._tickets.finish(leg, now)
            else:
                effects += self._tickets.end(leg, Outcome.FAILED, error, now)
        return effects + self._admit(now)

    # --- reports ------------------------------------------------------------------------------

    def load(self, now: float) -> WorkerLoad:
        """See ``WorkerRole.load``."""
        return WorkerLoad(
            running=self._scheduler.n_running,
            waiting=self._intake.n_waiting + self._scheduler.n_prompts,
            transferring=sum(
                leg.transfer is not None and leg.transfer.live for leg in self._tickets
            ),
            free_pages=self._pages.available,
            total_pages=self._pages.total,
            steps=self._steps,
            step_s=self._step_s,
            busy_s=now - self._step_began if self._tickets.step else 0.0,
            queued_tokens=self._scheduler.queued_tokens,
        )

    def is_idle(self) -> bool:
        """See ``WorkerRole.is_idle``."""
        live = len(self._tickets) + len(self._ops) + self._intake.n_parked
        return not live and self._tickets.step is None

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
        leg = Leg(router_id, ticket, now, now + ticket.remaining_s, list(ticket.tokens))
        if sender is not None:
            n_pages = self._pages.pages_for(len(ticket.tokens))
            page_bytes = self._options.page_bytes
            leg.transfer = ReceiveTransfer(ticket.id, sender.worker_id, n_pages, page_bytes)
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
                self._scheduler.join(leg)
        return effects

    def _in_step(self, ticket_id: TicketId) -> Leg:
        leg = self._tickets.get(ticket_id)
        if leg is None:
            raise InternalError(f"{ticket_id} ended while a step held it")
        return leg

    def _take_step(self, now: float, seconds: float) -> StepPlan:
        plan, self._tickets.step = self._tickets.step, None
        if plan is None:
            raise InternalError("a step ended that was not planned")
        seconds = seconds or now - self._step_began
        self._steps += 1
        self._step_s = seconds if self._step_s == 0.0 else 0.8 * self._step_s + 0.2 * seconds
        return plan

"""What a prefill worker decides: compute prompts, offer them, send their pages, commit.

This file owns the tickets whose sender is this worker. It must never free pages that a link or
the running step may still touch, never send a token to a router (the receiver is the only
writer), and never let an event from outside raise: late, duplicate and unknown ones are counted.

Life of a ticket here:
 1. ``Open``: checked, fenced against older attempts, offered to the receiver at once.
 2. Computed in chunks without waiting for the grant (``scheduler``), from where the prefix cache
    ends.
 3. Granted: complete pages are announced and sent after every chunk (``kv_transfer.sender``).
 4. All sent that the receiver does not hold, first tokens known: ``Commit``. ``Sealed``: Done(OK)
    with timings.
 5. Over for any other reason: Abort to the receiver, Done to the router, at once or, while a
    step computes it, when that step has ended. Then it drains: pages go when nothing touches them.
"""

from __future__ import annotations

from kv_transfer.attempts import Attempts, Standing
from kv_transfer.layout import SegmentRule
from kv_transfer.pages import Pages
from kv_transfer.sender import SendTransfer
from prefill_worker.handoff import HandOff
from prefill_worker.leg import Leg, refusal
from prefill_worker.scheduler import PrefillScheduler
from protocol.errors import (
    Cancelled,
    DataLoss,
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
    SegmentSent,
    SegmentStale,
    ToReceiver,
    ToRouter,
)
from protocol.lifecycle import SendState
from protocol.messages import (
    Abort,
    Cancel,
    Done,
    Grant,
    Offer,
    Open,
    RouterHeartbeat,
    Sealed,
    TransferHeartbeat,
    Window,
)
from protocol.role import RoleOptions
from protocol.step import StepPlan, StepResult
from protocol.types import Outcome, Peer, Ticket, TicketId, WorkerLoad


class PrefillRole:
    """The prefill worker's decisions; see ``protocol.role.WorkerRole``."""

    def __init__(self, me: Peer, pages: Pages, options: RoleOptions) -> None:
        self._me = me
        self._pages = pages
        self._options = options
        self._rule = SegmentRule(options.page_bytes, options.max_segment_bytes)
        self._scheduler = PrefillScheduler(pages, options)
        self._attempts = Attempts(options.remembered)
        self._hand_off = HandOff(pages, options)
        self._ops = self._hand_off.ops
        self._legs: dict[TicketId, Leg] = {}
        self._draining: dict[TicketId, Leg] = {}
        self._step: StepPlan | None = None
        self._step_began = 0.0
        self._steps = 0
        self._step_s = 0.0
        self._token_s = 0.0  # moving average of seconds per prompt token
        self._beat_at = 0.0

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; see ``WorkerRole.handle``."""
        match event:
            case FromRouter(router_id, Open(ticket)):
                return self._open(router_id, ticket, now)
            case FromRouter(_, Cancel(ticket_id, cause)):
                leg = self._legs.get(ticket_id)
                if leg is None or leg.outcome is not None:
                    return [_late("Cancel")]
                return self._end(leg, Outcome.CANCELLED, Cancelled(cause).info(), now)
            case FromRouter(_, RouterHeartbeat()) | FromPeer(_, TransferHeartbeat()):
                return []
            case RouterLost(router_id):
                gone = Cancelled(f"router {router_id} is gone").info()
                legs = [leg for leg in self._legs.values() if leg.router_id == router_id]
                return [e for leg in legs for e in self._end(leg, Outcome.CANCELLED, gone, now)]
            case FromPeer(worker_id, Grant() | Window() | Sealed() | Abort() as message):
                leg = self._legs.get(message.ticket_id)
                if leg is None or leg.outcome or leg.ticket.receiver.worker_id != worker_id:
                    return [_late(type(message).__name__)]
                return self._from_receiver(leg, message, now)
            case SegmentSent(worker_id, ticket_id, segment, checksum):
                return self._sent(worker_id, ticket_id, segment, checksum, now)
            case SegmentStale(worker_id, ticket_id, segment):
                return self._stale(worker_id, ticket_id, segment, now)
            case LinkBroken(worker_id, error, outgoing=True):
                hit = self._ops.broken(worker_id)
                effects = [e for i in hit for e in self._fail_hand_off(i, error, now)]
                for ticket_id in hit:
                    self._release_if_quiet(ticket_id)
                return effects
            case PeerLost(worker_id, error, outgoing=True):
                return self._peer_lost(worker_id, error, now)
            case _:
                return [_late(type(event).__name__)]

    def tick(self, now: float) -> list[Effect]:
        """End what a clock ends: deadlines, hand-offs that stand still, links that do."""
        effects: list[Effect] = []
        for leg in list(self._legs.values()):
            if leg.outcome is not None:
                continue
            if now >= leg.deadline:
                late = DeadlineExceeded(f"deadline passed after {now - leg.opened_at:.1f} s").info()
                effects += self._end(leg, Outcome.FAILED, late, now)
            elif leg.transfer.waits_for_receiver and now - leg.moved_at > self._options.lease_s:
                silent = Unavailable(
                    f"{leg.ticket.receiver.worker_id} said nothing about the hand-off for "
                    f"{now - leg.moved_at:.1f} s"
                ).info()
                effects.append(Count("leases_ended", "silence"))
                effects += self._end(leg, Outcome.FAILED, silent, now)
            elif leg.transfer.can_announce:  # pages from the cache need not wait for the step
                effects += self._hand_off.go_on(leg, now)
        bound = self._options.lease_s + self._options.link_op_s
        for worker_id in self._ops.overdue(now, bound):
            effects.append(BreakLink(worker_id, True, f"no segment left it for {bound} s"))
        if now - self._beat_at >= self._options.heartbeat_s:
            self._beat_at = now
            live: dict[Peer, list[TicketId]] = {}
            for ticket_id, leg in self._legs.items():
                if leg.outcome is None:
                    live.setdefault(leg.ticket.receiver, []).append(ticket_id)
            effects += [ToReceiver(p, TransferHeartbeat(tuple(ids))) for p, ids in live.items()]
        return effects

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step over the waiting prompts, or None."""
        if self._step is not None:
            raise InternalError("a step is planned while another one is running")
        plan, dropped = self._scheduler.plan()
        for prompt in dropped:
            self._legs[prompt.ticket.id].drop_work()
        if plan is None:
            return None
        self._step, self._step_began = plan, now
        for ticket_id in plan.advance:
            leg = self._legs[ticket_id]
            leg.began_at = now if leg.began_at is None else leg.began_at
            leg.transfer.computed(self._scheduler.final_pages(leg.prompt))  # found in the cache
        return plan

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """Complete pages go out; a finished prompt gets its first tokens."""
        plan = self._take_step()
        seconds = result.seconds or now - self._step_began
        self._steps += 1
        self._step_s = _average(self._step_s, seconds)
        self._token_s = _average(self._token_s, seconds / plan.n_tokens)
        effects: list[Effect] = []
        for row, got in zip(plan.rows, result.rows, strict=True):
            leg = self._legs[row.ticket_id]
            if leg.outcome is not None:
                effects += self._finish(leg)
                continue
            error = leg.take(row, got, now)
            if error is not None:
                if error.reason == InternalError.reason:
                    self._scheduler.distrust(leg.prompt)
                effects += self._end(leg, Outcome.FAILED, error, now)
                continue
            self._scheduler.advance(leg.prompt, len(row.tokens))
            leg.transfer.computed(self._scheduler.final_pages(leg.prompt))
            effects += self._hand_off.go_on(leg, now)
        return effects

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """Every prompt of the step fails; the others go on."""
        effects: list[Effect] = []
        for ticket_id in self._take_step().advance:
            leg = self._legs[ticket_id]
            if leg.outcome is not None:
                effects += self._finish(leg)
            else:
                effects += self._end(leg, Outcome.FAILED, error, now)
        return effects

    # --- reports ------------------------------------------------------------------------------

    def load(self, now: float) -> WorkerLoad:
        """See ``WorkerRole.load``."""
        return WorkerLoad(
            running=len(self._step.advance) if self._step else 0,
            waiting=len(self._scheduler),
            transferring=sum(leg.transfer.granted for leg in self._legs.values()),
            free_pages=self._pages.available,
            total_pages=self._pages.total,
            steps=self._steps,
            step_s=self._step_s,
            busy_s=now - self._step_began if self._step else 0.0,
            queued_tokens=self._scheduler.queued_tokens,
        )

    def is_idle(self) -> bool:
        """See ``WorkerRole.is_idle``."""
        return not (self._legs or self._draining or self._step or len(self._ops))

    def check_integrity(self) -> None:
        """Pages add up, and every reservation belongs to a ticket that is known here."""
        self._pages.check_integrity()
        legs = [*self._legs.values(), *self._draining.values()]
        held = sum(leg.prompt.reservation.pages for leg in legs if leg.prompt.reservation)
        account = self._pages.references + self._pages.credited
        if held != account:
            raise InternalError(f"prefill: tickets hold {held} pages, {account} are in use")

    # --- opening ------------------------------------------------------------------------------

    def _open(self, router_id: str, ticket: Ticket, now: float) -> list[Effect]:
        standing = self._attempts.standing(ticket.id)
        if standing is Standing.DUPLICATE:
            return [_late("Open")]
        if standing is Standing.STALE:
            self._attempts.finish(ticket.id)
            stale = StaleAttempt(f"{ticket.id} is older than an attempt known here").info()
            return [ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=stale))]
        effects: list[Effect] = []
        if standing is Standing.NEWER:
            effects += self._make_way(ticket.id, now)
        error = refusal(ticket, self._me, self._pages, self._options, len(self._scheduler))
        if error is not None:
            self._attempts.finish(ticket.id)
            return [*effects, ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=error))]
        self._attempts.begin(ticket.id)
        ahead_tokens = self._scheduler.queued_tokens
        prompt = self._scheduler.add(ticket)
        n_pages = self._pages.pages_for(prompt.n_tokens)
        self._legs[ticket.id] = Leg(
            router_id=router_id,
            ticket=ticket,
            prompt=prompt,
            transfer=SendTransfer(ticket.id, n_pages, self._rule),
            opened_at=now,
            deadline=now + ticket.remaining_s,
            moved_at=now,
        )
        first_chunk = min(prompt.n_tokens, self._options.max_num_batched_tokens)
        starts_in = (ahead_tokens + first_chunk) * self._token_s
        offer = Offer(ticket.id, prompt.n_tokens, predicted_start_s=starts_in)
        return [*effects, ToReceiver(ticket.receiver, offer)]

    def _make_way(self, ticket_id: TicketId, now: float) -> list[Effect]:
        old = self._attempts.live_attempt(ticket_id)
        leg = self._legs.get(old) if old else None
        if leg is None or leg.outcome is not None:
            return []
        newer = Cancelled(f"{ticket_id} took its place").info()
        return self._end(leg, Outcome.CANCELLED, newer, now)

    # --- the hand-off -------------------------------------------------------------------------

    def _from_receiver(
        self, leg: Leg, message: Grant | Window | Sealed | Abort, now: float
    ) -> list[Effect]:
        effects: list[Effect] | None = None
        match message:
            case Grant():
                effects = self._hand_off.granted(leg, message, now)
            case Window():
                effects = self._hand_off.widened(leg, message, now)
            case Sealed() if leg.transfer.state is SendState.COMMITTED:
                leg.transfer.seal()
                return self._end(leg, Outcome.OK, None, now)
            case Abort(_, error):
                leg.transfer.abort()  # both ends know: no answer
                cancelled = error.reason == Cancelled.reason
                outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED
                return self._end(leg, outcome, error, now)
        return [_late(type(message).__name__)] if effects is None else effects

    def _sent(
        self, worker_id: str, ticket_id: TicketId, segment: int, checksum: int, now: float
    ) -> list[Effect]:
        if self._ops.ended(worker_id, ticket_id, segment, now) is None:
            return [_late("SegmentSent")]
        leg = self._legs.get(ticket_id)
        if leg is None or leg.outcome is not None:
            self._release_if_quiet(ticket_id)
            return []
        leg.transfer.sent(segment, checksum)
        return self._hand_off.go_on(leg, now)

    def _stale(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> list[Effect]:
        if self._ops.ended(worker_id, ticket_id, segment, now) is None:
            return [_late("SegmentStale")]
        loss = DataLoss(f"a page of segment {segment} of {ticket_id} changed while it was sent")
        effects = self._fail_hand_off(ticket_id, loss.info(), now)
        self._release_if_quiet(ticket_id)
        return effects

    def _fail_hand_off(self, ticket_id: TicketId, error: ErrorInfo, now: float) -> list[Effect]:
        leg = self._legs.get(ticket_id)
        if leg is None or leg.outcome is not None:
            return []
        return self._end(leg, Outcome.FAILED, error, now)

    def _peer_lost(self, worker_id: str, error: ErrorInfo, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._ops.busy_with(worker_id):
            effects.append(BreakLink(worker_id, True, "its Transfer stream ended"))
        for leg in list(self._legs.values()):
            if leg.ticket.receiver.worker_id == worker_id and leg.outcome is None:
                leg.transfer.abort()  # nobody is there to be told
                effects += self._end(leg, Outcome.FAILED, error, now)
        return effects

    # --- ending -------------------------------------------------------------------------------

    def _end(self, leg: Leg, outcome: Outcome, error: ErrorInfo | None, now: float) -> list[Effect]:
        """Decide how a ticket ends; say so now, or when the step that computes it has ended."""
        if leg.outcome is not None:
            return []
        leg.outcome, leg.error = outcome, error
        leg.moved_at = now
        self._scheduler.forget(leg.prompt)
        effects: list[Effect] = []
        if not leg.transfer.over:
            leg.transfer.abort()
            abort = Abort(leg.ticket.id, error or Cancelled("over").info())
            effects.append(ToReceiver(leg.ticket.receiver, abort))
        if self._step is None or leg.ticket.id not in self._step.advance:
            effects += self._finish(leg)
        return effects

    def _finish(self, leg: Leg) -> list[Effect]:
        """Say Done, and let the pages go as soon as nothing touches them."""
        ticket_id = leg.ticket.id
        del self._legs[ticket_id]
        self._draining[ticket_id] = leg
        self._attempts.finish(ticket_id)
        self._release_if_quiet(ticket_id)
        if leg.outcome is None:
            raise InternalError(f"{ticket_id} is finished without an outcome")
        error = leg.error if leg.outcome is Outcome.FAILED else None
        return [
            ToRouter(
                leg.router_id, Done(ticket_id, leg.outcome, leg.timings(self._me.worker_id), error)
            )
        ]

    def _release_if_quiet(self, ticket_id: TicketId) -> None:
        leg = self._draining.get(ticket_id)
        if leg is None or not self._hand_off.may_free(ticket_id):
            return
        if leg.prompt.reservation is not None:
            self._pages.release(leg.prompt.reservation)
            leg.prompt.reservation = None
        del self._draining[ticket_id]

    def _take_step(self) -> StepPlan:
        plan, self._step = self._step, None
        if plan is None:
            raise InternalError("a step ended that was not planned")
        return plan


def _late(what: str) -> Count:
    return Count("events_ignored", what)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else 0.8 * old + 0.2 * new

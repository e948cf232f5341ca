"""What a prefill worker decides: compute prompts, offer them, send their pages, commit.

This file owns what every event means for the tickets whose sender is this worker. It must never
send a token to a router (the receiver is the only writer), and never let an event from outside
raise: late, duplicate and unknown ones are counted. Steps (``steps``), clocks (``clocks``), links
(``handoff``) and endings (``tickets``) have files of their own.

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

from kv_transfer.attempts import Standing
from kv_transfer.layout import SegmentRule
from kv_transfer.pages import Pages
from kv_transfer.sender import SendTransfer
from prefill_worker.clocks import Clocks
from prefill_worker.handoff import HandOff
from prefill_worker.leg import Leg, refusal
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.steps import Steps
from prefill_worker.tickets import Tickets
from protocol.errors import Cancelled, DataLoss, ErrorInfo, StaleAttempt
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
        self._hand_off = HandOff(pages, options)
        self._ops = self._hand_off.ops
        self._tickets = Tickets(me.worker_id, pages, self._scheduler, self._ops, options.remembered)
        self._steps = Steps(self._tickets, self._scheduler, self._hand_off)
        self._clocks = Clocks(self._tickets, self._hand_off, options)

    # --- events -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; see ``WorkerRole.handle``."""
        match event:
            case FromRouter(router_id, Open(ticket)):
                return self._open(router_id, ticket, now)
            case FromRouter(_, Cancel(ticket_id, cause)):
                leg = self._tickets.live(ticket_id)
                if leg is None:
                    return [_late("Cancel")]
                return self._tickets.end(leg, Outcome.CANCELLED, Cancelled(cause).info(), now)
            case FromRouter(_, RouterHeartbeat()) | FromPeer(_, TransferHeartbeat()):
                return []
            case RouterLost(router_id):
                gone = Cancelled(f"router {router_id} is gone").info()
                return [
                    e
                    for leg in self._tickets
                    if leg.router_id == router_id
                    for e in self._tickets.end(leg, Outcome.CANCELLED, gone, now)
                ]
            case FromPeer(worker_id, Grant() | Window() | Sealed() | Abort() as message):
                leg = self._tickets.live(message.ticket_id)
                if leg is None or leg.ticket.receiver.worker_id != worker_id:
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
                    self._tickets.release_if_quiet(ticket_id)
                return effects
            case PeerLost(worker_id, error, outgoing=True):
                return self._peer_lost(worker_id, error, now)
            case _:
                return [_late(type(event).__name__)]

    def tick(self, now: float) -> list[Effect]:
        """End what a clock ends: deadlines, hand-offs that stand still, links that do."""
        return self._clocks.tick(now)

    # --- steps --------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step over the waiting prompts, or None."""
        return self._steps.plan(now)

    def step_done(self, result: StepResult, now: float) -> list[Effect]:
        """Complete pages go out; a finished prompt gets its first tokens."""
        return self._steps.done(result, now)

    def step_failed(self, error: ErrorInfo, now: float) -> list[Effect]:
        """Every prompt of the step fails; the others go on."""
        return self._steps.failed(error, now)

    # --- reports ------------------------------------------------------------------------------

    def load(self, now: float) -> WorkerLoad:
        """See ``WorkerRole.load``."""
        return WorkerLoad(
            running=self._steps.n_running,
            waiting=len(self._scheduler),
            transferring=sum(leg.transfer.granted for leg in self._tickets),
            free_pages=self._pages.available,
            total_pages=self._pages.total,
            steps=self._steps.count,
            step_s=self._steps.step_s,
            busy_s=self._steps.busy_s(now),
            queued_tokens=self._scheduler.queued_tokens,
        )

    def is_idle(self) -> bool:
        """See ``WorkerRole.is_idle``."""
        return not (len(self._tickets) or self._steps.n_running or len(self._ops))

    def check_integrity(self) -> None:
        """See ``WorkerRole.check_integrity``."""
        self._tickets.check_integrity()

    # --- opening ------------------------------------------------------------------------------

    def _open(self, router_id: str, ticket: Ticket, now: float) -> list[Effect]:
        standing = self._tickets.attempts.standing(ticket.id)
        if standing is Standing.DUPLICATE:
            return [_late("Open")]
        if standing is Standing.STALE:
            self._tickets.attempts.finish(ticket.id)
            stale = StaleAttempt(f"{ticket.id} is older than an attempt known here").info()
            return [ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=stale))]
        effects: list[Effect] = []
        if standing is Standing.NEWER:
            effects += self._make_way(ticket.id, now)
        error = refusal(ticket, self._me, self._pages, self._options, len(self._scheduler))
        if error is not None:
            self._tickets.attempts.finish(ticket.id)
            return [*effects, ToRouter(router_id, Done(ticket.id, Outcome.FAILED, error=error))]
        ahead_tokens = self._scheduler.queued_tokens
        prompt = self._scheduler.add(ticket)
        n_pages = self._pages.pages_for(prompt.n_tokens)
        leg = Leg(
            router_id=router_id,
            ticket=ticket,
            prompt=prompt,
            transfer=SendTransfer(ticket.id, n_pages, self._rule),
            opened_at=now,
            deadline=now + ticket.remaining_s,
            moved_at=now,
        )
        self._tickets.add(leg)
        first_chunk = min(prompt.n_tokens, self._options.max_num_batched_tokens)
        starts_in = (ahead_tokens + first_chunk) * self._steps.token_s
        offer = Offer(ticket.id, prompt.n_tokens, predicted_start_s=starts_in)
        return [*effects, ToReceiver(ticket.receiver, offer)]

    def _make_way(self, ticket_id: TicketId, now: float) -> list[Effect]:
        old = self._tickets.attempts.live_attempt(ticket_id)
        leg = self._tickets.live(old) if old else None
        if leg is None:
            return []
        newer = Cancelled(f"{ticket_id} took its place").info()
        return self._tickets.end(leg, Outcome.CANCELLED, newer, now)

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
                return self._tickets.end(leg, Outcome.OK, None, now)
            case Abort(_, error):
                leg.transfer.abort()  # both ends know: no answer
                cancelled = error.reason == Cancelled.reason
                outcome = Outcome.CANCELLED if cancelled else Outcome.FAILED
                return self._tickets.end(leg, outcome, error, now)
        return [_late(type(message).__name__)] if effects is None else effects

    def _sent(
        self, worker_id: str, ticket_id: TicketId, segment: int, checksum: int, now: float
    ) -> list[Effect]:
        if self._ops.ended(worker_id, ticket_id, segment, now) is None:
            return [_late("SegmentSent")]
        leg = self._tickets.live(ticket_id)
        if leg is None:
            self._tickets.release_if_quiet(ticket_id)
            return []
        leg.transfer.sent(segment, checksum)
        return self._hand_off.go_on(leg, now)

    def _stale(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> list[Effect]:
        if self._ops.ended(worker_id, ticket_id, segment, now) is None:
            return [_late("SegmentStale")]
        loss = DataLoss(f"a page of segment {segment} of {ticket_id} changed while it was sent")
        effects = self._fail_hand_off(ticket_id, loss.info(), now)
        self._tickets.release_if_quiet(ticket_id)
        return effects

    def _fail_hand_off(self, ticket_id: TicketId, error: ErrorInfo, now: float) -> list[Effect]:
        leg = self._tickets.live(ticket_id)
        if leg is None:
            return []
        return self._tickets.end(leg, Outcome.FAILED, error, now)

    def _peer_lost(self, worker_id: str, error: ErrorInfo, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._ops.busy_with(worker_id):
            effects.append(BreakLink(worker_id, True, "its Transfer stream ended"))
        for leg in self._tickets:
            if leg.ticket.receiver.worker_id == worker_id:
                leg.transfer.abort()  # nobody is there to be told
                effects += self._tickets.end(leg, Outcome.FAILED, error, now)
        return effects


def _late(what: str) -> Count:
    return Count("events_ignored", what)

"""Pages coming in: every announcement gets exactly one receive, into pages or into a sink.

This file owns the link operations of the receiving side. It must never leave an announcement
without a receive (the link would be out of step for every ticket after it), and never call a
sequence whole before ``kv_transfer.receiver`` does.

Life of a segment: announced -> pages bound under the ticket's credit, receive queued -> the
link's report -> one more may be announced (``Window``) -> after the commit, the verdict. Sealed
pages get their names in the prefix cache, and never before.
"""

from __future__ import annotations

from decode_worker.intake import Intake
from decode_worker.leg import Leg
from decode_worker.memory import Memory
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import On
from decode_worker.tickets import Tickets
from kv_transfer.link_ops import LinkOps
from kv_transfer.pages import Pages
from kv_transfer.receiver import ReceiveTransfer
from protocol.errors import (
    Cancelled,
    DataLoss,
    ErrorInfo,
    Overloaded,
    PeerMismatch,
    Unavailable,
)
from protocol.events import (
    BreakLink,
    Count,
    Effect,
    LinkBroken,
    PeerLost,
    ReceivePages,
    SegmentReceived,
    SegmentStale,
    ToRouter,
    ToSender,
)
from protocol.lifecycle import ReceiveEvent, ReceiveState
from protocol.messages import (
    Abort,
    Announce,
    Commit,
    Offer,
    ReceiverToSender,
    Sealed,
    SenderToReceiver,
    Tokens,
    TransferHeartbeat,
    Window,
)
from protocol.role import RoleOptions
from protocol.types import Outcome, Peer, TicketId

LinkEvent = SegmentReceived | SegmentStale | LinkBroken | PeerLost


class Receiving:
    """Incoming pages of all tickets of one worker."""

    def __init__(
        self,
        me: Peer,
        pages: Pages,
        memory: Memory,
        options: RoleOptions,
        intake: Intake,
        tickets: Tickets,
        scheduler: DecodeScheduler,
        ops: LinkOps,
    ) -> None:
        self._me = me
        self._pages = pages
        self._memory = memory
        self._options = options
        self._intake = intake
        self._tickets = tickets
        self._scheduler = scheduler
        self._ops = ops

    def from_peer(
        self, worker_id: str, message: SenderToReceiver | ReceiverToSender, now: float
    ) -> list[Effect]:
        """A message on the Transfer stream that a prefill worker opened to this one."""
        match message:
            case Offer():
                return self._offer(worker_id, message, now)
            case TransferHeartbeat(live):
                for ticket_id in live:
                    leg = self._tickets.live(ticket_id)
                    if leg is not None and leg.transfer and leg.transfer.worker_id == worker_id:
                        leg.transfer.heard_at = now
                return []
            case Announce() | Commit() | Abort():
                return self._from_sender(worker_id, message, now)
            case _:
                return [late(type(message).__name__)]

    def from_link(self, event: LinkEvent, now: float) -> list[Effect]:
        """A report about the incoming link, or the end of the stream that announces for it."""
        match event:
            case SegmentReceived(worker_id, ticket_id, segment, checksum):
                return self._received(worker_id, ticket_id, segment, checksum, now)
            case SegmentStale(worker_id, ticket_id, segment):
                return self._stale(worker_id, ticket_id, segment, now)
            case LinkBroken(worker_id, error):
                return self._link_broken(worker_id, error, now)
            case PeerLost(worker_id, error):
                return self._peer_lost(worker_id, error, now)

    def _offer(self, worker_id: str, offer: Offer, now: float) -> list[Effect]:
        ticket_id = offer.ticket_id
        leg = self._tickets.get(ticket_id)
        if leg is not None:
            transfer = leg.transfer
            mine = transfer is not None and transfer.worker_id == worker_id
            if leg.outcome is not None or not mine or (transfer and transfer.offer is not None):
                return [late("Offer")]
            return self.meet(leg, offer, now, now)
        if self._tickets.attempts.is_over(ticket_id):
            over = Unavailable(f"{ticket_id} is over on {self._me.worker_id}").info()
            return [late("Offer"), ToSender(worker_id, Abort(ticket_id, over))]
        if not self._intake.park(worker_id, offer, now):
            full = Overloaded(f"{worker_id} has too many offers whose tickets have not come").info()
            return [late("Offer"), ToSender(worker_id, Abort(ticket_id, full))]
        return []

    def meet(self, leg: Leg, offer: Offer, came_at: float, now: float) -> list[Effect]:
        """Offer and ticket are both here."""
        effects = self._intake.offered(leg, offer, came_at, now)
        if offer.n_tokens != len(leg.ticket.tokens):
            wrong = PeerMismatch(
                f"{leg.ticket.id}: the sender offers {offer.n_tokens} tokens, the ticket has "
                f"{len(leg.ticket.tokens)}"
            ).info()
            return self._tickets.lose(leg, wrong, now)
        return effects

    def _from_sender(
        self, worker_id: str, message: Announce | Commit | Abort, now: float
    ) -> list[Effect]:
        leg = self._tickets.live(message.ticket_id)
        transfer = leg.transfer if leg is not None else None
        if leg is None or transfer is None or transfer.over or transfer.worker_id != worker_id:
            effects: list[Effect] = [late(type(message).__name__)]
            if isinstance(message, Announce):
                effects.append(self._sink(worker_id, message, now))
            if isinstance(message, Abort):
                self._intake.unpark(worker_id, message.ticket_id)
            return effects
        match message:
            case Announce():
                effects, fault = self._announced(leg, transfer, message, now)
                return effects + (self._fail(leg, fault, now) if fault else [])
            case Commit() if transfer.state is ReceiveState.COMMITTED:
                return [late("Commit")]
            case Commit():
                effects, fault = self._committed(leg, transfer, message, now)
                return effects + (
                    self._fail(leg, fault, now) if fault else self._judge(leg, transfer, now)
                )
            case Abort(_, error):
                transfer.follow(ReceiveEvent.ABORT)  # both ends know: no answer
                if error.reason == Cancelled.reason:
                    return self._tickets.end(leg, Outcome.CANCELLED, error, now)
                return self._tickets.lose(leg, error, now)

    def _received(
        self, worker_id: str, ticket_id: TicketId, segment: int, checksum: int, now: float
    ) -> list[Effect]:
        into_pages = self._ops.ended(worker_id, ticket_id, segment, now)
        if into_pages is None:
            return [late("SegmentReceived")]
        leg = self._tickets.live(ticket_id)
        if not into_pages or leg is None or leg.transfer is None or leg.transfer.over:
            self._tickets.release_if_quiet(ticket_id)
            return []
        transfer = leg.transfer
        effects: list[Effect] = []
        transfer.heard_at = now
        transfer.received(segment, checksum)
        if transfer.state is ReceiveState.RECEIVING:
            effects.append(ToSender(worker_id, Window(ticket_id, 1)))
        return effects + self._judge(leg, transfer, now)

    def _stale(self, worker_id: str, ticket_id: TicketId, segment: int, now: float) -> list[Effect]:
        if self._ops.ended(worker_id, ticket_id, segment, now) is None:
            return [late("SegmentStale")]
        leg = self._tickets.live(ticket_id)
        loss = DataLoss(f"a page of segment {segment} of {ticket_id} changed while it was read")
        effects = self._tickets.lose(leg, loss.info(), now) if leg is not None else []
        self._tickets.release_if_quiet(ticket_id)
        return effects

    def _judge(self, leg: Leg, transfer: ReceiveTransfer, now: float) -> list[Effect]:
        """Seal a complete transfer, or end it: there is no third way."""
        if not transfer.complete:
            return []
        fault = transfer.fault(self._pages.are_current(transfer.refs()))
        if fault is not None:
            return self._tickets.lose(leg, fault, now)
        commit, seq = transfer.commit, leg.first
        if commit is None:
            return []
        transfer.follow(ReceiveEvent.SEAL)
        self._intake.arrived(leg)
        self._memory.received(seq, transfer.held_pages)
        seq.follow(On.SEALED)
        leg.running_at, leg.waits_for = now, ""
        leg.cached_tokens, leg.prompt_logprobs = commit.cached_tokens, commit.prompt_logprobs
        self._scheduler.run(seq)
        items = leg.part(commit.first_tokens, commit.logprobs, self._options.eos_token_ids)
        self._tickets.parted(leg, seq)
        effects: list[Effect] = [
            ToSender(transfer.worker_id, Sealed(leg.ticket.id)),
            ToRouter(leg.router_id, Tokens(tuple(items))),
            Count("transfers", "sealed"),
        ]
        if seq.finish_reason is not None:
            effects += self._tickets.end_choice(seq, now)
        return effects

    def _fail(self, leg: Leg, fault: ErrorInfo, now: float) -> list[Effect]:
        """End a ticket whose hand-off cannot go on; no room here is not the sender's fault."""
        if fault.reason == Overloaded.reason:
            return self._tickets.end(leg, Outcome.FAILED, fault, now)
        return self._tickets.lose(leg, fault, now)

    def _link_broken(self, worker_id: str, error: ErrorInfo, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for ticket_id in self._ops.broken(worker_id):
            leg = self._tickets.live(ticket_id)
            if leg is not None:
                effects += self._tickets.lose(leg, error, now)
            self._tickets.release_if_quiet(ticket_id)
        return effects

    def _peer_lost(self, worker_id: str, error: ErrorInfo, now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._intake.drop_parked(worker_id)
        if self._ops.busy_with(worker_id):
            effects.append(BreakLink(worker_id, False, "its Transfer stream ended"))
        for leg in self._tickets:
            transfer = leg.transfer
            if transfer is None or transfer.worker_id != worker_id or transfer.offer is None:
                continue
            if not transfer.over:
                transfer.follow(ReceiveEvent.ABORT)  # nobody is there to be told
                effects += self._tickets.lose(leg, error, now)
        return effects

    def _sink(self, worker_id: str, message: Announce, now: float) -> ReceivePages:
        """Receive what nobody wants, so that the link stays in order."""
        ticket_id, segment = message.ticket_id, message.segment
        self._ops.started_sink(worker_id, ticket_id, segment, now)
        return ReceivePages(worker_id, ticket_id, segment, message.n_bytes, None)

    def _announced(
        self, leg: Leg, transfer: ReceiveTransfer, message: Announce, now: float
    ) -> tuple[list[Effect], ErrorInfo | None]:
        """The effects of an announcement, and why its ticket must end now, if it must."""
        effects, fault = self._granted(leg, transfer, "announced pages of", now)
        seq = leg.first
        fault = fault or transfer.announce_fault(message)
        if fault is not None or seq.reservation is None:
            return [*effects, self._sink(transfer.worker_id, message, now)], fault
        refs = self._pages.refs(self._pages.bind(seq.reservation, message.n_pages))
        transfer.announced(refs)
        worker_id, segment = transfer.worker_id, message.segment
        self._ops.started(worker_id, leg.ticket.id, segment, now)
        receive = ReceivePages(worker_id, leg.ticket.id, segment, message.n_bytes, refs)
        return [*effects, receive], None

    def _committed(
        self, leg: Leg, transfer: ReceiveTransfer, message: Commit, now: float
    ) -> tuple[list[Effect], ErrorInfo | None]:
        """The sender has sent all (nothing, if all was here). Why the ticket must end, if so."""
        effects, fault = self._granted(leg, transfer, "committed", now)
        if fault is None:
            transfer.committed(message)
        return effects, fault

    def _granted(
        self, leg: Leg, transfer: ReceiveTransfer, what: str, now: float
    ) -> tuple[list[Effect], ErrorInfo | None]:
        """Hold a sender's message against the grant; one that lapsed needs its room again."""
        transfer.heard_at = now
        if transfer.state is ReceiveState.LAPSED:
            taken = self._intake.retake(leg, now)
            if taken is not None:
                return taken, None
            return [], Overloaded(
                f"the credit of {leg.ticket.id} lapsed before {transfer.worker_id} began, "
                f"and its pages are with others now",
                retry_after_s=self._options.retry_after_s,
            ).info()
        if transfer.state in (ReceiveState.GRANTED, ReceiveState.RECEIVING):
            return [], None
        return [], DataLoss(
            f"{transfer.worker_id} {what} {leg.ticket.id}, whose transfer is {transfer.state}"
        ).info()


def late(what: str) -> Count:
    """An event of something that is over or was never here: counted, and that is all."""
    return Count("events_ignored", what)

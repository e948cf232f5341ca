"""The router's core: takes one request, finds it workers, gives back one stream.

This file owns the way into the router: admission, the waiting queue, the dispatch that ``policy``
decides, and what becomes of both when workers come and go. What happens to a dispatched request
is ``router.in_flight``'s. Everything runs on the router's event loop and nothing blocks it.

Life of a request:
 1. ``generate``: dispatched at once if a worker has room, else it waits in the bounded queue,
    until there is room, its deadline passes, its client leaves, or no worker could ever take it.
 2. Dispatch: the ledger takes it in, both legs are opened in the same moment.
 3. Session messages become events of its legs; tokens become text before they are buffered, so a
    stop string ends the work although nobody has read its text yet.
 4. The client gets its end exactly once; both legs are over soon after.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

from protocol.config import TandemConfig
from protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    TandemError,
    Unavailable,
)
from protocol.messages import (
    WorkerHeartbeat,
    WorkerToRouter,
)
from protocol.types import (
    Complete,
    Delta,
    Mode,
    ModelInfo,
    Request,
    Role,
    Ticket,
    TicketId,
    WorkerInfo,
)
from protocol.wire.telemetry import Telemetry
from router import leg_events as on
from router.admission import Waiting, WaitQueue
from router.failures import Failures
from router.flight import Flight
from router.in_flight import InFlight
from router.ledger import Ledger
from router.meter import Meter
from router.policy import Reject, Route, Wait, choose, order_key
from router.session import MEANT, SessionFactory, WorkerSessions
from router.status import RouterStatus, WorkerStatus
from router.text import IncrementalText

LONGEST_RETRY_AFTER_S = 60.0

log = logging.getLogger(__name__)


class Dispatcher:
    """One per router; made, and all its methods called, on the router's event loop."""

    def __init__(
        self,
        config: TandemConfig,
        model: ModelInfo,
        *,
        router_id: str,
        session_factory: SessionFactory,
        clock: Callable[[], float],
        telemetry: Telemetry | None = None,
    ) -> None:
        """``clock`` gives monotonic seconds; timers run on the event loop's own clock."""
        self._config = config
        self._model = model
        self._router_id = router_id
        self._clock = clock
        telemetry = telemetry or Telemetry()
        self._meter = Meter(telemetry, config.slo)
        self._ledger = Ledger()
        self._queue = WaitQueue(config.router.limits.max_queued)
        self._sessions = WorkerSessions(session_factory, config.timing, clock, self)
        self._in_flight = InFlight(
            config,
            self._ledger,
            self._sessions,
            self._meter,
            Failures(telemetry),
            clock,
            self._room_made,
        )
        self._live: dict[str, Flight] = {}  # by the client's id, until its end is read
        # Ticket ids must be new to the workers, though clients repeat theirs and routers restart.
        self._run = secrets.token_hex(4)
        self._serial = 0
        self._drain_due = False
        self._closed = False

    # --- for the front ends ---------------------------------------------------------------------

    async def generate(
        self, request: Request, texts: Sequence[IncrementalText] = ()
    ) -> AsyncGenerator[Delta | Complete, None]:
        """Run one request. Yields ``Delta``s, then exactly one ``Complete``.

        ``request.sampling.seed`` must be set by the caller. ``texts``, one per choice
        (``TextCodec.decoder_for``), turn tokens into text and match stop strings; without them
        tokens come without text. Where there are several choices, the last ``Delta`` of each
        has its finish reason, and ``Complete`` comes when all have ended.
        Closing the generator (use ``contextlib.aclosing``) or cancelling its task cancels both
        legs. Raises a ``TandemError`` (also before the first item): ``InvalidArgument``,
        ``NeverFits``, ``Overloaded``, ``Unavailable``, ``DeadlineExceeded``, ``SlowReader``,
        ``DataLoss``, ``InternalError``.
        """
        flight = self._admit(request, texts)
        try:
            async for piece in flight.answer.pieces():
                yield piece
        finally:
            self._live.pop(request.request_id, None)
            self._reader_left(flight)

    def can_serve(self) -> tuple[bool, str]:
        """Whether a request would be answered now, and why not (or what is degraded)."""
        if self._closed:
            return False, "the router is shutting down"
        if not self._ledger.books(Role.DECODE):
            return False, "no decode worker is ready"
        disaggregated = self._config.mode is Mode.DISAGGREGATED
        if disaggregated and not self._ledger.books(Role.PREFILL):
            return True, "degraded: no prefill worker is ready, decode workers compute the prompts"
        return True, ""

    def status(self) -> RouterStatus:
        """A snapshot; cheap."""
        workers = []
        for session in self._sessions.all():
            book = self._ledger.book(session.info.worker_id)
            workers.append(
                WorkerStatus(
                    info=session.info,
                    session=session.state.value,
                    detail=session.detail,
                    load=session.load,
                    in_flight=len(book.entries) if book else 0,
                    reserved_pages=book.own_pages if book else 0,
                    queued_tokens=book.queued_tokens if book else 0,
                )
            )
        return RouterStatus(
            router_id=self._router_id,
            workers=tuple(workers),
            running=self._in_flight.n_running,
            queued=len(self._queue),
            counters=dict(self._meter.counters),
        )

    # --- for the router's owner -----------------------------------------------------------------

    def set_workers(self, workers: tuple[WorkerInfo, ...]) -> None:
        """The whole list of workers that are up; connects to new ones, drops missing ones."""
        if not self._closed:
            self._sessions.set_workers(workers)

    async def close(self) -> None:
        """Fail what runs, honestly, and close the sessions. No request is taken any more."""
        self._closed = True
        error = Unavailable("the router is shutting down")
        for flight in list(self._live.values()):
            if flight.legs is None:
                self._fail_waiting(flight, error)
            else:
                self._in_flight.feed(flight, on.Broken(error.info()))
        await self._sessions.close()
        self._in_flight.forget_all()

    def check_integrity(self) -> None:
        """Raise ``InternalError`` unless the ledger agrees with the requests under way."""
        self._ledger.check_integrity()
        known = self._in_flight.ticket_ids()
        for role in Role:
            for book in self._ledger.books(role):
                if not set(book.entries) <= known:
                    lost = sorted(str(ticket) for ticket in set(book.entries) - known)
                    raise InternalError(f"{book.info.worker_id} still holds {lost} in the ledger")

    # --- admission ------------------------------------------------------------------------------

    def _admit(self, request: Request, texts: Sequence[IncrementalText]) -> Flight:
        if self._closed:
            raise Unavailable("the router is shutting down")
        if request.request_id in self._live:
            raise InvalidArgument(
                f"a request with the id {request.request_id!r} is running", field="request_id"
            )
        if request.deadline_s <= 0:
            raise DeadlineExceeded("the request's deadline had passed when it arrived")
        now = self._clock()
        self._serial += 1
        key = order_key(request, now, self._ledger, self._config)
        waiting = Waiting(request.priority, key, self._serial, request, now)
        flight = Flight(request, texts, now, waiting)
        self._live[request.request_id] = flight
        try:
            if len(self._queue) or not self._try(waiting):
                retry_after = min(max(self._ledger.backlog_s(), 1.0), LONGEST_RETRY_AFTER_S)
                self._queue.push(waiting, retry_after)
                self._drain_soon()
        except TandemError as error:
            del self._live[request.request_id]
            self._meter.rejected(error)
            raise
        if not flight.answer.has_ended:  # not refused at once
            self._meter.accepted(flight)
        flight.start_timer("deadline", request.deadline_s, self._deadline_passed)
        self._show_gauges()
        return flight

    def _try(self, waiting: Waiting) -> bool:
        """Give one request its turn; whether it needs no further one."""
        flight = self._live[waiting.request.request_id]
        decision = choose(flight.request, self._ledger, self._config)
        if isinstance(decision, Wait):
            flight.wait_reason = decision.reason
            return False
        if isinstance(decision, Reject):
            error = decision.error.to_error()
            self._meter.rejected(error)
            self._in_flight.end(flight, error)
            return True
        self._dispatch(flight, decision)
        return True

    def _drain_soon(self) -> None:
        if not self._drain_due and len(self._queue):
            self._drain_due = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_due = False
        if not self._closed:
            self._queue.drain(self._try)
            self._show_gauges()

    def _dispatch(self, flight: Flight, route: Route) -> None:
        request = flight.request
        ticket = Ticket(
            id=TicketId(f"{request.request_id}.{self._run}.{flight.waiting.serial}"),
            sender=None if route.sender is None else route.sender.peer,
            receiver=route.receiver.peer,
            tokens=request.prompt,
            n_prompt=len(request.prompt),
            sampling=request.sampling,
            n_choices=request.n_choices,
            priority=request.priority,
            order_key=flight.waiting.order_key,
            ttft_target_s=self._config.slo.ttft_ms / 1000,
            remaining_s=max(request.deadline_s - (self._clock() - flight.arrival), 0.0),
        )
        log.debug("%s goes to %s: %s", ticket.id, route.receiver.worker_id, route.reason)
        if route.fallback:
            self._meter.fallback(route.fallback)
        self._in_flight.take_off(flight, ticket, route)

    def _room_made(self) -> None:
        self._drain_soon()
        self._show_gauges()

    # --- sessions -------------------------------------------------------------------------------

    def session_up(self, info: WorkerInfo) -> None:
        """A worker can be used."""
        self._ledger.add_worker(info)
        self._drain_soon()

    def session_lost(self, info: WorkerInfo, error: TandemError, cause: str) -> None:
        """A worker is gone: so is every leg that ran there."""
        self._ledger.drop_worker(info.worker_id)
        if cause not in MEANT:
            self._meter.worker_lost(cause)
        self._in_flight.worker_lost(info.worker_id, error)
        self._drain_soon()  # who waits for the last decode worker is refused

    def session_message(self, info: WorkerInfo, message: WorkerToRouter) -> None:
        """Anything that a worker says."""
        if isinstance(message, WorkerHeartbeat):
            self._ledger.report(info.worker_id, message.load)
            self._drain_soon()
        else:
            self._in_flight.message(info, message)

    # --- ends before dispatch, and clocks ------------------------------------------------------

    def _reader_left(self, flight: Flight) -> None:
        """The reader has read the end, or has gone before it."""
        if flight.legs is not None:
            self._in_flight.feed(flight, on.ClientGone())
            return
        self._fail_waiting(flight, Cancelled("the client went away"))

    def _fail_waiting(self, flight: Flight, error: TandemError) -> None:
        self._queue.remove(flight.waiting)
        self._in_flight.end(flight, error)
        self._show_gauges()

    def _deadline_passed(self, flight: Flight) -> None:
        seconds = flight.request.deadline_s
        if flight.legs is not None:
            self._in_flight.feed(flight, on.DeadlinePassed(seconds))
            return
        self._fail_waiting(
            flight,
            DeadlineExceeded(
                f"the request waited for its whole deadline of {seconds:g} s: {flight.wait_reason}"
            ),
        )

    def _show_gauges(self) -> None:
        self._meter.gauges(queued=len(self._queue), running=self._in_flight.n_running)

"""One link's thread: it connects, carries out operations in order, and says when it is over.

This file owns the thread, the queue in front of it and the word "broken". The thread is the only
one that reads or writes pages for its link; posting from any thread is an enqueue that never
blocks. It must never decide what is sent, nor retry: an error or an overdue operation ends the
link for good, and a new one needs a new ``LinkName``.

Life of a link:
 1. ``start``: the thread connects; operations queue meanwhile.
 2. Operations run in the order they were posted, several units in flight; each segment is
    reported once, by ``SegmentSent``, ``SegmentReceived`` or ``SegmentStale``.
 3. ``close(cause)``, or the first error: everything queued or in flight is given up.
 4. When nothing touches a page any more the thread reports ``LinkBroken``, once, and ends.
    Operations posted before that report has been handled are covered by it; they never ran.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kv_transfer.checksum import new_checksum
from kv_transfer.pool import KvPool
from kv_transfer.segments import Cut, ReceiveSegment, SendSegment, Staging, Unit, Workshop
from kv_transfer.transport import Capabilities, Link, LinkAborted, LinkError, LinkName
from protocol.errors import ErrorInfo, InternalError, TandemError, Unavailable
from protocol.events import (
    LinkBroken,
    ReceivePages,
    SegmentReceived,
    SegmentSent,
    SegmentStale,
    SendPages,
)

_log = logging.getLogger(__name__)

LinkEvent = SegmentSent | SegmentReceived | SegmentStale | LinkBroken
OnEvent = Callable[[LinkEvent], None]
Segment = SendSegment | ReceiveSegment


class PageLink:
    """One direction between this rank and one other. Made by ``Links.open`` only."""

    def __init__(
        self,
        name: LinkName,
        *,
        outgoing: bool,
        link: Link,
        capabilities: Capabilities,
        pool: KvPool,
        generation_of: Callable[[int], int],
        on_event: OnEvent,
        on_stuck: Callable[[str], None],
        op_timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        self.name = name
        self.outgoing = outgoing
        self.worker_id = name.receiver if outgoing else name.sender
        self._link = link
        self._capabilities = capabilities
        cut = Cut.of(pool.geometry.page_bytes, capabilities)
        self._shop = Workshop(
            pool, cut, Staging(cut, capabilities.max_inflight, pool.device), generation_of
        )
        self._on_event = on_event
        self._on_stuck = on_stuck
        self._op_timeout_s = op_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._changed = threading.Condition()
        self._queue: deque[SendPages | ReceivePages] = deque()
        self._cause: str | None = None  # set: no operation starts any more
        self._aborter: threading.Thread | None = None
        arrow = "to" if outgoing else "from"
        self._thread = threading.Thread(
            target=self._run, name=f"link {arrow} {self.worker_id}", daemon=True
        )

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, which connects first."""
        self._thread.start()

    def post_send(self, effect: SendPages) -> None:
        """Queue one segment to be sent. Raises ``InternalError`` on an incoming link."""
        if not self.outgoing:
            raise InternalError(f"a send was posted on the incoming link {self.name}")
        self._post(effect)

    def post_receive(self, effect: ReceivePages) -> None:
        """Queue one segment to be received. Raises ``InternalError`` on an outgoing link."""
        if self.outgoing:
            raise InternalError(f"a receive was posted on the outgoing link {self.name}")
        self._post(effect)

    def close(self, cause: str) -> None:
        """End the link from any thread, without blocking; ``LinkBroken`` follows."""
        with self._changed:
            if self._cause is not None:
                return
            self._cause = cause
            # A transport's abort may take its time, and the caller may hold the role's lock.
            self._aborter = threading.Thread(
                target=self._abort, name=f"abort {self.name}", daemon=True
            )
            self._aborter.start()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended. Never from an ``on_event`` callback."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, effect: SendPages | ReceivePages) -> None:
        with self._changed:
            if self._cause is None:
                self._queue.append(effect)
                self._changed.notify_all()

    def _abort(self) -> None:
        try:
            self._link.abort()
        except Exception:
            _log.exception("link %s: abort failed", self.name)

    # --- the link's own thread -----------------------------------------------------------------

    def _run(self) -> None:
        in_flight: deque[tuple[Segment, Unit, bool]] = deque()
        error: TandemError = Unavailable(f"link {self.name}: closed")
        try:
            self._link.connect(self._connect_timeout_s)
            self._pump(in_flight)
        except LinkAborted:
            error = Unavailable(f"link {self.name}: {self._cause or 'closed'}")
        except LinkError as failure:
            error = Unavailable(f"link {self.name}: {failure}")
        except Exception as failure:
            _log.exception("link %s: unexpected failure", self.name)
            error = InternalError(f"link {self.name}: {type(failure).__name__}: {failure}")
        self._end(in_flight, error.info())

    def _pump(self, in_flight: deque[tuple[Segment, Unit, bool]]) -> None:
        """Run operations until the link is closed, which raises."""
        segment: Segment | None = None
        index = operation = 0
        while True:
            if segment is None and len(in_flight) < self._capabilities.max_inflight:
                segment, index = self._next(block=not in_flight), 0
            if segment is not None and len(in_flight) < self._capabilities.max_inflight:
                unit = segment.post(index, operation, self._link)
                index, operation = index + 1, operation + 1
                last = index == segment.n_units
                in_flight.append((segment, unit, last))
                if last:
                    segment = None
                continue
            first, unit, last = in_flight[0]
            unit.pending.wait(self._op_timeout_s)
            first.complete(unit)
            in_flight.popleft()
            if last:
                self._on_event(first.event())

    def _next(self, *, block: bool) -> Segment | None:
        """The next segment with anything to move. Raises ``LinkAborted`` once closed."""
        while True:
            with self._changed:
                while block and not self._queue and self._cause is None:
                    self._changed.wait()
                if self._cause is not None:
                    raise LinkAborted(self._cause)
                if not self._queue:
                    return None
                effect = self._queue.popleft()
            checksum = new_checksum(self._capabilities.checksum)
            segment: Segment
            if isinstance(effect, SendPages):
                segment = SendSegment(effect, self._shop, checksum)
            else:
                segment = ReceiveSegment(effect, self._shop, checksum)
            if segment.n_units:
                return segment
            self._on_event(segment.event())

    def _end(self, in_flight: deque[tuple[Segment, Unit, bool]], error: ErrorInfo) -> None:
        """Give up everything, then say so once."""
        self.close(error.message)  # from here on nothing is queued
        if self._aborter is not None:
            self._aborter.join()
        in_flight.clear()
        with self._changed:
            self._queue.clear()
        try:
            self._link.close()
        except Exception as failure:
            # No LinkBroken: it would promise that nothing touches the pages any more.
            _log.critical("link %s cannot be ended: %s", self.name, failure, exc_info=failure)
            self._on_stuck(f"link {self.name} cannot be ended: {failure}")
            return
        _log.info("%s", error.message)
        try:
            self._on_event(LinkBroken(self.worker_id, error, self.outgoing))
        except Exception:
            _log.exception("link %s: nobody could take in its end", self.name)

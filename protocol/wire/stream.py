"""One end of an ordered two-way stream of dataclasses, the same for client and server.

Owns a bounded queue of outgoing messages, which any thread may fill, and the coroutines that
write it and read the other way. It never blocks a sender and never drops one message silently: a
queue that is full ends the stream with ``Overloaded``, because a gap in an ordered stream is
worse than its end.

Life of a ``Duplex``: made over a started call -> ``send`` from any thread, ``read`` by one
coroutine, ``write_all`` as one task -> ``close(cause)``: ``write_all`` raises the cause, what was
queued is dropped, later sends are ignored.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from protocol.errors import MalformedFrame, Overloaded, TandemError, Unavailable
from protocol.wire.channel import from_rpc_error
from protocol.wire.convert import FrameCodec

QUEUE_LIMIT = 8192


class Duplex:
    """A started call (client's) or its context (server's) as a stream of dataclasses."""

    def __init__(
        self, call: Any, outgoing: FrameCodec, incoming: FrameCodec, limit: int = QUEUE_LIMIT
    ) -> None:
        self._call = call
        self._outgoing = outgoing
        self._incoming = incoming
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()  # guards the three below
        self._queue: deque[Any] = deque()
        self._waking = False
        self._closed: TandemError | None = None
        self._drained = asyncio.Event()  # nothing queued, nothing being written
        self._drained.set()
        self.heard_at = self._loop.time()  # when a frame last came, by the loop's clock
        self.frame: Any = None  # the frame that came last, also when it had no meaning

    @property
    def closed(self) -> TandemError | None:
        """Why the stream is over, or None."""
        return self._closed

    def send(self, message: Any) -> None:
        """Queue a message; any thread, never blocks. Ignored once the stream is over."""
        with self._lock:
            if self._closed is not None:
                return
            if len(self._queue) >= self._limit:
                self._closed = Overloaded(
                    f"the other side is {self._limit} messages behind: stream ended"
                )
                self._queue.clear()
            else:
                self._queue.append(message)
            wake = not self._waking
            self._waking = True
        if wake:
            self._wake_writer()

    def close(self, cause: TandemError) -> None:
        """End the stream; the first cause stays. Any thread."""
        with self._lock:
            if self._closed is None:
                self._closed = cause
            self._queue.clear()
            self._waking = True
        self._wake_writer()

    def _wake_writer(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the event loop is closed: nobody is left to write to
            self._closed = self._closed or Unavailable("the event loop has ended")

    async def write_all(self) -> None:
        """Write what is queued, one frame a message, until the stream is over.

        Raises the cause when it was closed on this side; returns when the call ended.
        """
        while True:
            await self._wake.wait()
            with self._lock:
                self._wake.clear()
                self._waking = False
                batch, self._queue = self._queue, deque()
                closed = self._closed
            if closed is not None:
                self._drained.set()
                raise closed
            self._drained.clear()
            for message in batch:
                frame = self._outgoing.encode(message)
                try:
                    await self._call.write(frame)
                except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    return  # the call has ended; its reader learns why
            self._drained.set()

    async def flush(self) -> None:
        """Wait until everything queued so far is written, or the stream is over."""
        while self._closed is None and (self._queue or not self._drained.is_set()):
            await asyncio.sleep(0)  # lets the writer take the queue
            await self._drained.wait()

    async def read(self) -> Any | None:
        """The next message, or None when the other side has ended the stream in order.

        Raises ``MalformedFrame`` for a frame without meaning (the stream goes on, if its reader
        wants), another ``TandemError`` when the stream broke.
        """
        self.frame = None
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except DecodeError as error:
            raise MalformedFrame("bytes that are no frame") from error
        if frame is grpc.aio.EOF:
            return None
        self.heard_at = self._loop.time()
        self.frame = frame
        return self._incoming.decode(frame)

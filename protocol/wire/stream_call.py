"""The client's end of a streaming call: a channel of its own, the call, its writer and its watch.

Owns what Session and Transfer clients have in common, and knows none of their messages. It never
reconnects. Life, on one event loop: construct -> start a call on ``channel`` -> ``open`` waits
for the server's yes -> ``keep`` -> ``messages`` until the stream ends -> ``close``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from protocol.config import TimingConfig
from protocol.errors import TandemError, Unavailable
from protocol.wire.channel import ACCEPTED_KEY, aio_channel, from_rpc_error
from protocol.wire.convert import FrameCodec
from protocol.wire.stream import Duplex


class StreamCall:
    """A channel, one streaming call on it and the task that writes it."""

    def __init__(self, endpoint: str, timing: TimingConfig, connect_s: float) -> None:
        self.endpoint = endpoint
        self._connect_s = connect_s
        self._channel = aio_channel(endpoint, timing)
        self._call: Any = None
        self._duplex: Duplex | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._closing = False

    @property
    def channel(self) -> grpc.aio.Channel:
        """Where the caller starts its call."""
        return self._channel

    async def open(self, call: Any, outgoing: FrameCodec, incoming: FrameCodec) -> Duplex:
        """Wait for the server's answer to a call just started; raises its refusal."""
        self._call = call
        try:
            async with asyncio.timeout(self._connect_s):
                accepted = await call.initial_metadata()
                if ACCEPTED_KEY not in dict(accepted or ()):
                    await call.read()  # refused: raises why
                    raise Unavailable(f"{self.endpoint}: not a Tandem worker")
        except TimeoutError:
            await self.close()
            raise Unavailable(f"{self.endpoint}: no answer in {self._connect_s} s") from None
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise from_rpc_error(error) from error
        except Unavailable:
            await self.close()
            raise
        self._duplex = Duplex(call, outgoing, incoming)
        self._tasks.append(asyncio.create_task(self._write(self._duplex)))
        return self._duplex

    def keep(self, duplex: Duplex, timing: TimingConfig, beat: Any | None = None) -> None:
        """While the stream lives: say ``beat`` every ``heartbeat_s``, end it on long silence."""

        async def watch() -> None:
            loop = asyncio.get_running_loop()
            while duplex.closed is None:
                if beat is not None:
                    duplex.send(beat)
                due = loop.time() + timing.heartbeat_s
                await asyncio.sleep(timing.heartbeat_s)
                # When this loop itself was held up, frames may lie unread: no verdict this time.
                on_time = loop.time() - due < timing.heartbeat_s
                silent_s = loop.time() - duplex.heard_at
                if on_time and silent_s > timing.peer_dead_s:
                    duplex.close(
                        Unavailable(f"{self.endpoint} has said nothing for {silent_s:.1f} s")
                    )

        self._tasks.append(asyncio.create_task(watch()))

    async def _write(self, duplex: Duplex) -> None:
        try:
            await duplex.write_all()
        except TandemError as error:
            duplex.close(error)
            self._call.cancel()  # wakes the reader, which reports the cause

    async def messages(self, duplex: Duplex) -> AsyncIterator[Any]:
        """Every message until the stream ends; raises why, unless we closed it ourselves."""
        cause: TandemError = Unavailable(f"{self.endpoint} has ended the stream")
        while True:
            try:
                message = await duplex.read()
            except TandemError as error:
                cause = duplex.closed or error
                break
            except asyncio.CancelledError:
                if duplex.closed is None:
                    raise  # our caller's own end, not the call's
                cause = duplex.closed
                break
            if message is None:
                break
            yield message
        if self._closing:
            return
        duplex.close(cause)
        raise cause

    async def close(self) -> None:
        """End the call, its tasks and the channel. May be called twice."""
        self._closing = True
        if self._duplex is not None:
            self._duplex.close(Unavailable("closed here"))
        if self._call is not None:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._channel.close()

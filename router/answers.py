"""Several answers read at once, in the order in which their pieces come.

This file owns the tasks that read the answers of one HTTP call. It must never buffer: a piece is
fetched when the one before it was taken, so a slow client is felt by the dispatcher's bounded
buffer and nowhere else.

Life of an ``Answers``: enter (one task per answer starts), ``next`` until every answer has given
its ``Complete`` or one has failed, leave (tasks are cancelled and awaited, which closes what is
still open and so cancels both legs of it).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType

from protocol.errors import InternalError
from protocol.types import Complete, Delta

Event = Delta | Complete


class Answers:
    """The answers of one call; choice i is ``streams[i]``."""

    def __init__(self, streams: Sequence[AsyncGenerator[Event, None]]) -> None:
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []
        self._pieces: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue(maxsize=1)
        self._open = len(streams)

    @property
    def all_complete(self) -> bool:
        """Every answer has given its ``Complete``."""
        return self._open == 0

    async def __aenter__(self) -> Answers:
        self._tasks = [
            asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, timeout_s: float) -> tuple[int, Event] | None:
        """The next piece and its choice; None when none came in ``timeout_s`` seconds.

        Raises what an answer raised: the whole call has failed then.
        """
        try:
            async with asyncio.timeout(timeout_s):
                got = await self._pieces.get()
        except TimeoutError:
            return None
        return self._taken(*got)

    async def take(self) -> tuple[int, Event]:
        """The same without a limit."""
        return self._taken(*await self._pieces.get())

    def _taken(self, index: int, piece: Event | BaseException) -> tuple[int, Event]:
        if isinstance(piece, BaseException):
            raise piece
        if isinstance(piece, Complete):
            self._open -= 1
        return index, piece

    async def _read(self, index: int, stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    await self._pieces.put((index, piece))
                    if isinstance(piece, Complete):
                        return
            raise InternalError("an answer ended without its end")
        except Exception as error:
            # Not swallowed: it reaches the reader in ``next``.
            await self._pieces.put((index, error))

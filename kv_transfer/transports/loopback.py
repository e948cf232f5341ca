"""Links between two ranks of one process: no socket, the same semantics as every transport.

This file owns pairs of queues in memory and the copy from a sent buffer into a received one. It
is used by tests and wherever two workers share a process. It must never copy into or out of a
buffer after its link is closed: every copy happens under the pair's lock.

Life of a pair: both ends are made under one name (the first makes the pair) -> ``connect`` waits
for the other end -> sends meet receives in order -> an error, ``abort`` or ``close`` of either
end breaks the pair for both.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from kv_transfer.rendezvous import Rendezvous
from kv_transfer.transport import Capabilities, LinkAborted, LinkError, LinkName, LinkOverdue


class LoopbackTransport:
    """Makes links whose two ends are in this process; both must come from one object."""

    name = "loopback"

    def __init__(self, *, direct_bytes: int = 64 << 10, staged_bytes: int = 256 << 10) -> None:
        self.capabilities = Capabilities(
            one_sided=False,
            same_host=True,
            devices=frozenset({"cpu"}),
            can_abort=True,
            max_inflight=4,
            checksum="xxh3-64",
            direct_bytes=direct_bytes,
            staged_bytes=staged_bytes,
        )
        self._lock = threading.Lock()
        self._pairs: dict[str, _Pair] = {}

    def link(self, name: LinkName, *, outgoing: bool, rendezvous: Rendezvous) -> LoopbackLink:
        """This side's end of the pair ``name``; ``rendezvous`` is not needed here."""
        with self._lock:
            pair = self._pairs.get(name.key)
            if pair is None or outgoing in pair.ends:
                pair = self._pairs[name.key] = _Pair()
            pair.ends.add(outgoing)
            if len(pair.ends) == 2:
                del self._pairs[name.key]  # complete: both ends hold it
        return LoopbackLink(pair, outgoing)


class _Pair:
    """What both ends share. ``changed`` guards everything, the copies included."""

    def __init__(self) -> None:
        self.ends: set[bool] = set()
        self.changed = threading.Condition()
        self.connected: set[bool] = set()
        self.sends: deque[_Transfer] = deque()
        self.receives: deque[_Transfer] = deque()
        self.broken: str | None = None
        self.broken_by: bool | None = None

    def match(self) -> None:
        """Copy what can be copied. The caller holds ``changed``."""
        while self.sends and self.receives and self.broken is None:
            source, target = self.sends.popleft(), self.receives.popleft()
            if source.buffer.numel() != target.buffer.numel():
                sent, received = source.buffer.numel(), target.buffer.numel()
                self.broken = f"{sent} bytes were sent where {received} were to be received"
            else:
                target.buffer.copy_(source.buffer)
                source.done = target.done = True
        self.changed.notify_all()


class _Transfer:
    """One posted buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.done = False


class _Pending:
    """The buffers of one call."""

    def __init__(self, link: LoopbackLink, transfers: list[_Transfer]) -> None:
        self._link = link
        self._transfers = transfers

    def wait(self, timeout_s: float) -> None:
        self._link.wait_for(lambda: all(t.done for t in self._transfers), timeout_s)


class LoopbackLink:
    """One end of a pair."""

    def __init__(self, pair: _Pair, outgoing: bool) -> None:
        self._pair = pair
        self._outgoing = outgoing

    def connect(self, timeout_s: float) -> None:
        """Wait for the other end. Raises ``LinkError``."""
        with self._pair.changed:
            self._pair.connected.add(self._outgoing)
            self._pair.changed.notify_all()
        self.wait_for(lambda: len(self._pair.connected) == 2, timeout_s)

    def send(self, buffers: Sequence[torch.Tensor]) -> _Pending:
        """Queue buffers to be read."""
        return self._post(self._pair.sends, buffers)

    def receive(self, buffers: Sequence[torch.Tensor]) -> _Pending:
        """Queue buffers to be written."""
        return self._post(self._pair.receives, buffers)

    def abort(self) -> None:
        """Break the pair for both ends."""
        with self._pair.changed:
            if self._pair.broken is None:
                self._pair.broken, self._pair.broken_by = "closed by the other end", self._outgoing
            self._pair.sends.clear()
            self._pair.receives.clear()
            self._pair.changed.notify_all()

    def close(self) -> None:
        """The same as ``abort``: nothing runs outside the pair's lock."""
        self.abort()

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``done()``. Raises ``LinkError`` at the pair's end or the deadline."""
        pair = self._pair
        with pair.changed:
            pair.changed.wait_for(lambda: done() or pair.broken is not None, timeout_s)
            if done():
                return
            if pair.broken is None:
                raise LinkOverdue(f"no progress within {timeout_s:g} s")
            if pair.broken_by == self._outgoing:
                raise LinkAborted("closed")
            raise LinkError(pair.broken)

    def _post(self, queue: deque[_Transfer], buffers: Sequence[torch.Tensor]) -> _Pending:
        transfers = [_Transfer(buffer) for buffer in buffers]
        with self._pair.changed:
            if self._pair.broken is None:
                queue.extend(transfers)
                self._pair.match()
        return _Pending(self, transfers)

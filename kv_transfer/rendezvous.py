"""Where the two ends of a link leave their addresses for each other.

This file owns the receiver's bounded key-value map and its face as a ``torch.distributed.Store``.
The receiver keeps the map in its own memory; the sender reaches it through calls that the worker
hands in (unary gRPC calls on the control channel, so it is as authenticated as they are). It
must never open a socket or import grpc.

Life of an entry: ``RendezvousMap.open`` when a peer said Hello -> both ends set and get during
``connect`` -> ``RendezvousMap.close`` when the link is over. A set or get on a name that is not
open is refused, so a stranger cannot fill memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from kv_transfer.transport import LinkAborted, LinkOverdue
from protocol.errors import Overloaded, WrongState

# How long one `get` may block: a link that is closed while it connects notices this soon.
_SLICE_S = 0.2


class Rendezvous(Protocol):
    """The map of one link, local or behind calls to the receiver. Blocking; any thread."""

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """A value, or None when nobody left it within ``timeout_s``."""
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is there now."""
        ...

    def delete(self, key: str) -> bool:
        """Remove a value; whether it was there."""
        ...


class RendezvousMap:
    """The maps of every link that this worker receives on. Thread-safe and bounded."""

    def __init__(self, *, max_keys: int = 64, max_value_bytes: int = 64 << 10) -> None:
        self._max_keys = max_keys
        self._max_value_bytes = max_value_bytes
        self._changed = threading.Condition()
        self._links: dict[str, dict[str, bytes]] = {}

    def open(self, link: str) -> Rendezvous:
        """Start the map of a link (empty, also when one was there) and return its local face."""
        with self._changed:
            self._links[link] = {}
            self._changed.notify_all()
        return _Local(self, link)

    def close(self, link: str) -> None:
        """Forget a link; those who wait on it are refused at once."""
        with self._changed:
            self._links.pop(link, None)
            self._changed.notify_all()

    def set(self, link: str, key: str, value: bytes) -> None:
        """Leave a value. Raises ``WrongState`` (link not open) or ``Overloaded`` (bounds)."""
        with self._changed:
            values = self._values(link)
            if len(value) > self._max_value_bytes:
                raise Overloaded(
                    f"rendezvous value of {len(value)} bytes; at most {self._max_value_bytes}"
                )
            if key not in values and len(values) >= self._max_keys:
                raise Overloaded(f"rendezvous of one link holds at most {self._max_keys} keys")
            values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, link: str, key: str, timeout_s: float) -> bytes | None:
        """A value, or None after ``timeout_s``. Raises ``WrongState`` when the link is not open."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values(link), timeout_s)
            return self._values(link).get(key)

    def check(self, link: str, keys: Sequence[str]) -> bool:
        """Whether every key is there now. Raises ``WrongState`` when the link is not open."""
        with self._changed:
            values = self._values(link)
            return all(key in values for key in keys)

    def delete(self, link: str, key: str) -> bool:
        """Remove a value; whether it was there. Raises ``WrongState``."""
        with self._changed:
            return self._values(link).pop(key, None) is not None

    def __len__(self) -> int:
        """Links that are open."""
        with self._changed:
            return len(self._links)

    def _values(self, link: str) -> dict[str, bytes]:
        values = self._links.get(link)
        if values is None:
            raise WrongState(f"no rendezvous is open for link {link}")
        return values


class _Local:
    """One link's map in the process that owns it."""

    def __init__(self, owner: RendezvousMap, link: str) -> None:
        self._owner = owner
        self._link = link

    def set(self, key: str, value: bytes) -> None:
        self._owner.set(self._link, key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        return self._owner.get(self._link, key, timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._owner.check(self._link, keys)

    def delete(self, key: str) -> bool:
        return self._owner.delete(self._link, key)


class RendezvousStore(dist.Store):  # type: ignore[name-defined,misc]
    """A link's map as ``torch.distributed`` wants it. Every wait has one deadline and can end.

    ``aborted`` is asked between waits: True makes the waiter raise ``LinkAborted``, which passes
    through the process group's constructor unchanged.
    """

    def __init__(
        self, rendezvous: Rendezvous, deadline: float, aborted: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._rendezvous = rendezvous
        self._deadline = deadline  # by time.monotonic
        self._aborted = aborted

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value."""
        self._rendezvous.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """A value; raises ``LinkOverdue`` at the deadline."""
        while not self._aborted():
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise LinkOverdue("the other end did not connect in time")
            value = self._rendezvous.get(key, min(left_s, _SLICE_S))
            if value is not None:
                return value
        raise LinkAborted("closed while connecting")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until every key is there. The store's own deadline counts, not ``timeout``."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is there now."""
        return self._rendezvous.check(keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether it was there."""
        return self._rendezvous.delete(key)

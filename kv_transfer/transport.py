"""What a way for KV bytes from rank to rank must offer: the interface of every transport.

This file owns the words: capabilities, the name of a link, and the small protocols that the
files of ``kv_transfer/transports`` fulfil. It decides nothing and holds no connection. What a
transport can do is declared in its ``Capabilities`` and never probed by type.

A link carries bytes in one direction, in order, between one sending and one receiving rank.
Its life:
 1. ``Transport.link`` makes both ends, one in each process, under the same ``LinkName``.
 2. ``connect`` blocks until the other end is there.
 3. ``send`` on one end and ``receive`` on the other post buffers of equal sizes in equal order.
 4. Any error, and ``abort`` from any thread, ends the link for good: every wait raises.
 5. ``close`` gives everything back. Once it has returned, nothing touches any buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kv_transfer.checksum import ChecksumName

if TYPE_CHECKING:
    import torch

    from kv_transfer.rendezvous import Rendezvous


class LinkError(Exception):
    """The link is unusable from here on. The message is one plain sentence without the peers."""


class LinkOverdue(LinkError):
    """An operation did not end within its own deadline."""


class LinkAborted(LinkError):
    """This side ended the link."""


class LinkStuck(LinkError):
    """The link cannot be ended: something may touch its buffers for ever. End the process."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do. Both ends of a link must have equal ones.

    ``direct_bytes``: pages of at least this size are sent from where they lie; smaller ones are
    gathered into staging buffers of about ``staged_bytes``. ``group`` is how many direct pages
    form one operation. ``max_inflight`` operations are posted and not yet waited for.
    """

    one_sided: bool
    same_host: bool
    devices: frozenset[str]
    can_abort: bool
    max_inflight: int
    checksum: ChecksumName
    direct_bytes: int
    staged_bytes: int
    group: int = 1


@dataclass(frozen=True, slots=True)
class LinkName:
    """One life of the connection from a sending to a receiving rank.

    A new incarnation of either worker, and every link after an error (``epoch``), is a new name:
    what is left of an old one can never meet it.
    """

    sender: str
    sender_incarnation: str
    receiver: str
    receiver_incarnation: str
    epoch: int
    sender_rank: int = 0
    receiver_rank: int = 0

    @property
    def key(self) -> str:
        """The name as one string, the same on both sides."""
        return (
            f"{self.sender}@{self.sender_incarnation}:{self.sender_rank}>"
            f"{self.receiver}@{self.receiver_incarnation}:{self.receiver_rank}/{self.epoch}"
        )

    def __str__(self) -> str:
        return f"{self.sender}:{self.sender_rank} -> {self.receiver}:{self.receiver_rank}"


class Pending(Protocol):
    """An operation under way."""

    def wait(self, timeout_s: float) -> None:
        """Block until its buffers are free again.

        Raises ``LinkOverdue`` after ``timeout_s`` and ``LinkError`` when the link is broken.
        """
        ...


class Link(Protocol):
    """One end of a link. Only ``abort`` may be called from another thread than the others."""

    def connect(self, timeout_s: float) -> None:
        """Meet the other end. Raises ``LinkError``."""
        ...

    def send(self, buffers: Sequence[torch.Tensor]) -> Pending:
        """Post contiguous uint8 buffers, in order. They are read until ``wait`` returns."""
        ...

    def receive(self, buffers: Sequence[torch.Tensor]) -> Pending:
        """Post contiguous uint8 buffers, in order. They are written until ``wait`` returns."""
        ...

    def abort(self) -> None:
        """End the link now: blocked calls raise soon. From any thread; may be called twice."""
        ...

    def close(self) -> None:
        """Give everything back. Afterwards nothing touches any buffer; may be called twice.

        Raises ``LinkStuck`` when that cannot be had.
        """
        ...


class Transport(Protocol):
    """Makes links of one kind."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What every link of this transport can do."""
        ...

    def link(self, name: LinkName, *, outgoing: bool, rendezvous: Rendezvous) -> Link:
        """This side's end of a link, not yet connected. ``outgoing`` True: this side sends."""
        ...

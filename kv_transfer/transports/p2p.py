"""Links through ``torch.distributed``: gloo between CPUs, NCCL between GPUs, one class for both.

This file owns one two-rank process group per link, outside the default group: rank 0 sends,
rank 1 receives. The ends find each other through the receiver's rendezvous map. It must never
block without a deadline, and never let a group outlive its link. The data sockets have neither
authentication nor encryption: they bind to ``hostname``, which must be private.

Life of a link:
 1. ``connect`` makes the group; gloo exchanges addresses and dials inside its constructor,
    which no other thread can interrupt once it dials: it is left to its own timeout then.
 2. ``send`` and ``receive`` post operations on tag 0; NCCL's are grouped into one launch.
 3. An operation that fails or is overdue makes the group unusable. gloo reports a killed peer at
    once and a frozen one at the operation's own timeout (both measured).
 4. ``abort`` from another thread breaks what is blocked: gloo closes all connections of a group
    when any operation's timeout passes, so a receive of our own that expires at once does it;
    NCCL has an abort call, which runs on a thread of its own with a bound.
 5. ``close`` drops the group. Its destructor ends every access to the buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from kv_transfer.rendezvous import Rendezvous, RendezvousStore
from kv_transfer.transport import (
    Capabilities,
    LinkAborted,
    LinkError,
    LinkName,
    LinkOverdue,
    LinkStuck,
)
from protocol.errors import ConfigError

Backend = Literal["gloo", "nccl"]

# Pages of at least this size go row by row, smaller ones through staging buffers of about the
# second size (measured over gloo on 2 cores, 32 MB: at 512 KiB rows reach 0.8 of one raw send and
# staging 0.5, at 256 KiB they are equal, at 32 KiB 0.3 and 0.5). Both ends must agree, so these
# are part of the protocol version.
DIRECT_BYTES = 256 << 10
STAGED_BYTES = 2 << 20

_DATA_TAG = 0
_ABORT_TAG = 1
_ABORT_WAIT = timedelta(milliseconds=1)
_NCCL_POLL_S = 0.0005
_GLOO_DIALS = 5

# Makes a process group of two ranks: (store, rank, timeout in seconds).
MakeGroup = Callable[[RendezvousStore, int, float], Any]


class P2pTransport:
    """Makes links of one backend.

    ``hostname`` is the address that gloo's sockets bind to. ``abort_timeout_s`` bounds NCCL's
    abort; past it ``close`` raises ``LinkStuck``. Raises ``ConfigError`` when nothing can bind to
    ``hostname``.
    """

    name = "p2p"

    def __init__(
        self,
        device: str = "cpu",
        *,
        hostname: str = "127.0.0.1",
        abort_timeout_s: float = 5.0,
        make_group: MakeGroup | None = None,
    ) -> None:
        cuda = torch.device(device).type == "cuda"
        self.backend: Backend = "nccl" if cuda else "gloo"
        self.capabilities = Capabilities(
            one_sided=False,
            same_host=False,
            devices=frozenset({"cuda" if cuda else "cpu"}),
            can_abort=True,
            max_inflight=8,
            checksum="sums-64" if cuda else "xxh3-64",
            direct_bytes=DIRECT_BYTES,
            staged_bytes=STAGED_BYTES,
            group=8,
        )
        self._device = device
        self._hostname = hostname
        self._abort_timeout_s = abort_timeout_s
        self._make_group = make_group or (self._nccl_group if cuda else self._gloo_group)
        if not cuda:
            self._gloo_device()  # a wrong address is refused at the start, not at the first link

    def link(self, name: LinkName, *, outgoing: bool, rendezvous: Rendezvous) -> P2pLink:
        """This side's end, not yet connected."""
        return P2pLink(
            name,
            outgoing=outgoing,
            rendezvous=rendezvous,
            backend=self.backend,
            make_group=self._make_group,
            abort_timeout_s=self._abort_timeout_s,
        )

    def _gloo_group(self, store: RendezvousStore, rank: int, timeout_s: float) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # gloo dials up to five times with this timeout each; operations bring their own.
        options._timeout = timedelta(seconds=timeout_s / _GLOO_DIALS)
        options._threads = 1  # serves collectives only; point-to-point needs none
        options._devices = [self._gloo_device()]
        return dist.ProcessGroupGloo(store, rank, 2, options)

    def _gloo_device(self) -> Any:
        try:
            return dist.ProcessGroupGloo.create_device(hostname=self._hostname)
        except RuntimeError as error:
            raise ConfigError(
                f"kv.interface {self._hostname!r} is no address of this host that gloo can bind "
                f"to: {str(error).splitlines()[0]}",
                field="kv.interface",
            ) from error

    def _nccl_group(self, store: RendezvousStore, rank: int, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        options.config.max_ctas = 4
        torch.cuda.set_device(torch.device(self._device))
        return dist.ProcessGroupNCCL(store, rank, 2, options)


class P2pLink:
    """One end of a link: rank 0 of its group when it sends, rank 1 when it receives."""

    def __init__(
        self,
        name: LinkName,
        *,
        outgoing: bool,
        rendezvous: Rendezvous,
        backend: Backend,
        make_group: MakeGroup,
        abort_timeout_s: float,
    ) -> None:
        self._name = name
        self._rank = 0 if outgoing else 1
        self._rendezvous = rendezvous
        self._backend = backend
        self._make_group = make_group
        self._abort_timeout_s = abort_timeout_s
        self._aborted = False
        self._settled = threading.Event()  # the group is made, or will not be
        self._group: Any = None
        self._aborting: threading.Thread | None = None  # NCCL's abort
        self._group_lock = threading.Lock()  # abort and close, which may meet

    def connect(self, timeout_s: float) -> None:
        """Make the group. Raises ``LinkOverdue``, ``LinkAborted`` or ``LinkError``.

        The group's constructor cannot be interrupted once it dials, so it runs on a thread of
        its own; a link that is closed meanwhile leaves it behind. It ends by its own timeout,
        has no buffer of ours, and drops the group itself.
        """
        deadline = time.monotonic() + timeout_s
        store = RendezvousStore(self._rendezvous, deadline, lambda: self._aborted)
        failures: list[Exception] = []

        def make() -> None:
            try:
                group = self._make_group(store, self._rank, timeout_s)
                with self._group_lock:
                    if not self._aborted:
                        self._group = group
            except Exception as error:
                failures.append(error)
            self._settled.set()

        threading.Thread(target=make, name=f"connect {self._name}", daemon=True).start()
        settled = self._settled.wait(timeout_s)
        with self._group_lock:
            if self._group is not None:
                return
            aborted, self._aborted = self._aborted, True
        if aborted:
            raise LinkAborted("closed while connecting")
        if not settled:
            raise LinkOverdue("the other end did not connect in time")
        failure = failures[0]
        raise failure if isinstance(failure, LinkError) else _link_error(failure)

    def send(self, buffers: Sequence[torch.Tensor]) -> Operation:
        """Post buffers to be read."""
        return self._post("send", buffers)

    def receive(self, buffers: Sequence[torch.Tensor]) -> Operation:
        """Post buffers to be written."""
        return self._post("recv", buffers)

    def abort(self) -> None:
        """Break the group, so that what is blocked raises. Bounded; from any thread."""
        with self._group_lock:
            self._aborted = True
            self._settled.set()
            group = self._group
            if group is None:
                return  # connecting, or closed: nothing else is waiting
            if self._backend == "nccl":
                self._abort_nccl(group)
                return
            try:
                expiring = group.recv([torch.empty(1)], 1 - self._rank, _ABORT_TAG)
                expiring.wait(_ABORT_WAIT)
            except RuntimeError:
                return  # expected: the timeout has closed the group's connections
            raise LinkError("the other end sent something on the tag that nobody may use")

    def close(self) -> None:
        """Drop the group; its destructor ends all access to the buffers.

        Raises ``LinkStuck`` when NCCL's abort hangs.
        """
        with self._group_lock:
            if self._group is not None and self._backend == "nccl":
                self._abort_nccl(self._group)
                if self._aborting is not None and self._aborting.is_alive():
                    raise LinkStuck(
                        f"NCCL's abort did not return within {self._abort_timeout_s:g} s"
                    )
            self._group = None

    def _post(self, verb: Literal["send", "recv"], buffers: Sequence[torch.Tensor]) -> Operation:
        group = self._group
        if group is None or self._aborted:
            raise LinkAborted("closed")
        post = group.send if verb == "send" else group.recv
        peer = 1 - self._rank
        try:
            if self._backend == "gloo":
                works = [post([buffer], peer, _DATA_TAG) for buffer in buffers]
            else:
                # One group of operations is one launch (what batch_isend_irecv does).
                group._start_coalescing()
                for buffer in buffers:
                    post([buffer], peer, _DATA_TAG)
                works = [group._end_coalescing()]
        except Exception as error:
            raise self._failure(error) from error
        return Operation(self, works)

    def wait(self, works: Sequence[Any], timeout_s: float) -> None:
        """Wait until the host may touch the buffers again. Raises ``LinkError``."""
        deadline = time.monotonic() + timeout_s
        # The last one first: operations end in order, so this thread sleeps and wakes once.
        for work in reversed(works):
            left_s = max(0.001, deadline - time.monotonic())
            try:
                if self._backend == "gloo":
                    work.wait(timedelta(seconds=left_s))
                else:
                    self._poll(work, deadline)
            except LinkError:
                raise
            except Exception as error:
                raise self._failure(error) from error

    def _poll(self, work: Any, deadline: float) -> None:
        """NCCL: ``wait`` only orders streams, so completion is asked for, with our deadline."""
        while not work.is_completed():
            if self._aborted:
                raise LinkAborted("closed")
            if time.monotonic() > deadline:
                raise LinkOverdue("an operation did not end in time")
            time.sleep(_NCCL_POLL_S)
        if not work.is_success():
            raise LinkError("an operation failed")

    def _abort_nccl(self, group: Any) -> None:
        """NCCL's abort can hang with its peer, so it runs, once, on a thread of its own."""
        if self._aborting is None:
            self._aborting = threading.Thread(
                target=group.abort, name=f"abort {self._name}", daemon=True
            )
            self._aborting.start()
            self._aborting.join(self._abort_timeout_s)

    def _failure(self, error: Exception) -> LinkError:
        return LinkAborted("closed") if self._aborted else _link_error(error)


def _link_error(error: Exception) -> LinkError:
    """What a backend's exception means; its text is all that there is to tell."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    if "Timed out" in text or "timeout" in text:
        return LinkOverdue("an operation did not end in time")
    if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
        return LinkError("the other end closed the connection")
    return LinkError(text)


class Operation:
    """One or several works of the group that belong together."""

    __slots__ = ("_link", "_works")

    def __init__(self, link: P2pLink, works: list[Any]) -> None:
        self._link = link
        self._works = works

    def wait(self, timeout_s: float) -> None:
        """Block until every buffer is free again."""
        self._link.wait(self._works, timeout_s)

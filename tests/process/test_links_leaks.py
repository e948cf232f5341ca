"""What links leave behind: no thread, no file; and what they say when they cannot be ended."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest
from link_rig import SMALL, Side, link_name, open_both

from kv_transfer.rendezvous import Rendezvous, RendezvousMap
from kv_transfer.transport import Link, LinkName, LinkStuck, Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.p2p import P2pTransport
from protocol.events import SegmentReceived, SegmentSent

TRANSPORTS = {"loopback": LoopbackTransport, "p2p": P2pTransport}


def _open_close(transport: Transport, cycles: int) -> None:
    rendezvous = RendezvousMap()
    sender, receiver = Side(transport, SMALL, 8), Side(transport, SMALL, 8)
    for epoch in range(cycles):
        open_both(sender, receiver, rendezvous, epoch)
        sender.send(epoch, [1, 2])
        receiver.receive(epoch, [1, 2])
        assert isinstance(sender.next(), SegmentSent)
        assert isinstance(receiver.next(), SegmentReceived)
        receiver.receive(epoch, [1], sink=True)  # one side ends amid an operation
        assert sender.links.close_all("cycle", 10.0)
        assert receiver.links.close_all("cycle", 10.0)
        sender.broken()
        receiver.broken()
        rendezvous.close(link_name(epoch).key)
    assert len(rendezvous) == 0
    gc.collect()


def _count_leaks(name: str, cycles: int) -> str:
    transport = TRANSPORTS[name]()
    _open_close(transport, 1)  # what is loaded once, is loaded now
    threads, files = set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    _open_close(transport, cycles)
    new_threads = len(set(os.listdir("/proc/self/task")) - threads)
    return f"{new_threads} threads, {len(os.listdir('/proc/self/fd')) - files} files"


@pytest.mark.parametrize("name", list(TRANSPORTS))
@pytest.mark.parametrize(
    "cycles", [5, pytest.param(50, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_no_thread_and_no_file_is_left_behind(name: str, cycles: int) -> None:
    # In a process of its own: what earlier tests left ending would be counted here.
    done = subprocess.run(
        [sys.executable, __file__, name, str(cycles)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.splitlines()[-1:] == ["0 threads, 0 files"], done.stderr


class _StuckLink:
    """A link whose end cannot be had, as NCCL's abort can do."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.connect, self.send, self.receive = link.connect, link.send, link.receive
        self.abort = link.abort

    def close(self) -> None:
        self._link.close()
        raise LinkStuck("the device does not answer")


class _StuckTransport(LoopbackTransport):
    def link(self, name: LinkName, *, outgoing: bool, rendezvous: Rendezvous) -> Link:
        return _StuckLink(super().link(name, outgoing=outgoing, rendezvous=rendezvous))


def test_a_link_that_cannot_be_ended_never_says_it_is_over() -> None:
    sentences: queue.Queue[str] = queue.Queue()
    side = Side(_StuckTransport(), SMALL, 4)
    side.links._on_stuck = sentences.put
    side.links.open(link_name(), outgoing=True, rendezvous=RendezvousMap().open(link_name().key))
    side.links.close("receiver", outgoing=True, cause="over")
    assert "does not answer" in sentences.get(timeout=10)
    assert side.links.close_all("over", 10)
    assert side.events.empty()


if __name__ == "__main__":
    print(_count_leaks(sys.argv[1], int(sys.argv[2])))

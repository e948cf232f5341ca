"""The p2p link between two processes over gloo: bytes, and peers that die, freeze or leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from link_rig import LARGE, Side, TcpRendezvous, link_name, page_sets

from kv_transfer.transports.p2p import P2pTransport
from protocol.events import SegmentReceived, SegmentSent

PAGES, MOST = 160, 10
HERE = Path(__file__).parent


class Peer:
    """The process of ``p2p_peer.py``; ends with the test."""

    def __init__(self, port: int, role: str, seed: int, segments: int) -> None:
        path = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "p2p_peer.py"), str(port), role, str(seed), str(segments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def lines(self) -> list[list[int]]:
        """The numbers it printed, one list per segment, once it has carried all of them."""
        assert self.process.stdout is not None
        rows = []
        for line in self.process.stdout:
            if line.strip() == "end":
                return rows
            rows.append([int(word) for word in line.split()])
        raise AssertionError(f"the peer ended with {self.process.wait(10)}")

    def end(self) -> None:
        """Kill it, also when it is stopped, and give its pipes back."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def store() -> TcpRendezvous:
    return TcpRendezvous(0, serve=True)


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.end()


def start(
    store: TcpRendezvous, peers: list[Peer], role: str, segments: int, op_timeout_s: float = 10.0
) -> tuple[Side, Peer]:
    """Start the peer in ``role``; open this side in the other one."""
    peer = Peer(store.port, role, seed=11, segments=segments)
    peers.append(peer)
    side = Side(P2pTransport(), LARGE, PAGES, op_timeout_s)
    side.links._connect_timeout_s = 20.0  # the peer still has to load torch
    side.links.open(link_name(), outgoing=role == "receiver", rendezvous=store)
    return side, peer


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_random_pages_between_processes(store: TcpRendezvous, peers: list[Peer], role: str) -> None:
    segments = 16
    side, peer = start(store, peers, role, segments)
    sends = role == "receiver"
    side.fill(99)
    sets = page_sets(11, segments, PAGES, MOST)
    for segment, (sources, targets) in enumerate(sets):
        if sends:
            side.send(segment, sources)
        else:
            side.receive(segment, targets)
    for segment, there in enumerate(peer.lines()):
        event = side.next()
        assert isinstance(event, SegmentSent if sends else SegmentReceived)
        sources, targets = sets[segment]
        rows = side.pool.rows[sources if sends else targets]
        here = xxhash.xxh3_64_intdigest(rows.numpy().tobytes())
        assert [segment, event.checksum, here] == there
        assert event.checksum == here
    assert side.links.close_all("over", 5.0)


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_a_killed_peer_is_noticed_at_once(
    store: TcpRendezvous, peers: list[Peer], role: str
) -> None:
    side, peer = start(store, peers, role, segments=1)
    (sources, targets), *_ = page_sets(11, 1, PAGES, MOST)
    carry(side, role, 0, sources, targets)
    assert isinstance(side.next(), SegmentSent | SegmentReceived)
    peer.lines()
    before = side.pool.rows.clone()
    carry(side, role, 1, [1, 2, 3], [4, 5, 6])  # blocks: the peer has no second segment
    peer.process.kill()
    started = time.monotonic()
    broken = side.broken()
    assert time.monotonic() - started < 5.0, "as slow as the operation's own timeout"
    assert "other end" in broken.error.message
    assert torch.equal(before, side.pool.rows)
    assert side.links.close_all("over", 5.0) and side.links.threads() == 0


@pytest.mark.parametrize("role", ["receiver", pytest.param("sender", marks=pytest.mark.long)])
def test_a_frozen_peer_ends_at_the_operations_deadline(
    store: TcpRendezvous, peers: list[Peer], role: str
) -> None:
    side, peer = start(store, peers, role, segments=1, op_timeout_s=1.0)
    (sources, targets), *_ = page_sets(11, 1, PAGES, MOST)
    carry(side, role, 0, sources, targets)
    assert isinstance(side.next(), SegmentSent | SegmentReceived)
    peer.lines()
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    carry(side, role, 1, [1, 2, 3], [4, 5, 6])
    broken = side.broken()
    assert 0.8 < time.monotonic() - started < 6.0
    assert "in time" in broken.error.message
    assert side.links.close_all("over", 2.0), "closing hangs on a frozen peer"
    # If it wakes up it finds a dead link, and its bytes reach nobody's pages.
    before = side.pool.rows.clone()
    peer.process.send_signal(signal.SIGCONT)
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.process.wait(20) == 0
    assert torch.equal(before, side.pool.rows)


def carry(side: Side, peer_role: str, segment: int, sources: list[int], targets: list[int]) -> None:
    """Post this side's half of a segment."""
    if peer_role == "receiver":
        side.send(segment, sources)
    else:
        side.receive(segment, targets)

"""The NCCL branch of the p2p link, call by call, against a recorded process group.

No GPU here: what is shown is which calls are made, in which order, and how endings are bounded.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from link_rig import link_name

from kv_transfer.rendezvous import RendezvousMap, RendezvousStore
from kv_transfer.transport import LinkAborted, LinkError, LinkOverdue, LinkStuck
from kv_transfer.transports.nccl_env import NCCL_ENVIRONMENT, prepare_nccl_environment
from kv_transfer.transports.p2p import P2pLink, P2pTransport


class Work:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.good = True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.good


class RecordedGroup:
    """A ProcessGroupNCCL as far as the link calls it."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.works: list[Work] = []
        self.abort_returns = threading.Event()
        self.abort_returns.set()

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.calls.append(("send", tensors[0].data_ptr(), peer))
        return Work()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        self.calls.append(("recv", tensors[0].data_ptr(), peer))
        return Work()

    def _end_coalescing(self) -> Work:
        self.calls.append("end")
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        self.calls.append("abort")
        self.abort_returns.wait(20)


@pytest.fixture
def group() -> Iterator[RecordedGroup]:
    group = RecordedGroup()
    yield group
    group.abort_returns.set()


def connected(group: RecordedGroup, *, outgoing: bool) -> P2pLink:
    made: list[tuple[int, float]] = []

    def make(store: RendezvousStore, rank: int, timeout_s: float) -> RecordedGroup:
        made.append((rank, timeout_s))
        return group

    transport = P2pTransport("cuda", make_group=make, abort_timeout_s=0.2)
    name = link_name()
    link = transport.link(name, outgoing=outgoing, rendezvous=RendezvousMap().open(name.key))
    link.connect(3.0)
    assert made == [(0 if outgoing else 1, 3.0)]
    return link


def test_the_branch_is_declared() -> None:
    transport = P2pTransport("cuda:1")
    assert transport.backend == "nccl"
    assert transport.capabilities.devices == {"cuda"}
    assert transport.capabilities.checksum == "sums-64"
    assert P2pTransport("cpu").backend == "gloo"


@pytest.mark.parametrize("outgoing", [True, False])
def test_the_rows_of_a_unit_are_one_group_of_operations(
    group: RecordedGroup, outgoing: bool
) -> None:
    link = connected(group, outgoing=outgoing)
    rows = list(torch.zeros((3, 64), dtype=torch.uint8))
    pending = link.send(rows) if outgoing else link.receive(rows)
    verb, peer = ("send", 1) if outgoing else ("recv", 0)
    assert group.calls == ["start", *((verb, row.data_ptr(), peer) for row in rows), "end"]
    threading.Timer(0.05, group.works[0].done.set).start()
    pending.wait(5.0)
    assert group.works[0].done.is_set()


def test_a_wait_ends_at_our_deadline_not_at_ncclses(group: RecordedGroup) -> None:
    pending = connected(group, outgoing=True).send([torch.zeros(8, dtype=torch.uint8)])
    started = time.monotonic()
    with pytest.raises(LinkOverdue):
        pending.wait(0.1)
    assert time.monotonic() - started < 2


def test_a_failed_operation_is_an_error(group: RecordedGroup) -> None:
    pending = connected(group, outgoing=True).send([torch.zeros(8, dtype=torch.uint8)])
    group.works[0].good = False
    group.works[0].done.set()
    with pytest.raises(LinkError, match="failed"):
        pending.wait(1.0)


def test_abort_ends_a_blocked_wait_and_runs_once(group: RecordedGroup) -> None:
    link = connected(group, outgoing=False)
    pending = link.receive([torch.zeros(8, dtype=torch.uint8)])
    threading.Timer(0.05, link.abort).start()
    with pytest.raises(LinkAborted):
        pending.wait(10.0)
    link.close()
    link.close()
    assert group.calls.count("abort") == 1
    with pytest.raises(LinkAborted):
        link.receive([torch.zeros(8, dtype=torch.uint8)])


def test_a_hanging_abort_is_bounded_and_said(group: RecordedGroup) -> None:
    group.abort_returns.clear()
    link = connected(group, outgoing=True)
    started = time.monotonic()
    link.abort()
    with pytest.raises(LinkStuck, match=r"0\.2 s"):
        link.close()
    assert time.monotonic() - started < 2


def test_the_environment_is_set_before_torch_and_never_over_the_operators() -> None:
    environment = {"NCCL_MAX_P2P_NCHANNELS": "1"}
    with pytest.raises(RuntimeError, match="before torch"):
        prepare_nccl_environment(environment, "")
    assert environment == {"NCCL_MAX_P2P_NCHANNELS": "1"}
    prepare_nccl_environment(dict(NCCL_ENVIRONMENT), "")  # nothing is missing
    code = (
        "import sys\n"
        "from kv_transfer.transports.nccl_env import prepare_nccl_environment\n"
        "environment = {'NCCL_MAX_P2P_NCHANNELS': '1'}\n"
        "prepare_nccl_environment(environment, 'eth1')\n"
        "assert 'torch' not in sys.modules\n"
        "print(environment['NCCL_MAX_P2P_NCHANNELS'], environment['NCCL_SOCKET_IFNAME'],\n"
        "      environment['TORCH_NCCL_ASYNC_ERROR_HANDLING'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["1", "=eth1", "0"], run.stderr


def test_an_actor_with_a_gpu_prepares_it_before_torch_is_there() -> None:
    code = (
        "import os, sys\n"
        "from cluster.worker.actor import WorkerActor\n"
        "from cluster.worker.options import WorkerOptions\n"
        "from protocol.types import Role\n"
        "WorkerActor(WorkerOptions('decode-0', Role.DECODE, 'm', use_gpu=True))\n"
        "assert 'torch' not in sys.modules\n"
        "print(os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["0"], run.stderr

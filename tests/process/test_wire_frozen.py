"""A worker process that is frozen or killed is noticed by the other end of its streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wire_host import FAST, SECRET, hello, run

from protocol.errors import TandemError
from protocol.wire.clients import SessionClient, TransferClient

WORKER = """
import asyncio
from wire_host import RecordingHost, served

async def main():
    async with served(RecordingHost()) as (endpoint, server):
        print(endpoint, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def worker() -> Iterator[tuple[str, int]]:
    """A worker's server in a process of its own: endpoint and process id."""
    tests = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("how", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, FAST.peer_dead_s + 3)]
)
@pytest.mark.parametrize("kind", ["session", "transfer"])
def test_the_end_of_a_worker_is_noticed(
    worker: tuple[str, int], how: signal.Signals, within_s: float, kind: str
) -> None:
    endpoint, pid = worker

    async def main() -> None:
        client: SessionClient | TransferClient
        if kind == "session":
            client = SessionClient(endpoint, "router-0", SECRET, timing=FAST)
        else:
            client = TransferClient(endpoint, hello("prefill-0"), SECRET, timing=FAST)
        await client.connect()
        messages = client.messages()
        await anext(messages)  # both loops run
        os.kill(pid, how)
        at = time.monotonic()
        with pytest.raises(TandemError) as caught:
            async for _ in messages:
                pass
        assert time.monotonic() - at < within_s
        assert caught.value.reason == "UNAVAILABLE"
        await client.close()

    run(main())

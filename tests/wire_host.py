"""A worker's runtime as its gRPC service sees it, for tests: records events, waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cluster.worker.service import WorkerServer
from protocol.agreement import PROTOCOL_VERSION
from protocol.config import TimingConfig
from protocol.errors import TandemError, WrongState
from protocol.events import Event
from protocol.messages import Hello
from protocol.types import KvGeometry, WorkerLoad
from protocol.wire.telemetry import Telemetry

FAST = TimingConfig(heartbeat_s=0.1, peer_dead_s=1.0)
SECRET = "a secret of this test"
GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=16, dtype="float32")


def hello(worker_id: str, **changes: Any) -> Hello:
    """A Hello that agrees with every other one made here, changes aside."""
    values = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}-a",
        "endpoint": "127.0.0.1:1",
        "fingerprint": "model-1",
        "geometry": GEOMETRY,
        "wire_dtype": "float32",
        "protocol_version": PROTOCOL_VERSION,
    }
    return Hello(**(values | changes))


def run(main: Coroutine[Any, Any, None], seconds: float = 20) -> None:
    """Run a test's coroutine on a loop of its own, never for longer than ``seconds``."""
    asyncio.run(asyncio.wait_for(main, seconds))


class Maps:
    """Rendezvous maps of the links that were opened."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._links: dict[str, dict[str, bytes]] = {}

    def open(self, link: str) -> None:
        with self._changed:
            self._links[link] = {}

    def _values(self, link: str) -> dict[str, bytes]:
        if link not in self._links:
            raise WrongState(f"no rendezvous is open for link {link}")
        return self._links[link]

    def set(self, link: str, key: str, value: bytes) -> None:
        with self._changed:
            self._values(link)[key] = value
            self._changed.notify_all()

    def get(self, link: str, key: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values(link), timeout_s)
            return self._values(link).get(key)

    def check(self, link: str, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values(link) for key in keys)

    def delete(self, link: str, key: str) -> bool:
        with self._changed:
            return self._values(link).pop(key, None) is not None


class RecordingHost:
    """Keeps every call in order as ``log``; ``wait_for`` waits until something is in it."""

    def __init__(self, me: Hello | None = None) -> None:
        self.me = me or hello("decode-0")
        self.rendezvous = Maps()
        self.telemetry = Telemetry()
        self.log: list[Any] = []
        self.sends: dict[str, Callable[[Any], None]] = {}
        self._changed = asyncio.Condition()

    def _add(self, entry: Any) -> None:
        self.log.append(entry)
        self._note = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, wanted: Callable[[list[Any]], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: wanted(self.log))

    async def wait_until_logged(self, entry: Any) -> None:
        await self.wait_for(lambda log: entry in log)

    def submit(self, event: Event) -> None:
        self._add(event)

    def hello(self) -> Hello:
        return self.me

    def load(self) -> WorkerLoad:
        return WorkerLoad(running=1, free_pages=5, total_pages=9, steps=77)

    def count(self, metric: str, label: str = "", amount: float = 1) -> None:
        self.telemetry.count(metric, label, amount)

    def attach_router(self, router_id: str, send: Callable[[Any], None]) -> None:
        self.sends[router_id] = send
        self._add(("attach", router_id))

    def detach_router(self, router_id: str) -> None:
        self._add(("detach", router_id))

    def attach_peer(
        self, hello: Hello, send: Callable[[Any], None], end: Callable[[TandemError], None]
    ) -> None:
        self.sends[hello.worker_id] = send
        self._add(("attach", hello.worker_id, hello.incarnation))

    def detach_peer(self, worker_id: str) -> None:
        self._add(("detach", worker_id))


@asynccontextmanager
async def served(
    host: RecordingHost, timing: TimingConfig = FAST, secret: str = SECRET
) -> AsyncIterator[tuple[str, WorkerServer]]:
    """A worker's server on a free port of loopback: its endpoint and itself."""
    server = WorkerServer(host, secret=secret, timing=timing)
    endpoint = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
    await server.start()
    try:
        yield endpoint, server
    finally:
        await server.stop()

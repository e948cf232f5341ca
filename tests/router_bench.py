"""A dispatcher whose workers the test plays by hand: no sockets, no processes.

This file owns the fake end of a session and the bench around one dispatcher. It must never know
what a test expects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from protocol.config import LimitsConfig, ModelConfig, RouterConfig, TandemConfig, TimingConfig
from protocol.errors import (
    ErrorInfo,
    TandemError,
    Unavailable,
)
from protocol.messages import (
    Done,
    Open,
    RouterToWorker,
    TokenItem,
    Tokens,
    WorkerHeartbeat,
    WorkerToRouter,
)
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    KvGeometry,
    ModelInfo,
    Outcome,
    Request,
    Role,
    SamplingParams,
    StageTiming,
    Ticket,
    WorkerInfo,
    WorkerLoad,
)
from protocol.wire.telemetry import Telemetry
from router.dispatcher import Dispatcher

MODEL = ModelInfo("f", 320, 512, (2,), KvGeometry(2, 2, 16, 16, "float32"))
DECODE, PREFILL = "decode-0", "prefill-0"


def worker(worker_id: str, role: Role, *, incarnation: str = "i1", **kwargs: Any) -> WorkerInfo:
    values: dict[str, Any] = {"total_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    endpoint = f"127.0.0.1:{worker_id}"
    return WorkerInfo(worker_id, incarnation, role, endpoint, MODEL, **(values | kwargs))


def request(name: str = "r", *, n_prompt: int = 20, max_tokens: int = 8, **kwargs: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return Request(name, tuple(range(4, 4 + n_prompt)), sampling, **kwargs)


@dataclass
class FakeWorker:
    """One worker's end of a session: what it was told, and what the test makes it say."""

    info: WorkerInfo
    told: asyncio.Queue[RouterToWorker] = field(default_factory=asyncio.Queue)
    says: asyncio.Queue[WorkerToRouter | TandemError] = field(default_factory=asyncio.Queue)
    refuse: TandemError | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.beat()

    def send_nowait(self, message: RouterToWorker) -> None:
        self.told.put_nowait(message)

    async def messages(self) -> AsyncIterator[WorkerToRouter]:
        while True:
            message = await self.says.get()
            if isinstance(message, TandemError):
                raise message
            yield message

    async def close(self) -> None:
        self.closed.set()
        self.says.put_nowait(Unavailable("closed"))

    def beat(self, incarnation: str | None = None, **load: Any) -> None:
        values = {"free_pages": self.info.total_pages, "total_pages": self.info.total_pages} | load
        self.says.put_nowait(
            WorkerHeartbeat(
                self.info.worker_id, incarnation or self.info.incarnation, WorkerLoad(**values)
            )
        )

    async def hear(self, kind: type[Any]) -> Any:
        message = await asyncio.wait_for(self.told.get(), 5)
        assert isinstance(message, kind), f"{self.info.worker_id} was told {message}"
        return message

    async def opened(self) -> Ticket:
        return (await self.hear(Open)).ticket  # type: ignore[no-any-return]

    def tokens(self, ticket: Ticket, index: int, *ids: int, end: FinishReason | None = None):
        self.says.put_nowait(Tokens((TokenItem(ticket.id, index, ids, end),)))

    def done(self, ticket: Ticket, outcome: Outcome = Outcome.OK, error: ErrorInfo | None = None):
        stage = "prefill" if self.info.role is Role.PREFILL else "decode"
        timings = (StageTiming(stage, self.info.worker_id, 0.25),)
        self.says.put_nowait(Done(ticket.id, outcome, timings, error))


class Bench:
    """A dispatcher whose workers are ``FakeWorker``s; ``links`` has every one ever dialled."""

    def __init__(self, *infos: WorkerInfo, limits: LimitsConfig | None = None, **config: Any):
        timing = config.pop("timing", TimingConfig())
        self.config = TandemConfig(
            model=ModelConfig(path="x"),
            router=RouterConfig(limits=limits or LimitsConfig()),
            timing=timing,
            **config,
        )
        self.infos = infos or (worker(DECODE, Role.DECODE), worker(PREFILL, Role.PREFILL))
        self.links: dict[str, FakeWorker] = {}
        self.dialled: asyncio.Queue[FakeWorker] = asyncio.Queue()
        self.before_connect: Callable[[FakeWorker], None] = lambda link: None
        self.telemetry = Telemetry()
        self.reads: set[asyncio.Task[list[Delta | Complete]]] = set()

    async def __aenter__(self) -> Bench:
        self.core = Dispatcher(
            self.config,
            MODEL,
            router_id="router-0",
            session_factory=self._dial,
            clock=time.monotonic,
            telemetry=self.telemetry,
        )
        self.core.set_workers(self.infos)
        await self.until(lambda: all(w.session == "up" for w in self.core.status().workers))
        return self

    async def __aexit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.core.check_integrity()
        await self.core.close()
        await asyncio.gather(*self.reads, return_exceptions=True)
        self.core.check_integrity()

    def _dial(self, info: WorkerInfo) -> FakeWorker:
        link = self.links[info.worker_id] = FakeWorker(info)
        self.before_connect(link)
        self.dialled.put_nowait(link)
        return link

    @property
    def decode(self) -> FakeWorker:
        return self.links[DECODE]

    @property
    def prefill(self) -> FakeWorker:
        return self.links[PREFILL]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the event loop run until something holds (bounded): it has no event of its own."""
        async with asyncio.timeout(5):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def ask(self, wanted: Request, *texts: Any) -> asyncio.Task[list[Delta | Complete]]:
        async def read() -> list[Delta | Complete]:
            async with aclosing(self.core.generate(wanted, texts)) as pieces:
                return [piece async for piece in pieces]

        task = asyncio.create_task(read())
        self.reads.add(task)
        return task

    async def both_opened(self) -> Ticket:
        ticket = await self.decode.opened()
        assert await self.prefill.opened() == ticket
        return ticket

    async def gone(self) -> None:
        """Every leg is off the ledger."""
        await self.until(lambda: sum(w.in_flight for w in self.core.status().workers) == 0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


class Shout:
    """Text of a tokenizer whose token n is the letter n; stops at 'c'."""

    def __init__(self, fails_at: int = -1) -> None:
        self.n, self.fails_at = 0, fails_at

    def push(self, ids: tuple[int, ...]) -> Any:
        from router.text import TextPiece

        text = ""
        for i in ids:
            if i == self.fails_at:
                raise ValueError("no such token")
            self.n += 1
            if chr(i) == "c":
                return TextPiece(text, "c", self.n - 1)
            text += chr(i)
        return TextPiece(text)

    def finish(self) -> str:
        return "!"

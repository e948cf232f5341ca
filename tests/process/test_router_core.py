"""The dispatcher with sessions that the test plays by hand: no sockets, no processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocol.config import LimitsConfig, ModelConfig, RouterConfig, TandemConfig, TimingConfig
from protocol.errors import (
    DataLoss,
    DeadlineExceeded,
    ErrorInfo,
    InternalError,
    InvalidArgument,
    NeverFits,
    Overloaded,
    SlowReader,
    TandemError,
    Unavailable,
)
from protocol.messages import (
    Cancel,
    Done,
    Open,
    Queued,
    Reserved,
    RouterToWorker,
    SenderLost,
    Stop,
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
    Mode,
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
        """Let the event loop run until something holds (bounded)."""
        async with asyncio.timeout(5):
            while not holds():
                await asyncio.sleep(0.001)

    def ask(self, wanted: Request, text: Any = None) -> asyncio.Task[list[Delta | Complete]]:
        async def read() -> list[Delta | Complete]:
            async with aclosing(self.core.generate(wanted, text)) as pieces:
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


def test_a_request_runs_over_both_legs_and_reports_all_stages() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            assert ticket.sender is not None and ticket.sender.worker_id == PREFILL
            assert ticket.n_prompt == 20 and 0 < ticket.remaining_s <= 600
            status = {w.info.worker_id: w for w in bench.core.status().workers}
            assert status[DECODE].reserved_pages == 2 and status[PREFILL].queued_tokens == 20
            bench.decode.says.put_nowait(Queued(ticket.id, 1, "full"))
            bench.decode.says.put_nowait(Reserved(ticket.id, 2))
            bench.decode.tokens(ticket, 0, 7)
            bench.prefill.done(ticket)
            bench.decode.tokens(ticket, 1, 8, 9, end=FinishReason.LENGTH)
            bench.decode.done(ticket)
            *deltas, complete = await task
            assert deltas == [Delta(0, (7,), ""), Delta(1, (8, 9), "")]
            assert isinstance(complete, Complete)
            assert complete.finish_reason is FinishReason.LENGTH
            assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (20, 3)
            assert {t.stage for t in complete.timings} == {"queue", "prefill", "decode"}
            assert bench.telemetry.value("requests", "length") == 1
            assert bench.telemetry.value("ttft_seconds") == 1
            assert bench.telemetry.value("itl_seconds") == 1
            await bench.gone()
            assert bench.core.status().running == 0

    run(scenario)


def test_the_end_does_not_wait_for_a_leg_that_does_not_report() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            complete = (await asyncio.wait_for(task, 1))[-1]
            assert isinstance(complete, Complete)
            assert [t.stage for t in complete.timings] == ["queue", "decode"]
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            assert bench.decode.told.empty() and bench.prefill.told.empty()

    run(scenario)


def test_a_client_that_hangs_up_ends_both_legs() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            stream = bench.core.generate(request(), None)
            first = asyncio.create_task(anext(stream))
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7)
            assert await first == Delta(0, (7,), "")
            await stream.aclose()
            assert (await bench.decode.hear(Cancel)).ticket_id == ticket.id
            assert (await bench.prefill.hear(Cancel)).ticket_id == ticket.id
            assert bench.core.status().workers[0].in_flight == 1  # until the worker says Done
            bench.decode.tokens(ticket, 1, 8)
            bench.decode.done(ticket, Outcome.CANCELLED)
            bench.prefill.done(ticket, Outcome.CANCELLED)
            await bench.gone()
            assert bench.telemetry.value("requests", "cancelled") == 1
            assert bench.core.status().counters["late_tokens"] == 1

    run(scenario)


def test_a_cancelled_reader_ends_both_legs_before_the_first_token() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            task.cancel()
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)

    run(scenario)


@pytest.mark.parametrize("failing", [DECODE, PREFILL])
def test_one_failed_leg_cancels_the_other_and_the_client_hears_why(failing: str) -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            other = PREFILL if failing == DECODE else DECODE
            bench.links[failing].done(ticket, Outcome.FAILED, ErrorInfo("DATA_LOSS", "bad sum"))
            with pytest.raises(DataLoss, match="bad sum"):
                await task
            await bench.links[other].hear(Cancel)
            assert bench.links[failing].told.empty()
            bench.links[other].done(ticket, Outcome.CANCELLED)
            await bench.gone()

    run(scenario)


def test_a_lost_sender_is_an_honest_failure() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.says.put_nowait(SenderLost(ticket.id, ErrorInfo("UNAVAILABLE", "link")))
            with pytest.raises(Unavailable, match="link"):
                await task
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)

    run(scenario)


def test_a_lost_worker_ends_its_requests_and_is_dialled_again() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            old = bench.decode
            old.says.put_nowait(Unavailable("reset by peer"))
            with pytest.raises(Unavailable, match=r"lost worker decode-0.*reset by peer"):
                await task
            await bench.prefill.hear(Cancel)
            assert bench.core.can_serve() == (False, "no decode worker is ready")
            with pytest.raises(Unavailable, match="no decode worker"):
                await bench.ask(request("now"))
            await bench.until(lambda: bench.core.can_serve()[0])
            assert bench.decode is not old and old.closed.is_set()
            again = bench.ask(request("again"))
            ticket = await bench.decode.opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            assert isinstance((await again)[-1], Complete)
            assert bench.telemetry.value("workers_lost", "stream") == 1

    run(scenario)


def test_a_new_incarnation_voids_the_old_one_at_once() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            await bench.both_opened()
            new = worker(DECODE, Role.DECODE, incarnation="i2")
            bench.core.set_workers((new, bench.infos[1]))
            with pytest.raises(Unavailable, match="left"):
                await task
            await bench.until(lambda: bench.core.can_serve()[0])
            assert bench.decode.info is new

    run(scenario)


def test_an_answer_of_another_incarnation_is_not_taken() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            bench.decode.beat(incarnation="stranger")
            await bench.until(lambda: not bench.core.can_serve()[0])
            assert bench.telemetry.value("workers_lost", "restarted") == 1

    run(scenario)


def test_a_silent_worker_is_lost_within_its_time() -> None:
    async def scenario() -> None:
        timing = TimingConfig(heartbeat_s=0.02, peer_dead_s=0.1)
        async with Bench(timing=timing) as bench:
            task = bench.ask(request())
            await bench.both_opened()
            began = time.monotonic()
            with pytest.raises(Unavailable, match="silent"):
                await task
            assert time.monotonic() - began < 2

    run(scenario)


def test_a_stuck_worker_is_lost_though_it_answers() -> None:
    async def scenario() -> None:
        async with Bench(timing=TimingConfig(stuck_step_s=30)) as bench:
            task = bench.ask(request())
            await bench.both_opened()
            bench.decode.beat(busy_s=29.0)
            bench.decode.beat(busy_s=31.0)
            with pytest.raises(Unavailable, match="no progress"):
                await task
            # It dials in again, but its first heartbeat shows that nothing has changed.
            bench.before_connect = lambda link: link.beat(busy_s=32.0)
            while (await bench.dialled.get()).info.worker_id != DECODE:
                pass
            await bench.until(lambda: bench.decode.closed.is_set())
            assert not bench.core.can_serve()[0]

    run(scenario)


def test_without_prefill_workers_the_decode_worker_does_it_and_it_is_counted() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE)) as bench:
            serves, detail = bench.core.can_serve()
            assert serves and detail.startswith("degraded")
            task = bench.ask(request())
            ticket = await bench.decode.opened()
            assert ticket.sender is None
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            assert bench.telemetry.value("fallbacks", "no_prefill_worker") == 1

    run(scenario)


def test_colocated_requests_are_local_and_no_fallback() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE), mode=Mode.COLOCATED) as bench:
            assert bench.core.can_serve() == (True, "")
            task = bench.ask(request())
            ticket = await bench.decode.opened()
            assert ticket.sender is None
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            assert bench.telemetry.value("fallbacks", "no_prefill_worker") == 0

    run(scenario)


def test_requests_wait_for_pages_then_go_and_the_queue_is_bounded() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos, limits=LimitsConfig(max_queued=1)) as bench:
            first = bench.ask(request("first"))
            ticket = await bench.both_opened()
            second = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            with pytest.raises(Overloaded) as refused:
                await bench.ask(request("third"))
            assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
            assert bench.telemetry.value("rejected", "overloaded") == 1
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await first
            assert bench.core.status().queued == 1  # its pages are not free yet
            bench.decode.done(ticket)
            ticket = await bench.both_opened()
            assert ticket.id.request_id.startswith("second")
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await second

    run(scenario)


def test_a_queue_of_no_places_refuses_at_once() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, max_num_seqs=1), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos, limits=LimitsConfig(max_queued=0)) as bench:
            bench.ask(request("first"))
            await bench.both_opened()
            with pytest.raises(Overloaded):
                await bench.ask(request("second"))

    run(scenario)


def test_a_client_that_leaves_the_queue_gives_its_place_up() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            bench.ask(request("first"))
            await bench.both_opened()
            waiting = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            waiting.cancel()
            await bench.until(lambda: bench.core.status().queued == 0)
            assert bench.telemetry.value("requests", "cancelled") == 1

    run(scenario)


def test_who_waits_is_refused_when_the_last_decode_worker_goes() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            first = bench.ask(request("first"))
            await bench.both_opened()
            second = bench.ask(request("second"))
            await bench.until(lambda: bench.core.status().queued == 1)
            bench.core.set_workers((infos[1],))
            for task in (first, second):
                with pytest.raises(Unavailable):
                    await task

    run(scenario)


def test_deadlines_end_requests_that_wait_and_requests_that_run() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            running = bench.ask(request("running", deadline_s=0.1))
            await bench.both_opened()
            waiting = bench.ask(request("waiting", deadline_s=0.05))
            with pytest.raises(DeadlineExceeded, match="waited for its whole deadline.*pages"):
                await waiting
            with pytest.raises(DeadlineExceeded):
                await running
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            with pytest.raises(DeadlineExceeded):
                await bench.ask(request("dead", deadline_s=0))

    run(scenario)


def test_a_slow_reader_is_cancelled() -> None:
    async def scenario() -> None:
        async with Bench(limits=LimitsConfig(stream_buffer=4)) as bench:
            stream = bench.core.generate(request(), None)
            first = asyncio.create_task(anext(stream))
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 10)
            await first
            for i in range(1, 7):
                bench.decode.tokens(ticket, i, 10)
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            got: list[Delta | Complete] = []
            with pytest.raises(SlowReader, match="5 tokens"):
                async for piece in stream:
                    got.append(piece)
            assert [piece.index for piece in got if isinstance(piece, Delta)] == [1, 2, 3, 4, 5]

    run(scenario)


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            with pytest.raises(NeverFits, match="1100 tokens.*70 pages.*64"):
                await bench.ask(request(n_prompt=1100, max_tokens=20))
            assert bench.decode.told.empty() and bench.prefill.told.empty()

    run(scenario)


def test_the_same_id_twice_at_once_is_refused_but_not_one_after_the_other() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            first = bench.ask(request("same"))
            ticket = await bench.both_opened()
            with pytest.raises(InvalidArgument, match="same"):
                await bench.ask(request("same"))
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await first
            second = bench.ask(request("same"))
            other = await bench.both_opened()
            assert other.id != ticket.id  # the first one's legs may still be ending
            bench.decode.tokens(other, 0, 7, end=FinishReason.STOP)
            await second

    run(scenario)


def test_duplicate_tokens_are_dropped_and_a_gap_is_an_error() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7)
            bench.decode.tokens(ticket, 0, 7)
            bench.decode.tokens(ticket, 2, 9)
            with pytest.raises(InternalError, match="token 2 .*where token 1"):
                await task
            assert bench.core.status().counters["duplicate_tokens"] == 1
            await bench.decode.hear(Cancel)

    run(scenario)


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


def test_a_stop_string_stops_the_worker_and_what_follows_is_not_counted() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"a")
            bench.decode.tokens(ticket, 1, *b"bcd")
            bench.decode.tokens(ticket, 4, *b"e")
            assert (await bench.decode.hear(Stop)).index == 3
            *deltas, complete = await task
            assert deltas == [Delta(0, tuple(b"a"), "a"), Delta(1, tuple(b"bc"), "b")]
            assert isinstance(complete, Complete)
            assert complete.finish_reason is FinishReason.STOP and complete.matched_stop == "c"
            assert complete.usage.completion_tokens == 3
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            assert bench.decode.told.empty() and bench.prefill.told.empty()

    run(scenario)


def test_a_stop_string_in_the_last_item_wins_over_the_length() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(max_tokens=2), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"ac", end=FinishReason.LENGTH)
            complete = (await task)[-1]
            assert isinstance(complete, Complete) and complete.matched_stop == "c"
            assert complete.finish_reason is FinishReason.STOP
            assert bench.decode.told.empty()  # it has ended by itself

    run(scenario)


def test_held_back_text_comes_with_the_last_token() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request(), Shout())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, *b"ab", end=FinishReason.STOP)
            assert (await task)[0] == Delta(0, tuple(b"ab"), "ab!")

    run(scenario)


def test_a_bug_in_the_text_layer_fails_that_request_only() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            bad, good = bench.ask(request("bad"), Shout(fails_at=98)), bench.ask(request("good"))
            tickets = [await bench.decode.opened(), await bench.decode.opened()]
            for ticket in tickets:
                bench.decode.tokens(ticket, 0, *b"ab")
            with pytest.raises(InternalError, match="no such token"):
                await bad
            assert (await bench.decode.hear(Cancel)).ticket_id == tickets[0].id
            bench.decode.tokens(tickets[1], 2, 99, end=FinishReason.STOP)
            assert len(await good) == 3

    run(scenario)


def test_messages_for_nobody_and_from_the_wrong_worker_are_counted() -> None:
    async def scenario() -> None:
        async with Bench() as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.prefill.tokens(ticket, 0, 66)
            await bench.until(lambda: bool(bench.core.status().counters))
            assert bench.core.status().counters["messages_of_unknown_tickets"] == 1
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            assert (await task)[0] == Delta(0, (7,), "")
            bench.decode.done(ticket)
            bench.prefill.done(ticket)
            await bench.gone()
            bench.decode.done(ticket)
            await bench.until(
                lambda: bench.core.status().counters["messages_of_unknown_tickets"] == 2
            )

    run(scenario)


def test_a_leg_that_never_says_done_is_given_up_after_the_lease() -> None:
    async def scenario() -> None:
        async with Bench(timing=TimingConfig(lease_s=0.05)) as bench:
            task = bench.ask(request())
            ticket = await bench.both_opened()
            bench.decode.tokens(ticket, 0, 7, end=FinishReason.STOP)
            await task
            await bench.gone()
            await bench.decode.hear(Cancel)
            await bench.prefill.hear(Cancel)
            assert bench.core.status().counters["legs_never_done"] == 2

    run(scenario)


def test_ten_requests_at_once_spread_over_idle_workers() -> None:
    async def scenario() -> None:
        infos = [worker(f"decode-{i}", Role.DECODE) for i in range(5)]
        infos += [worker(f"prefill-{i}", Role.PREFILL) for i in range(5)]
        async with Bench(*infos) as bench:
            for i in range(10):
                bench.ask(request(f"r{i}"))
            await bench.until(lambda: bench.core.status().running == 10)
            assert {w.in_flight for w in bench.core.status().workers} == {2}

    run(scenario)


def test_closing_fails_what_runs_and_what_waits() -> None:
    async def scenario() -> None:
        infos = (worker(DECODE, Role.DECODE, total_pages=3), worker(PREFILL, Role.PREFILL))
        async with Bench(*infos) as bench:
            tasks = [bench.ask(request("runs"))]
            await bench.both_opened()
            tasks.append(bench.ask(request("waits")))
            await bench.until(lambda: bench.core.status().queued == 1)
            await bench.core.close()
            for task in tasks:
                with pytest.raises(Unavailable, match="shutting down"):
                    await task
            with pytest.raises(Unavailable, match="shutting down"):
                await bench.ask(request("late"))
            assert not bench.core.can_serve()[0]

    run(scenario)


def test_an_unreachable_worker_is_dialled_with_pauses_until_it_answers() -> None:
    async def scenario() -> None:
        async with Bench(worker(DECODE, Role.DECODE)) as bench:

            def refuse(link: FakeWorker) -> None:
                if link.info.worker_id == PREFILL and bench.dialled.qsize() < 2:
                    link.refuse = Unavailable("connection refused")

            await bench.dialled.get()
            bench.before_connect = refuse
            bench.core.set_workers((*bench.infos, worker(PREFILL, Role.PREFILL)))
            await bench.until(lambda: bench.core.can_serve() == (True, ""))
            assert bench.dialled.qsize() == 3

    run(scenario)

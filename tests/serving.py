"""Workers as plain processes and the router's core in the test: shared support for all suites.

This file owns starting and, always, ending them. Everything is a context manager; leaving one
ends what it started, by its own process id, also when the test failed. It must never look at how
a worker or a router does its work: it uses what Tandem itself uses, without Ray.

Life: ``worker_processes(options)`` -> ``RemoteWorker``s that are ready; ``Core`` -> the
dispatcher on a loop of its own; ``serving(folder)`` -> both, connected, and on request the whole
``RouterApp`` with its HTTP and gRPC addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.worker.options import WorkerOptions, worker_options
from protocol.config import TandemConfig
from protocol.errors import BY_REASON, TandemError
from protocol.types import (
    Complete,
    Delta,
    FinishReason,
    KvGeometry,
    ModelInfo,
    Peer,
    Request,
    Role,
    SamplingParams,
    StageTiming,
    WorkerInfo,
)
from protocol.wire.clients import SessionClient
from router.app import RouterApp, RouterEndpoints
from router.dispatcher import Dispatcher
from protocol.wire.loop_thread import LoopThread

ROOT = Path(__file__).resolve().parent.parent
START_S = 90.0
WAIT_S = 30.0
SECRET = "the tests' secret"

# Every clock shorter, in the same proportions; a loaded machine still makes these.
FAST_TIMING = {
    "heartbeat_s": 0.25,
    "peer_dead_s": 2.0,
    "lease_s": 5.0,
    "link_op_s": 2.0,
    "link_abort_s": 2.5,
    "drain_s": 10.0,
}


def wait_until(true: Callable[[], bool], timeout_s: float = WAIT_S, *, what: str = "") -> None:
    """Wait for something that can only be asked for, ten times a second; fail with ``what``."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or true}")
        time.sleep(0.05)


# --- workers -----------------------------------------------------------------------------------


class RemoteWorker:
    """A worker in a process of its own, spoken to over its standard input and output."""

    def __init__(self, options: WorkerOptions, log: Path | None = None) -> None:
        self.options = options
        self._log = log.open("ab") if log is not None else None
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.worker.main", "--options", options.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._info: WorkerInfo | None = None

    @property
    def info(self) -> WorkerInfo:
        """Who it is; waits until it is ready."""
        if self._info is None:
            self._info = info_from_json(self._answer(START_S))
        return self._info

    def report(self) -> dict[str, Any]:
        """``WorkerReport`` as JSON has it."""
        return self._ask({"do": "report"})

    def warm(self, peers: Sequence[Peer]) -> None:
        """Have links to these; raises the worker's error."""
        self._ask({"do": "warm", "peers": [asdict(peer) for peer in peers]})

    def kill(self) -> None:
        """SIGKILL: it is gone at once."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End it in order (no drain); returns the exit code."""
        if self.process.poll() is None:
            self.thaw()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(WAIT_S)
        if self._log is not None:
            self._log.close()
        return self.process.returncode

    def _ask(self, command: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        _ = self.info
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer(WAIT_S)

    def _answer(self, timeout_s: float) -> Any:
        line = self._lines.get(timeout=timeout_s)
        if not line:
            raise AssertionError(
                f"{self.options.worker_id} ended: exit {self.process.wait(WAIT_S)}"
            )
        answer = json.loads(line)
        if "error" in answer:
            error = answer["error"]
            raise BY_REASON[error["reason"]](error["message"])
        return answer["ok"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def info_from_json(values: dict[str, Any]) -> WorkerInfo:
    """The ``WorkerInfo`` that a worker printed."""
    model = values["model"]
    return WorkerInfo(
        **values
        | {
            "role": Role(values["role"]),
            "model": ModelInfo(
                **model
                | {
                    "eos_token_ids": tuple(model["eos_token_ids"]),
                    "geometry": KvGeometry(**model["geometry"]),
                }
            ),
        }
    )


@contextmanager
def worker_processes(
    options: Sequence[WorkerOptions], log: Path | None = None
) -> Iterator[list[RemoteWorker]]:
    """Start all of them at once, wait until all are ready, end all of them. ``log``: a folder."""
    workers: list[RemoteWorker] = []
    try:
        for one in options:
            workers.append(RemoteWorker(one, log / f"{one.worker_id}.log" if log else None))
        for worker in workers:
            _ = worker.info
        yield workers
    finally:
        for worker in workers:
            worker.stop()


# --- the router's core -------------------------------------------------------------------------


@dataclass
class Answer:
    """What one request has brought so far. ``ended`` is set after the last piece."""

    token_ids: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)  # of every delta's first token
    arrivals: list[float] = field(default_factory=list)  # monotonic instants of the deltas
    finish_reason: FinishReason | None = None
    timings: tuple[StageTiming, ...] = ()
    error: TandemError | None = None
    first: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    cancel: Callable[[], None] = lambda: None

    def result(self, timeout_s: float = WAIT_S) -> list[int]:
        """All tokens; raises the request's error."""
        if not self.ended.wait(timeout_s):
            raise AssertionError(f"no end within {timeout_s:g} s, {len(self.token_ids)} tokens")
        if self.error is not None:
            raise self.error
        return self.token_ids


class Core:
    """A dispatcher with real sessions on an event loop of its own. Use it as a context manager."""

    def __init__(
        self,
        config: TandemConfig,
        model: ModelInfo,
        *,
        secret: str = SECRET,
        router_id: str = "router-t",
    ) -> None:
        self._config = config
        self._model = model
        self._secret = secret
        self._router_id = router_id
        self._loop = LoopThread(router_id)

    def __enter__(self) -> Core:
        self._loop.start()
        self.dispatcher = self._loop.call(self._make)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._loop.run(self.dispatcher.close(), WAIT_S)
        finally:
            self._loop.stop()

    def set_workers(self, workers: Sequence[WorkerInfo], *, wait: bool = True) -> None:
        """The worker list; with ``wait`` until every session is up."""
        self._loop.call(self.dispatcher.set_workers, tuple(workers))
        if wait:
            wait_until(
                lambda: all(w.session == "up" for w in self.status().workers),
                what="sessions with all workers",
            )

    def status(self) -> Any:
        """The dispatcher's ``RouterStatus``."""
        return self._loop.call(self.dispatcher.status)

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, deadline_s: float = 60.0, **sampling: Any
    ) -> Answer:
        """Start one request; greedy unless ``sampling`` says otherwise, end tokens ignored."""
        params = SamplingParams(max_tokens, **({"ignore_eos": True} | sampling))
        request = Request(secrets.token_hex(8), tuple(prompt), params, deadline_s=deadline_s)
        answer = Answer()
        future = self._submit(request, answer)
        answer.cancel = future.cancel
        return answer

    def generate(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> list[int]:
        """Run one request to its end; its tokens."""
        return self.submit(prompt, max_tokens, **more).result(60.0)

    def _make(self) -> Dispatcher:
        return Dispatcher(
            self._config,
            self._model,
            router_id=self._router_id,
            session_factory=lambda info: SessionClient(
                info.endpoint, self._router_id, self._secret, timing=self._config.timing
            ),
            clock=time.monotonic,
        )

    def _submit(self, request: Request, answer: Answer) -> Future[None]:
        async def run() -> None:
            try:
                async with contextlib.aclosing(self.dispatcher.generate(request, None)) as pieces:
                    async for piece in pieces:
                        _take(answer, piece)
            except TandemError as error:
                answer.error = error
            finally:
                answer.ended.set()

        return asyncio.run_coroutine_threadsafe(run(), self._loop._loop)


def _take(answer: Answer, piece: Delta | Complete) -> None:
    if isinstance(piece, Complete):
        answer.finish_reason = piece.finish_reason
        answer.timings = piece.timings
        return
    answer.indexes.append(piece.index)
    answer.arrivals.append(time.monotonic())
    answer.token_ids.extend(piece.token_ids)
    answer.first.set()


# --- both --------------------------------------------------------------------------------------


@dataclass
class Serving:
    """A small cluster without Ray."""

    config: TandemConfig
    workers: list[RemoteWorker]
    core: Core
    endpoints: RouterEndpoints | None = None

    def worker(self, role: Role, index: int = 0) -> RemoteWorker:
        """One worker of a pool."""
        return next(w for w in self.workers if w.options.worker_id == f"{role.value}-{index}")

    @property
    def prefill(self) -> RemoteWorker:
        """The first prefill worker."""
        return self.worker(Role.PREFILL)

    @property
    def decode(self) -> RemoteWorker:
        """The first decode worker."""
        return self.worker(Role.DECODE)

    def check_all_returned(self, workers: Sequence[RemoteWorker] | None = None) -> None:
        """Wait until these workers (default: all) are idle; every page is free, nothing leaked."""
        for worker in self.workers if workers is None else workers:
            assert_all_returned(worker)


def assert_all_returned(worker: RemoteWorker) -> None:
    """This worker becomes idle, its page account holds and all its pages are free."""
    name = worker.options.worker_id
    wait_until(lambda: worker.report()["idle"], what=f"{name} idle")
    report = worker.report()
    load = report["load"]
    assert report["integrity"] == "", report
    assert report["healthy"], report
    assert load["free_pages"] == load["total_pages"] == worker.info.total_pages, report


def small_config(folder: Path, **changes: Any) -> TandemConfig:
    """A configuration for tiny models: small pools, short clocks, freed pages poisoned."""
    values: dict[str, Any] = {
        "model": {"path": str(folder)},
        "kv": {"memory": "8MiB", "page_size": 16},
        "pools": {
            "prefill": {
                "max_num_batched_tokens": 128,
                "max_num_seqs": 16,
                "min_prefill_tokens": 16,
            },
            "decode": {"max_num_batched_tokens": 128, "max_num_seqs": 16, "min_prefill_tokens": 16},
        },
        "timing": FAST_TIMING,
        "debug": {"poison_freed_pages": True},
        "router": {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"},
    }
    return TandemConfig.model_validate(_merged(values, changes))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = (
            _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return out


def options_of(config: TandemConfig, *, secret: str = SECRET) -> list[WorkerOptions]:
    """The options of every worker that the configuration asks for."""
    roles = [Role.DECODE] * config.pools.decode.replicas
    if config.mode == "disaggregated":
        roles += [Role.PREFILL] * config.pools.prefill.replicas
    return [
        worker_options(config, role, roles[:i].count(role), secret=secret, sharers=len(roles))
        for i, role in enumerate(roles)
    ]


@contextmanager
def serving(
    config: TandemConfig, *, app: bool = False, warm: bool = True, log: Path | None = None
) -> Iterator[Serving]:
    """The workers of ``config`` as processes, and a core connected to them.

    ``app`` True: a ``RouterApp`` on free ports of loopback as well (``endpoints``). ``warm``:
    links between all prefill and decode workers are made before the first request.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(worker_processes(options_of(config), log))
        infos = tuple(worker.info for worker in workers)
        if warm:
            receivers = [info.peer for info in infos if info.role is Role.DECODE]
            for worker in workers:
                if worker.info.role is Role.PREFILL:
                    worker.warm(receivers)
        core = stack.enter_context(Core(config, infos[0].model))
        core.set_workers(infos)
        cluster = Serving(config, workers, core)
        if app:
            router = RouterApp(
                config,
                router_id="router-0",
                model=infos[0].model,
                secret=SECRET,
                http="127.0.0.1:0",
                grpc="127.0.0.1:0",
            )
            cluster.endpoints = router.start()
            stack.callback(router.stop)
            router.set_workers(infos)
            wait_until(
                lambda: all(w.session == "up" for w in router.status().workers),
                what="the router's sessions",
            )
        yield cluster

"""A small cluster without Ray for every suite: workers as plain processes, a router in the test.

This file owns the configurations that tests share and the context manager that starts and, also
when the test failed, ends everything. It uses what Tandem itself uses, without Ray.

Life: ``serving(small_config(folder))`` -> workers ready and linked, ``core`` connected to them,
and on request a whole ``RouterApp`` with its HTTP and gRPC addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_worker import ROOT, WAIT_S, RemoteWorker, wait_until, worker_processes
from router_core import SECRET, Answer, Core

from cluster.worker.options import WorkerOptions, worker_options
from protocol.config import TandemConfig
from protocol.types import Role
from router.app import RouterApp, RouterEndpoints

__all__ = [
    "ROOT",
    "SECRET",
    "WAIT_S",
    "Answer",
    "Core",
    "RemoteWorker",
    "Serving",
    "assert_all_returned",
    "options_of",
    "serving",
    "small_config",
    "wait_until",
    "worker_processes",
]

# Every clock shorter, in the same proportions; a loaded machine still makes these.
FAST_TIMING = {
    "heartbeat_s": 0.25,
    "peer_dead_s": 2.0,
    "lease_s": 5.0,
    "link_op_s": 2.0,
    "link_abort_s": 2.5,
    "drain_s": 10.0,
}


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

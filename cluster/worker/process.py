"""A whole worker without Ray: the composition root that actors, tests and benchmarks share.

This file owns the life of every part of one worker process (model, pool, role, links, event
loop, engine thread, server) and the order of start and stop. It must never decide anything about
a ticket. One process hosts one worker, because the compute library's thread count is the
process's; tests may host two with the same count.

Life of a ``WorkerProcess``; methods may be called from any thread but its own loop's:
 1. Construct: nothing runs.
 2. ``start``: threads set, model loaded, pool allocated, one step run to warm up, port taken,
    serving. Returns the ``WorkerInfo`` that routers and peers need.
 3. ``warm`` before traffic, ``report`` at any time.
 4. ``stop(drain_s)``: new tickets are refused, running ones end within ``drain_s``; then streams
    end with an honest cause, links close, threads join.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from cluster.worker.clashes import refuse_clashes
from cluster.worker.dialler import GrpcDialler
from cluster.worker.effects import Effects, Routers
from cluster.worker.engine import Engine, load_engine, use_threads
from cluster.worker.engine_thread import EngineThread
from cluster.worker.gateway import Gateway
from cluster.worker.loop import RoleHost
from cluster.worker.options import WorkerOptions
from cluster.worker.outgoing import OutgoingPeers
from cluster.worker.peers import IncomingPeers, route_link_event
from cluster.worker.reports import ProcessCounts, WorkerReport
from cluster.worker.service import WorkerServer
from decode_worker.role import DecodeRole
from kv_transfer.links import Links
from kv_transfer.pages import Pages
from kv_transfer.rendezvous import RendezvousMap
from kv_transfer.transport import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.p2p import P2pTransport
from prefill_worker.role import PrefillRole
from protocol import page_hash
from protocol.agreement import PROTOCOL_VERSION
from protocol.errors import ConfigError, WrongState
from protocol.lifecycle import WORKER_TABLE, WorkerEvent, WorkerState, follow
from protocol.messages import Hello
from protocol.role import RoleOptions, WorkerRole
from protocol.types import Peer, Role, WorkerInfo
from protocol.wire.loop_thread import LoopThread
from protocol.wire.telemetry import Telemetry

_log = logging.getLogger(__name__)

TICK_S = 0.1  # leases and deadlines are looked at this often
JOIN_S = 10.0  # most that stopping waits for a step, links and streams, each


class WorkerProcess:
    """One worker, minus the process.

    ``transport`` replaces the configured one: two workers in one process share a loopback.
    ``engine`` replaces the model: what a worker costs without one can be measured, and tested.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        transport: Transport | None = None,
        engine: Callable[[WorkerOptions], Engine] = load_engine,
    ) -> None:
        self.options = options
        self._load_engine = engine
        self.telemetry = Telemetry()
        self._transport = transport
        self._incarnation = secrets.token_hex(8)
        self._state = WorkerState.STARTING
        self._routers = Routers(self.telemetry)
        self._rendezvous = RendezvousMap()
        self._loop_thread: LoopThread | None = None
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> WorkerInfo:
        """Bring the worker up. Raises ``ConfigError`` with one plain sentence."""
        if self._loop_thread is not None:
            raise WrongState(f"{self.options.worker_id} is started already")
        refuse_clashes()
        use_threads(self.options.threads)
        self._engine = self._load_engine(self.options)
        self._pages = Pages(self._engine.pool.pages, self._engine.pool.geometry.page_size)
        loop_thread = LoopThread(f"{self.options.worker_id} loop")
        loop_thread.start()
        try:
            self._info = loop_thread.run(self._start())
        except BaseException:
            loop_thread.stop()
            self._engine.close()
            raise
        self._loop_thread = loop_thread
        # What is there now stays until the end: no collection need ever look at it again.
        gc.collect()
        gc.freeze()
        # But at the exit modules must be taken down, or Triton's bindings report them as leaked.
        atexit.register(gc.unfreeze)
        self._state = follow(WORKER_TABLE, self._state, WorkerEvent.LOADED)
        return self._info

    def warm(self, peers: Sequence[Peer]) -> None:
        """Have streams and links to these receivers before a request needs them.

        Raises the first failure, after every peer has been tried.
        """
        self._running().run(self._outgoing.warm(peers))

    def report(self) -> WorkerReport:
        """How this worker is; checks the page account when no step is running."""
        self._running()
        integrity = self._host.check_integrity()
        health = self._host.health()
        reason = health.reason or ("" if self._thread.alive else "the engine thread has ended")
        counts = ProcessCounts.now()
        return WorkerReport(
            info=self._info,
            state=self._state,
            healthy=not reason,
            reason=reason,
            idle=self._host.is_idle(),
            load=self._host.load(),
            integrity=integrity,
            links=self._links.threads(),
            peers_out=len(self._outgoing),
            peers_in=len(self._incoming),
            routers=len(self._routers),
            threads=counts.threads,
            fds=counts.fds,
            rss_bytes=counts.rss_bytes,
            compute_threads=self._engine.threads_used,
        )

    def stop(self, drain_s: float = 0.0) -> bool:
        """End the worker; whether everything it ran had ended within ``drain_s``."""
        loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is None:
            return True
        self._state = follow(WORKER_TABLE, self._state, WorkerEvent.DRAIN)
        self._host.drain()
        loop_thread.run(self._server.set_serving(False))
        drained = self._host.wait_idle(drain_s)
        try:
            loop_thread.run(self._stop(), 2 * JOIN_S)
            if not self._links.close_all("this worker is stopping", JOIN_S):
                _log.error("%s: a link's thread does not end", self.options.worker_id)
            self._host.stop()
            if not self._thread.join(JOIN_S):
                _log.error("%s: the running step does not end", self.options.worker_id)
        finally:
            self._engine.close()
            loop_thread.stop()
            self._state = follow(WORKER_TABLE, self._state, WorkerEvent.STOP)
        return drained

    # --- on the worker's loop ------------------------------------------------------------------

    async def _start(self) -> WorkerInfo:
        self._compose(asyncio.get_running_loop())
        host, _, _ = self.options.listen.rpartition(":")
        try:
            self._endpoint = f"{host}:{self._server.bind(self.options.listen)}"
            self._thread = EngineThread(
                self._host,
                self._engine.run,
                name=f"{self.options.worker_id} engine",
                prepare=self._prepare,
            )
            self._thread.start()  # warms up; nothing else runs on this loop yet
            await self._server.start()
        except BaseException:
            self._host.stop()
            await self._server.stop()
            raise
        self._engine.loss.tell(self._host.report_fault)
        self._ticker = asyncio.create_task(self._tick())
        options, engine = self.options, self._engine
        return WorkerInfo(
            worker_id=options.worker_id,
            incarnation=self._incarnation,
            role=options.role,
            endpoint=self._endpoint,
            model=engine.model,
            total_pages=engine.pool.pages,
            max_num_seqs=self._chosen.max_num_seqs,
            max_num_batched_tokens=self._chosen.budget,
            node=options.node or socket.gethostname(),
            pid=os.getpid(),
            threads=options.threads,
            notes=tuple(note for note in (engine.described, self._chosen.note) if note),
        )

    def _prepare(self) -> None:
        """In the engine thread, before its first step: the device, the budget, then the role."""
        self._engine.prepare_thread(self.options.threads)
        self._chosen = self._engine.find_budget(self.options)
        self._host.install(self._role())

    def _compose(self, loop: asyncio.AbstractEventLoop) -> None:
        options, timing, pool = self.options, self.options.timing, self._engine.pool
        poison = options.poison_freed_pages
        self._host = RoleHost(
            worker_id=options.worker_id,
            carry_out=lambda effects: self._effects(effects),
            clock=time.monotonic,
            before_effects=(lambda: pool.poison(self._pages.take_freed())) if poison else None,
        )
        self._links = Links(
            self._transport or self._make_transport(),
            pool,
            generation_of=self._pages.generation,
            on_event=lambda event: route_link_event(
                event, self._host, self._outgoing, self._incoming
            ),
            op_timeout_s=timing.link_op_s,
            on_stuck=self._host.report_fault,
        )
        self._outgoing = OutgoingPeers(
            loop=loop,
            host=self._host,
            links=self._links,
            hello=self._hello,
            dialler=GrpcDialler(options.secret, timing),
            heartbeat_s=timing.heartbeat_s,
            link_over_s=timing.link_op_s + timing.link_abort_s,
        )
        self._incoming = IncomingPeers(
            host=self._host,
            links=self._links,
            rendezvous=self._rendezvous,
            hello=self._hello,
            telemetry=self.telemetry,
        )
        self._effects = Effects(
            routers=self._routers,
            receivers=self._outgoing,
            senders=self._incoming,
            links=self._links,
            telemetry=self.telemetry,
            on_bug=self._host.report_fault,
        )
        gateway = Gateway(
            worker_id=options.worker_id,
            role_host=self._host,
            routers=self._routers,
            outgoing=self._outgoing,
            incoming=self._incoming,
            rendezvous=self._rendezvous,
            hello=lambda: self._hello(0),
            telemetry=self.telemetry,
        )
        self._server = WorkerServer(gateway, secret=options.secret, timing=timing)

    def _role(self) -> WorkerRole:
        me = Peer(self.options.worker_id, self._incarnation, self._endpoint)
        kind = PrefillRole if self.options.role is Role.PREFILL else DecodeRole
        return kind(me, self._pages, self._role_options())

    def _role_options(self) -> RoleOptions:
        options, model = self.options, self._engine.model
        geometry = model.geometry
        return RoleOptions(
            page_bytes=geometry.page_bytes,
            max_num_batched_tokens=self._chosen.budget,
            max_num_seqs=self._chosen.max_num_seqs,
            max_model_len=model.max_model_len,
            min_prefill_tokens=options.min_prefill_tokens,
            chunked_prefill=options.chunked_prefill,
            eos_token_ids=model.eos_token_ids,
            window=options.window,
            lease_s=options.timing.lease_s,
            link_op_s=options.timing.link_op_s,
            heartbeat_s=options.timing.heartbeat_s,
            reserve_tokens=options.reserve_tokens,
            host_pages=self._engine.host_pages,
            hash_root=page_hash.root(model.fingerprint, geometry.dtype, geometry.page_size),
        )

    def _make_transport(self) -> Transport:
        if self.options.transport == "loopback":
            return LoopbackTransport()
        if self.options.transport == "p2p":
            return P2pTransport(
                str(self._engine.pool.device),
                hostname=self.options.interface,
                abort_timeout_s=self.options.timing.link_abort_s,
            )
        raise ConfigError(
            f"no transport is called {self.options.transport!r}", field="kv.transport"
        )

    def _hello(self, link_epoch: int) -> Hello:
        model = self._engine.model
        return Hello(
            worker_id=self.options.worker_id,
            incarnation=self._incarnation,
            endpoint=self._endpoint,
            fingerprint=model.fingerprint,
            geometry=model.geometry,
            wire_dtype=model.geometry.dtype,
            protocol_version=PROTOCOL_VERSION,
            link_epoch=link_epoch,
        )

    async def _tick(self) -> None:
        serving = True
        while True:
            self._host.tick()
            healthy = self._host.health().healthy
            if healthy != serving:
                serving = healthy
                await self._server.set_serving(serving)
            await asyncio.sleep(TICK_S)

    async def _stop(self) -> None:
        await self._server.stop()
        await self._outgoing.close()
        if self._ticker is not None:
            self._ticker.cancel()

    def _running(self) -> LoopThread:
        if self._loop_thread is None:
            raise WrongState(f"{self.options.worker_id} is not running")
        return self._loop_thread

"""The live members of one cluster: their actors, how far each has come, what they said last.

This file owns the bookkeeping between decisions (``reconcile``) and Ray (``placement``): bringing
a member up step by step, watching it for death, asking it how it is. It must never decide that a
member is started, lost or replaced; it marks what it has seen and wakes the controller.

Life of a ``Member``: ``Crew.start`` makes it and its bring-up task -> ready, watched and polled
-> marked lost, by what was seen or by the controller -> ``Crew.start`` again under the same id.
All methods run on the controller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.control.placement import (
    Died,
    Placed,
    Trouble,
    ask,
    bundle,
    end_placed,
    make_router,
    make_worker,
    reserve,
)
from cluster.control.reconcile import Kind, Limits, Phase, Seen, lost, started
from cluster.worker.options import worker_options
from protocol.config import PoolConfig, TandemConfig
from protocol.errors import ConfigError, ErrorInfo, InvalidArgument, PeerMismatch
from protocol.types import ModelInfo, WorkerInfo, WorkerLoad

# A repeat cannot cure these at a worker; a router's used port may be its predecessor's.
_HOPELESS = (ConfigError.reason, InvalidArgument.reason, PeerMismatch.reason)
_STOP_S = 8.0


@dataclass
class Member:
    """One worker or router, this life of it."""

    seen: Seen
    placed: Placed | None = None
    info: WorkerInfo | None = None  # of a ready worker
    load: WorkerLoad = field(default_factory=WorkerLoad)
    http: str = ""  # of a ready router
    grpc: str = ""
    # Incarnations that a prefill worker connects to, and those that it has tried.
    warming_for: frozenset[str] = frozenset()
    warmed: frozenset[str] = frozenset()
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    polling: bool = False

    @property
    def ready(self) -> bool:
        """Whether it serves."""
        return self.seen.phase is Phase.READY


class Crew:
    """All members of one cluster."""

    def __init__(
        self,
        config: TandemConfig,
        secret: str,
        limits: Limits,
        *,
        clock: Callable[[], float],
        wake: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """``wake``: the controller should look again; ``note``: tell the operator."""
        self.members: dict[str, Member] = {}
        self.controller_address = ""
        self._fronts: dict[str, tuple[str, str]] = {}  # router id -> http, grpc of its first life
        self._config = config
        self._secret = secret
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._note = note
        self._model: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()

    # --- what the controller reads -------------------------------------------------------------

    def workers(self, kind: Kind | None = None) -> tuple[WorkerInfo, ...]:
        """The workers that are ready, of one kind or of all."""
        return tuple(
            m.info
            for m in self.members.values()
            if m.ready and m.info is not None and kind in (None, m.seen.kind)
        )

    def routers(self) -> tuple[Member, ...]:
        """The routers that are ready."""
        return tuple(m for m in self.members.values() if m.ready and m.seen.kind is Kind.ROUTER)

    def wants_text(self, kind: Kind) -> str:
        """What a worker of this kind needs from Ray, in words."""
        wants = bundle(getattr(self._config.pools, kind.value).resources)
        return ", ".join(f"{amount:g} {name}" for name, amount in wants.items()) or "a place"

    # --- what the controller does --------------------------------------------------------------

    def start(self, member_id: str, kind: Kind) -> None:
        """Begin a life of this member."""
        before = self.members.get(member_id)
        seen = started(member_id, kind, self._clock(), before.seen if before else None)
        member = self.members[member_id] = Member(seen)
        bring_up = self._start_router if kind is Kind.ROUTER else self._start_worker
        self._run(member, bring_up(member))

    def lose(self, member: Member, reason: str, *, hopeless: bool = False) -> None:
        """Mark it lost, end its process, let go of all that belongs to this life of it."""
        if member.seen.phase is Phase.LOST:
            return
        member.seen = lost(member.seen, reason, self._clock(), self._limits, hopeless=hopeless)
        self._note(f"{member.seen.member_id} lost: {reason}")
        self._let_go(member)
        self._wake()

    def drop(self, member_id: str) -> None:
        """End a member that is not wanted."""
        self._let_go(self.members.pop(member_id))

    def poll(self) -> None:
        """Ask everyone who is ready and not being asked how they are."""
        for member in self.members.values():
            if member.ready and not member.polling:
                member.polling = True
                self._run(member, self._ask(member))

    async def refresh(self, limit_s: float) -> None:
        """Ask everyone who is ready now and wait for the answers, at most so long."""
        asked = [self._run(m, self._ask(m)) for m in self.members.values() if m.ready]
        if asked:
            await asyncio.wait(asked, timeout=limit_s)

    def warm(self, member: Member, receivers: tuple[WorkerInfo, ...]) -> None:
        """Have a prefill worker connect to these receivers."""
        member.warming_for = frozenset(w.incarnation for w in receivers)
        self._run(member, self._warm(member, receivers))

    async def stop_all(self, cause: str) -> tuple[str, ...]:
        """End every member in order, routers first; returns their ids."""
        self._note(f"ending: {cause}")
        routers = self.routers()
        workers = [m for m in self.members.values() if m.ready and m not in routers]
        for group, arguments in ((routers, ()), (workers, (0.0,))):
            stops = [
                asyncio.ensure_future(_quiet(m.placed.actor, "stop", *arguments))
                for m in group
                if m.placed
            ]
            if stops:
                await asyncio.wait(stops, timeout=_STOP_S)
        for member in self.members.values():
            self._let_go(member)
        return tuple(self.members)

    # --- one life ------------------------------------------------------------------------------

    async def _start_worker(self, member: Member) -> None:
        config, kind, member_id = self._config, member.seen.kind, member.seen.member_id
        role = kind.role
        if role is None:
            raise ValueError(f"{member_id} is not a worker")
        pool: PoolConfig = getattr(config.pools, kind.value)
        wants = bundle(pool.resources)
        options = worker_options(
            config,
            role,
            int(member_id.rpartition("-")[2]),
            secret=self._secret,
            sharers=self._sharers(pool),
        )
        group = await reserve(config.name, member_id, wants)
        member.placed = await make_worker(config.name, options, wants, group)
        self._enter(member, Phase.LOADING)
        self._run(member, self._watch(member, member.placed.actor))
        answer = await ask(member.placed.actor, "start")
        if isinstance(answer, ErrorInfo):
            self.lose(member, answer.message, hopeless=answer.reason in _HOPELESS)
            return
        member.info = answer
        if not self._model.done():
            self._model.set_result(answer.model)
        self._enter(member, Phase.READY)

    async def _start_router(self, member: Member) -> None:
        config, member_id = self._config, member.seen.member_id
        member.placed = await make_router(config, member_id, self._secret, self.controller_address)
        self._run(member, self._watch(member, member.placed.actor))
        error = await ask(member.placed.actor, "prepare")
        if error is not None:
            self.lose(member, error.message, hopeless=error.reason in _HOPELESS)
            return
        model = await asyncio.shield(self._model)
        self._enter(member, Phase.LOADING)
        http, grpc = self._fronts.get(member_id, (None, None))
        answer = await ask(member.placed.actor, "start", model, http, grpc)
        if isinstance(answer, ErrorInfo):
            self.lose(member, answer.message)
            return
        member.http, member.grpc = answer.http, answer.grpc
        self._fronts[member_id] = (answer.http, answer.grpc)
        self._enter(member, Phase.READY)

    async def _watch(self, member: Member, actor: Any) -> None:
        """Ends, by an exception, at the moment Ray sees the process die."""
        await ask(actor, "until_end")

    async def _ask(self, member: Member) -> None:
        if member.placed is None:
            return
        try:
            answer = await ask(member.placed.actor, "report")
        finally:
            member.polling = False
        if not member.ready:
            return
        seen = replace(member.seen, heard=self._clock())
        if isinstance(answer, ErrorInfo):
            seen = replace(seen, fault=answer.message)
        elif member.seen.kind is not Kind.ROUTER:
            member.load = answer.load
            fault = answer.reason if not answer.healthy else answer.integrity
            seen = replace(seen, fault=fault)
        member.seen = seen
        if seen.fault:
            self._wake()

    async def _warm(self, member: Member, receivers: tuple[WorkerInfo, ...]) -> None:
        if member.placed is None:
            return
        error = await ask(member.placed.actor, "warm", [w.peer for w in receivers])
        member.warmed = frozenset(w.incarnation for w in receivers)
        if error is not None:  # the first hand-off will try again
            self._note(f"{member.seen.member_id} has no link yet: {error.message}")
        self._wake()

    # --- tasks ---------------------------------------------------------------------------------

    def _run(self, member: Member, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run a task of this life; if the actor dies under it, the member is lost."""

        async def guarded() -> None:
            try:
                await work
            except Died as error:
                doing = "it served" if member.ready else f"{member.seen.phase}"
                self.lose(member, f"its process died while {doing}: {error}")
            except (Trouble, ValueError, RuntimeError) as error:
                self.lose(member, f"{type(error).__name__}: {error}")

        task = asyncio.create_task(guarded())
        member.tasks.add(task)
        task.add_done_callback(member.tasks.discard)
        return task

    def _let_go(self, member: Member) -> None:
        placed, member.placed, member.info = member.placed, None, None
        current = asyncio.current_task()
        for task in member.tasks:
            if task is not current:
                task.cancel()
        if placed is not None:
            end_placed(placed)

    def _enter(self, member: Member, phase: Phase) -> None:
        member.seen = member.seen.now_in(phase, self._clock())
        self._wake()

    def _sharers(self, pool: PoolConfig) -> int:
        """How many workers divide the memory of this worker's device."""
        gpus = pool.resources.num_gpus
        if gpus:
            return max(1, round(1 / gpus))
        pools = self._config.pools
        on_cpu = [
            p.replicas
            for p, used in (
                (pools.prefill, self._config.mode.value == "disaggregated"),
                (pools.decode, True),
            )
            if used and not p.resources.num_gpus
        ]
        return sum(on_cpu)


async def _quiet(actor: Any, method: str, *arguments: Any) -> None:
    """Wait for an actor's answer; that it is dead already is as good."""
    try:
        await ask(actor, method, *arguments)
    except (Died, Trouble):
        return

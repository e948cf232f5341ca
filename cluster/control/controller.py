"""The controller: a detached Ray actor that keeps one cluster as its configuration wants it.

This file owns the loop observe -> reconcile -> act, and what operators are told. It must never
decide about a member by itself (``reconcile`` does) and never touch a request: serving goes on
while the controller is away.

Life of a ``Controller``, all on the actor's event loop:
 1. Constructed by Ray with the configuration and the cluster's secret.
 2. ``start``: Admin is served, the loop runs. Returns Admin's address.
 3. The loop wakes on every news and once per heartbeat: it asks every member how it is, carries
    out what ``reconcile`` says, tells routers who is up and prefill workers whom to connect to.
 4. ``shutdown``: members end, routers first. After an ``Admin.Shutdown`` the actor ends itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.control.admin import AdminServer
from cluster.control.members import Crew, Member
from cluster.control.placement import Died, Trouble, ask
from cluster.control.readiness import Endpoints, Progress, Step, StepState
from cluster.control.reconcile import (
    Kind,
    Limits,
    Lose,
    Phase,
    Plan,
    Stop,
    reconcile,
    wanted_members,
)
from protocol.config import TandemConfig
from protocol.status import ClusterStatus, Note, RouterStatus, WorkerStatus
from protocol.types import Mode, WorkerInfo

_log = logging.getLogger(__name__)

_NOTES_KEPT = 50
_TELL_S = 5.0  # a router that takes longer is told again later
_FRESH_S = 1.0  # a member that takes longer is shown as it last was
_LAST_WORDS_S = 0.5  # the answer to Shutdown, and what routers forward of it, leaves first
_STATES = {
    Phase.PLACING: StepState.PLACING,
    Phase.LOADING: StepState.LOADING,
    Phase.READY: StepState.READY,
    Phase.LOST: StepState.WAITING,
}


class Controller:
    """Keeps one cluster."""

    def __init__(self, config: TandemConfig, secret: str) -> None:
        self._config = config
        self._secret = secret
        self._limits = Limits(start_s=config.timing.start_s)
        self._wanted = wanted_members(config)
        self._born = time.monotonic()
        self._notes: deque[tuple[float, str]] = deque(maxlen=_NOTES_KEPT)
        self._plan = Plan(())
        self._told: dict[str, tuple[WorkerInfo, ...]] = {}  # router id -> its list
        self._loop_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[tuple[str, ...]] | None = None

    async def start(self) -> str:
        """Begin to keep the cluster; returns the address of Admin."""
        self._news = asyncio.Event()
        self._crew = Crew(
            self._config,
            self._secret,
            self._limits,
            clock=time.monotonic,
            wake=self._news.set,
            note=self._note,
        )
        self._admin = AdminServer(
            self._secret,
            self._config.timing,
            status=self.status,
            shutdown=self._shutdown_and_exit,
        )
        interface = self._config.kv.interface
        host = "127.0.0.1" if interface == "auto" else interface
        self._crew.controller_address = await self._admin.start(host)
        self._loop_task = asyncio.create_task(self._run())
        return self._crew.controller_address

    async def progress(self) -> Progress:
        """How far everything that is wanted has come."""
        steps = [self._step(w.member_id) for w in self._wanted]
        if self._config.mode is Mode.DISAGGREGATED:
            steps.insert(-1, self._links_step())
        return Progress(tuple(steps))

    async def endpoints(self) -> Endpoints:
        """Where the cluster answers; meaningful once everything is ready."""
        router = next(iter(self._crew.routers()), None)
        return Endpoints(
            cluster=self._config.name,
            mode=self._config.mode,
            model=self._model_name(),
            http=router.http if router else "",
            grpc=router.grpc if router else "",
            secret=self._secret,
            workers=self._crew.workers(),
        )

    async def status(self) -> ClusterStatus:
        """What ``tandem status`` shows, as fresh as the members answer."""
        await self._crew.refresh(_FRESH_S)
        return self._status()

    async def shutdown(self, cause: str) -> tuple[str, ...]:
        """End every member; returns their ids. The caller ends this actor."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._shutdown(cause))
        return await asyncio.shield(self._ending)

    # --- the loop ------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._ending is None:
            self._news.clear()
            try:
                self._crew.poll()
                self._act()
                await self._tell_routers()
                self._tell_senders()
            except RayError as error:  # of Ray itself: members are unaffected, try again
                _log.warning("the controller's round failed: %s", error)
            try:
                async with asyncio.timeout(self._config.timing.heartbeat_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _act(self) -> None:
        members = self._crew.members
        seen = [m.seen for m in members.values()]
        self._plan = reconcile(self._wanted, seen, time.monotonic(), self._limits)
        for action in self._plan.actions:
            _log.info("%s", action)
            if isinstance(action, Lose):
                self._crew.lose(members[action.member_id], action.reason)
            elif isinstance(action, Stop):
                self._crew.drop(action.member_id)
            else:
                self._crew.start(action.member_id, action.kind)

    async def _tell_routers(self) -> None:
        workers = self._crew.workers()
        stale = [
            m for m in self._crew.routers() if self._told.get(_life(m)) != workers and m.placed
        ]
        for router in stale:
            if router.placed is None:
                continue
            try:
                async with asyncio.timeout(_TELL_S):
                    await ask(router.placed.actor, "set_workers", workers)
            except (Died, Trouble, TimeoutError) as error:
                _log.warning("%s was not told: %s", router.seen.member_id, error)
                continue
            self._told[_life(router)] = workers

    def _tell_senders(self) -> None:
        receivers = self._crew.workers(Kind.DECODE)
        incarnations = frozenset(w.incarnation for w in receivers)
        for member in self._crew.members.values():
            sends = member.ready and member.seen.kind is Kind.PREFILL
            if sends and receivers and member.warming_for != incarnations:
                self._crew.warm(member, receivers)

    # --- what operators are told ---------------------------------------------------------------

    def _step(self, member_id: str) -> Step:
        member = self._crew.members.get(member_id)
        if member is None:
            return Step(member_id, StepState.WAITING)
        now, seen = time.monotonic(), member.seen
        if member_id in self._plan.given_up:
            return Step(member_id, StepState.FAILED, self._plan.given_up[member_id])
        end = seen.since if member.ready else now
        state = _STATES[seen.phase]
        detail = self._plan.waiting.get(member_id, "") if seen.phase is Phase.LOST else ""
        if seen.phase is Phase.PLACING:
            detail = "waiting for a worker to tell the model"
            if seen.kind.role:
                detail = f"waiting for {self._crew.wants_text(seen.kind)}"
        return Step(member_id, state, detail, end - seen.began)

    def _links_step(self) -> Step:
        senders = [m for m in self._crew.members.values() if m.seen.kind is Kind.PREFILL]
        receivers = frozenset(w.incarnation for w in self._crew.workers(Kind.DECODE))
        wanted = sum(w.kind is Kind.DECODE for w in self._wanted)
        if not senders or len(receivers) < wanted or not all(m.ready for m in senders):
            return Step("links", StepState.WAITING, "for both pools")
        warm = all(m.warmed == receivers for m in senders)
        return Step("links", StepState.READY if warm else StepState.WARMING)

    def _status(self) -> ClusterStatus:
        now = time.monotonic()
        members = self._crew.members.values()
        return ClusterStatus(
            cluster=self._config.name,
            mode=self._config.mode,
            model=self._model_name(),
            uptime_s=now - self._born,
            workers=tuple(self._worker_status(m) for m in members if m.seen.kind.role),
            routers=tuple(
                RouterStatus(m.seen.member_id, self._state_of(m), m.http, m.grpc)
                for m in members
                if m.seen.kind is Kind.ROUTER
            ),
            notes=tuple(Note(now - at, text) for at, text in self._notes),
        )

    def _worker_status(self, member: Member) -> WorkerStatus:
        role, info = member.seen.kind.role, member.info
        if role is None:
            raise ValueError(f"{member.seen.member_id} is not a worker")
        return WorkerStatus(
            worker_id=member.seen.member_id,
            incarnation=info.incarnation if info else "",
            role=role,
            state=self._state_of(member),
            endpoint=info.endpoint if info else "",
            node=info.node if info else "",
            pid=info.pid if info else 0,
            threads=info.threads if info else 0,
            load=member.load,
        )

    def _state_of(self, member: Member) -> str:
        given_up = member.seen.member_id in self._plan.given_up
        return "failed" if given_up else member.seen.phase.value

    def _model_name(self) -> str:
        model = self._config.model
        return model.served_name or model.path.rstrip("/").rpartition("/")[2]

    def _note(self, text: str) -> None:
        _log.warning("%s", text)
        self._notes.append((time.monotonic(), text))

    # --- the end -------------------------------------------------------------------------------

    async def _shutdown(self, cause: str) -> tuple[str, ...]:
        self._news.set()
        if self._loop_task is not None:
            await self._loop_task
        return await self._crew.stop_all(cause)

    def _shutdown_and_exit(self, cause: str) -> None:
        self._exit_task = asyncio.create_task(self._exit(cause))

    async def _exit(self, cause: str) -> None:
        await asyncio.sleep(_LAST_WORDS_S)
        await self.shutdown(cause)
        await self._admin.stop()
        me: Any = ray.get_runtime_context().current_actor
        ray.kill(me, no_restart=True)


def _life(member: Member) -> str:
    """One life of a router; its successor under the same id knows no workers yet."""
    return f"{member.seen.member_id}@{member.seen.began}"

"""Brings a whole cluster up and ends it again: what ``serve``, ``demo`` and ``bench`` share.

This file owns the order of a start (checks, record, Ray, controller, members) and of an end. It
must never print (progress goes to a callback) and never leave anything behind that it started,
however the start fails.

Life of a ``ClusterHandle``::

    with ClusterHandle(keep_ray=True) as cluster:      # keep_ray: for one arm after the other
        endpoints = cluster.start(config, on_progress) # raises TandemError, all ended
        ...
        cluster.stop()                                 # the cluster's actors; Ray stays
        endpoints = cluster.start(other_config)
    # leaving the block ends cluster and Ray, whatever happened inside
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from cluster.control import checks, records
from cluster.control.processes import identify
from cluster.control.ray_session import RaySession, end_ray
from cluster.control.readiness import Endpoints, Progress, Step, StepState
from cluster.control.reconcile import wanted_members
from cluster.control.records import ClusterRecord, RayRecord
from protocol.config import TandemConfig
from protocol.errors import ConfigError, TandemError, Unavailable, WrongState
from protocol.status import ClusterStatus

OnProgress = Callable[[Progress], None]
OnFailure = Callable[[BaseException], None]

_CONTROLLER_S = 60.0  # until the controller's process answers
_ASK_S = 10.0
_STOP_S = 20.0
_POLL_S = 0.2


class ClusterHandle:
    """One cluster at a time, started and ended by this process. Use from its main thread."""

    def __init__(self, *, keep_ray: bool = False) -> None:
        """``keep_ray``: ``stop`` leaves Ray running for the next ``start``; ``close`` ends it."""
        self._keep_ray = keep_ray
        self._session: RaySession | None = None
        self._offers = 0  # CPUs that the running Ray was told it has
        self._controller: Any = None
        self._record: ClusterRecord | None = None
        self._ray_record: RayRecord | None = None  # known before Ray runs
        self._on_progress: OnProgress = _ignore
        self._ray_step = Step("ray", StepState.WAITING)
        self.warnings: tuple[str, ...] = ()

    def start(
        self,
        config: TandemConfig,
        on_progress: OnProgress | None = None,
        on_failure: OnFailure | None = None,
    ) -> Endpoints:
        """Start everything and wait until it serves. Blocks; ``on_progress`` is called from here.

        ``on_failure`` hears what went wrong once there is something to end, before it is ended.

        Raises ``ConfigError`` for what the user must change (port used, model missing, name in
        use), ``Unavailable`` when something did not come up; whatever was started has ended then.
        """
        if self._record is not None:
            raise WrongState("this handle has a cluster already: stop it first")
        self._on_progress = on_progress or _ignore
        config = checks.with_real_paths(config)
        # The name first: a second start of the same file would trip over the ports of the first.
        old = self._refuse_second(config.name)
        checks.check_start(config)
        self.warnings = checks.warnings(config)
        self._claim(config.name, old)
        try:
            self._open_ray(config)
            endpoints = self._bring_up(config)
        except BaseException as error:
            if on_failure is not None:
                on_failure(error)
            self.close()
            raise
        self._save(http=endpoints.http, grpc=endpoints.grpc)
        return endpoints

    def stop(self, cause: str = "asked to stop") -> tuple[str, ...]:
        """End the cluster; says what it ended. May be called twice."""
        ended: tuple[str, ...] = ()
        record = self._record  # kept until all has ended: ``force`` may come in between
        if self._session is not None and record is not None:
            ended = self._end_members(record.name, cause)
        if not self._keep_ray and self._end_ray():
            ended = (*ended, "Ray")
        if record is not None:
            records.forget(record.name)
        self._record = None
        return ended

    def close(self) -> None:
        """``stop``, and end the Ray that this handle started."""
        try:
            self.stop()
        finally:
            self._end_ray()

    @property
    def serving(self) -> bool:
        """Whether a start has come to its end and no stop has."""
        return self._record is not None and bool(self._record.http)

    def detach(self) -> None:
        """Let go of the running cluster: it goes on without this process."""
        self._save(owner=None)
        session, self._session = self._session, None
        self._record = self._ray_record = self._controller = None
        if session is not None:
            session.leave()

    def force(self) -> None:
        """End the processes at once, in no order; for a user who has asked twice.

        On a Ray that is not ours the actors are left: the record stays, for ``tandem down``.
        """
        ray = self._ray_record
        if ray is not None:
            end_ray(ray, grace_s=0.0)
        if self._record is not None and (ray is None or ray.owned):
            records.forget(self._record.name)

    def status(self) -> ClusterStatus:
        """What the controller sees. Raises ``Unavailable`` when it does not answer."""
        if self._controller is None:
            raise WrongState("no cluster runs here")
        status: ClusterStatus = self._ask("status", _ASK_S)
        return status

    @property
    def ray_alive(self) -> bool:
        """False once the Ray under a running cluster has died; only ``force`` works then."""
        return self._session is None or self._session.alive

    def was_shut_down(self) -> bool:
        """Whether somebody else asked the cluster to end (``Admin.Shutdown``), and it has."""
        from cluster.control import placement

        return self._record is not None and not placement.actors_of(self._record.name)

    def __enter__(self) -> ClusterHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- start ---------------------------------------------------------------------------------

    def _refuse_second(self, name: str) -> ClusterRecord | None:
        """What is left of an earlier cluster of this name. Raises when that still runs."""
        old = records.load(name)
        if old is not None and (old.owner_alive or old.ray_alive):
            where = f" (http://{old.http})" if old.http else ""
            raise ConfigError(
                f"name: a cluster named {name!r} runs already{where}; "
                f"`tandem down --name {name}` ends it, or set another name",
                field="name",
            )
        return old

    def _claim(self, name: str, old: ClusterRecord | None) -> None:
        """Take the cluster's name on this machine, cleaning up after a crash."""
        if old is not None and old.ray is not None:
            end_ray(old.ray)
        self._record = ClusterRecord(name, secrets.token_hex(32), owner=identify(os.getpid()))
        records.save(self._record)

    def _open_ray(self, config: TandemConfig) -> None:
        began = time.monotonic()
        cpus = checks.cpus_to_offer(config)
        if self._session is not None and self._offers < cpus:
            self._end_ray()
        if self._session is None:
            self._show_ray(config, StepState.LOADING, "")
            self._session = RaySession.open(config.ray.address, cpus, self._take_ray_record)
            self._offers = cpus if config.ray.address == "local" else 1 << 30
        elif self._ray_record is not None:
            self._save(ray=self._ray_record)
        self._ray_step = Step("ray", StepState.READY, seconds=time.monotonic() - began)
        self.warnings += self._session.warnings()

    def _bring_up(self, config: TandemConfig) -> Endpoints:
        from cluster.control import placement
        from cluster.control.controller import Controller

        record = self._record
        if record is None:
            raise WrongState("the cluster's name is not taken")
        if placement.controller_exists(config.name):
            raise ConfigError(
                f"name: a cluster named {config.name!r} runs on this Ray already; "
                f"`tandem down CONFIG` ends it, or set another name",
                field="name",
            )
        if config.ray.address == "local":
            checks.check_offer(config, placement.offered())
        self._show(config, StepState.LOADING)
        self._controller = placement.make_controller(Controller, config, record.secret)
        self._save(admin=self._ask("start", _CONTROLLER_S))
        while True:
            progress: Progress = self._ask("progress", _ASK_S)
            steps = (self._ray_step, Step("controller", StepState.READY), *progress.steps)
            self._on_progress(Progress(steps))
            failed = [s for s in steps if s.state is StepState.FAILED]
            if failed:
                cause = " ".join(failed[0].detail.split())  # one sentence, whatever it was
                raise Unavailable(f"{failed[0].name} did not start: {cause}")
            if progress.ready:
                endpoints: Endpoints = self._ask("endpoints", _ASK_S)
                return endpoints
            time.sleep(_POLL_S)

    def _ask(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        from cluster.control import placement

        try:
            return placement.call(self._controller, method, timeout_s, *arguments)
        except (TimeoutError, ConnectionError) as error:
            raise Unavailable(f"the controller does not answer: {error}") from None

    # --- end -----------------------------------------------------------------------------------

    def _end_members(self, name: str, cause: str) -> tuple[str, ...]:
        from cluster.control import placement

        ended: tuple[str, ...] = ()
        if self._controller is not None:
            try:
                ended = self._ask("shutdown", _STOP_S, cause)
            except TandemError:  # then not in order, but by name
                ended = ()
            self._controller = None
        leftovers = placement.end_cluster(name)
        return ended or leftovers

    def _end_ray(self) -> bool:
        session, self._session = self._session, None
        if session is not None:
            session.leave()
        ended = self._ray_record is not None and end_ray(self._ray_record) > 0
        self._ray_record = None
        return ended

    # --- records and progress ------------------------------------------------------------------

    def _take_ray_record(self, record: RayRecord) -> None:
        self._ray_record = record
        self._save(ray=record)

    def _save(self, **changes: Any) -> None:
        if self._record is not None:
            self._record = replace(self._record, **changes)
            records.save(self._record)

    def _show_ray(self, config: TandemConfig, state: StepState, detail: str) -> None:
        self._ray_step = Step("ray", state, detail)
        self._show(config, StepState.WAITING)

    def _show(self, config: TandemConfig, controller: StepState) -> None:
        members = (Step(w.member_id, StepState.WAITING) for w in wanted_members(config))
        steps = (self._ray_step, Step("controller", controller), *members)
        self._on_progress(Progress(steps))


def _ignore(progress: Progress) -> None:
    """For callers who do not look."""

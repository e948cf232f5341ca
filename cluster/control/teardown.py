"""Ends a cluster from outside the process that started it, in order or after a crash.

This file owns what ``tandem down`` does. It must never end anything but what the cluster's record
names: the process in front of it, its actors and placement groups, the Ray that was started for
it. Idempotent: a second call finds nothing and says so.

Order: ask the ``tandem serve`` in front of it, if it lives, which ends everything in order; else
ask the controller to shut down; then remove by name and by process id whatever is left.
"""

from __future__ import annotations

import time

from cluster.control import records
from cluster.control.processes import end
from cluster.control.ray_session import connect, end_ray, family
from cluster.control.records import ClusterRecord
from protocol.errors import TandemError
from protocol.wire.clients import AdminClient

_OWNER_S = 40.0
_SHUTDOWN_S = 20.0
_ASK_S = 5.0
_POLL_S = 0.2


def take_down(record: ClusterRecord) -> tuple[str, ...]:
    """End everything of this cluster; says what, one phrase each."""
    ended: list[str] = []
    if record.owner is not None and record.owner_alive:
        end([record.owner], _OWNER_S)
        ended.append(f"tandem serve (process {record.owner.pid})")
    elif _shut_down(record):
        ended.append("workers and routers, in order")
    if record.ray is not None and record.ray.owned:
        n = end_ray(record.ray)
        if n:
            ended.append(f"Ray ({n} processes)")
    elif record.ray is not None:
        ended.extend(_end_actors(record))
    records.forget(record.name)
    return tuple(ended)


def _shut_down(record: ClusterRecord) -> bool:
    """Ask the controller to end the cluster and wait until it has."""
    if not record.admin or not _may_run(record):
        return False
    client = AdminClient(record.admin, record.secret, call_s=_ASK_S)
    try:
        client.shutdown("tandem down")
        until = time.monotonic() + _SHUTDOWN_S
        while time.monotonic() < until:
            time.sleep(_POLL_S)
            client.status()
    except TandemError:  # it is gone: done, or there was nothing to ask
        return True
    finally:
        client.close()
    return False


def _may_run(record: ClusterRecord) -> bool:
    ray = record.ray
    if ray is None:
        return False
    return not ray.owned or bool(family(ray).members())


def _end_actors(record: ClusterRecord) -> tuple[str, ...]:
    if record.ray is None:
        return ()
    from cluster.control.placement import end_cluster

    session = connect(record.ray)
    try:
        return end_cluster(record.name)
    finally:
        session.leave()

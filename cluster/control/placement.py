"""Where the actors of a cluster live in Ray: names, placement groups, making and removing them.

This file owns the naming ``<cluster>/<kind>/<id>`` in Ray namespace ``tandem`` and the promise
that exactly the actors and placement groups of one cluster are removed, never another's. Actors
and groups are detached: they outlive whoever made them. It must never decide that one is made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from cluster.control import router_actor
from cluster.control.ray_session import NAMESPACE
from cluster.control.router_actor import RouterActor
from cluster.worker import actor as worker_actor
from cluster.worker.actor import WorkerActor
from cluster.worker.options import WorkerOptions
from protocol.config import ResourceConfig, TandemConfig

CONTROLLER, WORKER, ROUTER = "controller", "worker", "router"
_ASK_S = 1.0
_NAME_FREE_S = 10.0  # after a kill, until Ray gives the name away again
_NAME_POLL_S = 0.1


class Died(Exception):
    """The process of an actor is gone; the text says how."""


class Trouble(Exception):
    """Ray could not carry a call, or the call raised; the text says why."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An actor that was made, and the placement group that holds its resources."""

    actor: Any
    group: PlacementGroup | None = None


def actor_name(cluster: str, kind: str, member_id: str) -> str:
    """The name of an actor, and of its placement group."""
    return f"{cluster}/{kind}/{member_id}"


def bundle(resources: ResourceConfig) -> dict[str, float]:
    """What Ray reserves for one worker; resources of zero are left out."""
    wants = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
    return {name: amount for name, amount in wants.items() if amount > 0}


async def reserve(cluster: str, worker_id: str, wants: Mapping[str, float]) -> Any:
    """A placement group for a worker, once it has its resources; None when it wants none.

    Waits for as long as it takes: the caller ends the wait by cancelling it.
    """
    if not wants:
        return None
    group = placement_group(
        [dict(wants)],
        strategy="STRICT_PACK",
        name=actor_name(cluster, WORKER, worker_id),
        lifetime="detached",
    )
    try:
        while not await asyncio.to_thread(group.wait, _ASK_S):
            continue
    except BaseException:
        remove_placement_group(group)
        raise
    return group


async def make_worker(
    cluster: str, options: WorkerOptions, wants: Mapping[str, float], group: Any
) -> Placed:
    """The actor of one worker, inside its placement group."""
    others = {k: v for k, v in wants.items() if k not in ("CPU", "GPU")}
    settings: dict[str, Any] = {
        "num_cpus": wants.get("CPU", 0),
        "num_gpus": wants.get("GPU", 0),
        "resources": others,
        "max_concurrency": worker_actor.CALLS_AT_ONCE,
    }
    if group is not None:
        settings["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0
        )
    name = actor_name(cluster, WORKER, options.worker_id)
    return Placed(await _make(WorkerActor, name, settings, options), group)


async def make_router(config: TandemConfig, router_id: str, secret: str, controller: str) -> Placed:
    """The actor of one router, on the node of the caller."""
    settings = {**_on_this_node(), "max_concurrency": router_actor.CALLS_AT_ONCE}
    name = actor_name(config.name, ROUTER, router_id)
    return Placed(await _make(RouterActor, name, settings, config, router_id, secret, controller))


def make_controller(kind: type, config: TandemConfig, secret: str) -> Any:
    """The controller's actor, on the node of the caller. ``kind`` is its class."""
    settings = _settings(actor_name(config.name, CONTROLLER, "0")) | _on_this_node()
    return ray.remote(kind).options(**settings).remote(config, secret)


def controller_exists(cluster: str) -> bool:
    """Whether a cluster of this name runs on the Ray that this process has joined."""
    try:
        ray.get_actor(actor_name(cluster, CONTROLLER, "0"), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def end_placed(placed: Placed) -> None:
    """Kill an actor and give its resources back. May be called twice."""
    ray.kill(placed.actor, no_restart=True)
    if placed.group is not None:
        remove_placement_group(placed.group)


def actors_of(cluster: str) -> tuple[str, ...]:
    """The names of all actors of this cluster that live."""
    return tuple(
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(f"{cluster}/")
    )


def end_cluster(cluster: str) -> tuple[str, ...]:
    """Kill every actor and remove every placement group of this cluster; their names."""
    ended = []
    for name in actors_of(cluster):
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except ValueError:  # ended by itself since we listed it
            continue
        ended.append(name)
    for group in placement_group_table().values():
        if group["name"].startswith(f"{cluster}/") and group["state"] != "REMOVED":
            remove_placement_group(ray.util.get_placement_group(group["name"]))
    return tuple(ended)


async def ask(actor: Any, method: str, *arguments: Any) -> Any:
    """Call an actor from the controller's event loop. Raises ``Died`` or ``Trouble``."""
    try:
        return await getattr(actor, method).remote(*arguments)
    except RayActorError as error:
        raise Died(_cause_of_death(error)) from error
    except RayError as error:
        raise Trouble(_first_line(error)) from error


def call(actor: Any, method: str, timeout_s: float, *arguments: Any) -> Any:
    """Call an actor from the command line's process and wait for the answer.

    Raises ``TimeoutError``, or ``ConnectionError`` when the actor is gone or the call raised.
    """
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError(f"{method}: no answer within {timeout_s:.0f} s") from None
    except RayActorError as e:
        raise ConnectionError(f"{method}: {_cause_of_death(e)}") from None
    except RayError as e:
        raise ConnectionError(f"{method}: {_first_line(e)}") from None


def kill(actor: Any) -> None:
    """Kill an actor at once."""
    ray.kill(actor, no_restart=True)


def offered() -> dict[str, float]:
    """What the whole Ray cluster has of every resource."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _settings(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def _on_this_node() -> dict[str, Any]:
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


async def _make(kind: type, name: str, settings: dict[str, Any], *arguments: Any) -> Any:
    until = asyncio.get_running_loop().time() + _NAME_FREE_S
    while True:
        try:
            return ray.remote(kind).options(**_settings(name) | settings).remote(*arguments)
        except ValueError:  # the name is still that of an actor that is being killed
            if asyncio.get_running_loop().time() > until:
                raise
            await asyncio.sleep(_NAME_POLL_S)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cause_of_death(error: RayActorError) -> str:
    """The part of Ray's long message that says why, without its list of guesses."""
    found = re.search(r"Worker exit detail: (.*?)(?: There are some potential|$)", str(error), re.M)
    return found[1].strip() if found else _first_line(error)

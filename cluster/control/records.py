"""What this machine remembers about a cluster between two commands: one small file per name.

This file owns the folder ``$XDG_STATE_HOME/tandem`` (default ``~/.local/state/tandem``), the
record that ``tandem serve`` leaves there and ``tandem status`` and ``tandem down`` read, and the
token of the Rays that we start. It must never decide whether a cluster is to be ended.

Life of a record: ``save`` by the process that starts the cluster, before it starts anything;
again whenever something new is known; ``forget`` when everything has ended. A record that
outlives its processes is what ``tandem down`` cleans up after a crash.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.control.processes import ProcessId, alive
from protocol.errors import ConfigError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RayRecord:
    """The Ray that a cluster runs on. ``owned``: we started it and have to end it."""

    address: str
    owned: bool
    mark: str = ""  # value of MARK in the environment of all its processes
    folder: str = ""  # its temporary folder
    processes: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """One cluster of this user. Addresses are empty until it serves."""

    name: str
    secret: str
    owner: ProcessId | None = None  # the ``tandem serve`` in front of it; None once detached
    ray: RayRecord | None = None
    http: str = ""
    grpc: str = ""
    admin: str = ""  # of the controller itself

    @property
    def owner_alive(self) -> bool:
        """Whether the process that started it still watches over it."""
        return self.owner is not None and alive(self.owner)

    @property
    def ray_alive(self) -> bool:
        """Whether a Ray of ours still runs; False for one that we only joined."""
        return self.ray is not None and any(alive(p) for p in self.ray.processes)


def state_folder() -> Path:
    """Where records live; made when missing, for this user's eyes only."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(base) / "tandem"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"the state folder {folder} cannot be made: {e.strerror}") from None
    return folder


def ray_token_file() -> Path:
    """The token that every Ray of ours asks for; drawn once per user."""
    file = state_folder() / "ray_token"
    if not file.exists():
        _write(file, secrets.token_hex(32))
    return file


def save(record: ClusterRecord) -> None:
    """Write the record, whole or not at all."""
    content = {"version": _VERSION, **asdict(record)}
    _write(_file(record.name), json.dumps(content, indent=1))


def load(name: str) -> ClusterRecord | None:
    """The record of that cluster, if there is one."""
    return _read(_file(name))


def load_all() -> tuple[ClusterRecord, ...]:
    """All records of this user."""
    found = (_read(file) for file in sorted(state_folder().glob("*.json")))
    return tuple(record for record in found if record is not None)


def forget(name: str) -> None:
    """Remove the record; no matter if there is none."""
    _file(name).unlink(missing_ok=True)


def _file(name: str) -> Path:
    return state_folder() / f"{name}.json"


def _write(file: Path, text: str) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    draft.replace(file)


def _read(file: Path) -> ClusterRecord | None:
    try:
        text = file.read_text()
    except FileNotFoundError:
        return None
    try:
        content = json.loads(text)
        if content.pop("version") != _VERSION:
            raise ValueError("another version")
        owner, ray = content.pop("owner"), content.pop("ray")
        return ClusterRecord(
            **content, owner=ProcessId(**owner) if owner else None, ray=_ray(ray) if ray else None
        )
    except (ValueError, TypeError, KeyError) as e:
        raise ConfigError(f"{file} is not a record of this version of tandem: {e}") from None


def _ray(content: Mapping[str, Any]) -> RayRecord:
    processes = tuple(ProcessId(**p) for p in content["processes"])
    return RayRecord(**{**content, "processes": processes})

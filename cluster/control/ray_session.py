"""Ray: started as a daemon of our own, or joined, and ended by its recorded processes.

This file owns how Ray is started (own ports, own folder, small object store, a token that every
call must carry) and how it is ended. It must never run ``ray stop``, which ends every Ray on the
machine, and never touch a Ray that it did not start.

Ray started by ``ray.init`` would die with the process that called it; a daemon lives on, so a
cluster survives ``tandem serve --detach``, and a crash of ``tandem serve`` as well.

Life of a ``RaySession``:
 1. ``open``: starts the daemon (``address: local``) or joins; the caller records ``record``.
 2. ``leave``: this process lets go of Ray, which runs on.
 3. ``end_ray(record)``, by anybody who has the record: the daemon's processes end, its folder is
    removed. Agents and actors come and go, so the record alone does not name them: they are the
    family of the recorded ones.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.control.processes import (
    Family,
    alive,
    can_identify,
    command_name,
    end_family,
)
from cluster.control.records import RayRecord, ray_token_file
from protocol.errors import ConfigError, Unavailable

NAMESPACE = "tandem"
MARK = "TANDEM_RAY_SESSION"
_NODE_IP = "127.0.0.2"  # loopback; Ray swaps 127.0.0.1 for an outside address
_OBJECT_STORE_BYTES = 100_000_000  # of no use to Tandem; Ray wants one
_VITAL = ("gcs_server", "raylet")
_START_S = 60.0
_END_S = 1.0  # Ray's head waits for a while before it obeys; nothing in it is worth waiting for


class RaySession:
    """This process's connection to one Ray."""

    def __init__(self, record: RayRecord) -> None:
        self.record = record
        self._vital = tuple(p for p in record.processes if command_name(p) in _VITAL)

    @property
    def alive(self) -> bool:
        """False once a Ray of ours has lost a process that it cannot live without."""
        return all(alive(p) for p in self._vital)

    @classmethod
    def open(
        cls, address: str, num_cpus: int, on_started: Callable[[RayRecord], None]
    ) -> RaySession:
        """Start (``local``) or join Ray and connect this process to it.

        ``num_cpus`` is what a Ray of ours offers. ``on_started`` gets a record before anything
        runs and again when more is known, so that a crash in between leaves nothing unknown.
        Raises ``ConfigError`` or ``Unavailable`` with a sentence; nothing runs then.
        """
        if address != "local":
            _choose_trust(address)
            record = RayRecord(address=address, owned=False)
            _connect(address)
            on_started(record)
            return cls(record)
        record = _start_daemon(num_cpus, on_started)
        try:
            os.environ.update(_trust())
            _connect(record.address)
        except BaseException:
            end_ray(record)
            raise
        return cls(record)

    def warnings(self) -> tuple[str, ...]:
        """What an operator should know about this Ray."""
        if self.record.owned or os.environ.get("RAY_AUTH_MODE") == "token":
            return ()
        return (
            f"the Ray at {self.record.address} asks for no token: whoever reaches its ports "
            "can run programs there",
        )

    def leave(self) -> None:
        """Disconnect this process. Ray and everything in it runs on."""
        import ray

        ray.shutdown()


def connect(record: RayRecord) -> RaySession:
    """Connect this process to a Ray that somebody else started or joined."""
    if record.owned:
        os.environ.update(_trust())
    else:
        _choose_trust(record.address)
    _connect(record.address)
    return RaySession(record)


def family(record: RayRecord) -> Family:
    """All processes of a Ray of ours: daemons, agents, actors and whatever these started."""
    mark = f"{MARK}={record.mark}" if record.mark else ""
    return Family(mark, record.folder, frozenset(record.processes))


def end_ray(record: RayRecord, grace_s: float = _END_S) -> int:
    """End a Ray of ours and remove its folder; how many processes that were. Idempotent."""
    if not record.owned:
        return 0
    ended = end_family(family(record), grace_s)
    if record.folder:
        shutil.rmtree(record.folder, ignore_errors=True)
    return len(ended)


def _trust() -> dict[str, str]:
    """What makes a Ray process of ours ask for, and send, the user's token."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray_token_file())}


def _choose_trust(address: str) -> None:
    """Say explicitly whether a joined Ray is expected to ask for a token."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    if address.startswith(f"{_NODE_IP}:"):  # started by another command of this user
        os.environ.update(_trust())
        return
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    there = (Path.home() / ".ray" / "auth_token").exists()
    os.environ["RAY_AUTH_MODE"] = "token" if given or there else "disabled"


def _start_daemon(num_cpus: int, on_started: Callable[[RayRecord], None]) -> RayRecord:
    if not can_identify():
        raise ConfigError(
            "ray.address: local needs Linux; elsewhere run `ray start --head` and use auto"
        )
    # Ray puts sockets below this folder, and the path of a socket may not be longer than 107.
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tandem-", dir=parent if len(parent) < 24 else "/tmp")
    record = RayRecord("", True, mark=secrets.token_hex(8), folder=folder)
    on_started(record)
    try:
        _run_ray_start(record, num_cpus)
        address = (Path(folder) / "ray_current_cluster").read_text().strip()
    except BaseException:
        end_ray(record)
        raise
    members = tuple(sorted(family(record).members(), key=lambda p: p.pid))
    record = replace(record, address=address, processes=members)
    on_started(record)
    return record


def _run_ray_start(record: RayRecord, num_cpus: int) -> None:
    options = {
        "node-ip-address": _NODE_IP,
        "port": 0,
        "num-cpus": num_cpus,
        "temp-dir": record.folder,
        "object-store-memory": _OBJECT_STORE_BYTES,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        "ray-client-server-port": _free_port(),
        "dashboard-agent-listen-port": 0,
        "dashboard-agent-grpc-port": 0,
        "metrics-export-port": 0,
        "runtime-env-agent-port": 0,
        "log-color": "false",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head"]
    command += [f"--{name}={value}" for name, value in options.items()]
    command.append("--disable-usage-stats")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
    environ.pop("RAY_ADDRESS", None)
    environ |= {**_trust(), "RAY_USAGE_STATS_ENABLED": "0", MARK: record.mark}
    # Ray runs workers at niceness 15, which suits batch work: any other process on the machine
    # would then freeze every stream.
    environ.setdefault("RAY_worker_niceness", "0")
    # Into a file: the daemons keep it open, and a pipe would never end.
    log = Path(record.folder) / "ray-start.log"
    with log.open("wb") as out:
        # In a session of its own: Ctrl-C on the terminal reaches us, and we end Ray in order.
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            code = starter.wait(_START_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"Ray did not start within {_START_S:.0f} s") from None
        finally:
            if starter.poll() is None:
                starter.kill()
                starter.wait()
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise Unavailable(f"Ray did not start: {lines[-1].strip() if lines else f'exit {code}'}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_NODE_IP, 0))
        return int(probe.getsockname()[1])


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {} if address.startswith("ray://") else {"log_to_driver": False}
    try:
        with _keep_signal_handlers():
            ray.init(address, namespace=NAMESPACE, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise Unavailable(f"cannot join Ray at {address}: {_gist(e)}{_hint()}") from None


def _hint() -> str:
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return ""
    return " (if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH)"


def _gist(error: BaseException) -> str:
    """First line of a message, with the last where the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") else lines[0]


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """``ray.init`` puts its own handlers in place of the caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

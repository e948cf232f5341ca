"""What can be found wrong with a start before anything is started.

This file owns the sentences for the commonest mistakes of a first day: a used port, a missing
model, too few cores. It must never start or change anything. What cannot be known here (a model
that does not load, a port taken a moment later) is found by the parts themselves.
"""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from pathlib import Path

from cluster.worker.clashes import refuse_clashes
from kernels.gguf_folder import gguf_file, model_folder
from kernels.model_info import fingerprint
from protocol.config import PoolConfig, TandemConfig
from protocol.errors import ConfigError
from protocol.types import Mode
from router.http_server import split_address

_POSITIONS = ("max_position_embeddings", "n_positions")  # by family
_HEADS = ("num_attention_heads", "num_key_value_heads")


def on_this_machine(config: TandemConfig) -> bool:
    """Whether the router will run here: not when Ray is reached through its client."""
    return not config.ray.address.startswith("ray://")


def with_real_paths(config: TandemConfig) -> TandemConfig:
    """The configuration with the model's path made absolute: actors have another folder."""
    if not on_this_machine(config):
        return config
    path = str(Path(config.model.path).expanduser().resolve())
    name = config.model.served_name or Path(path).name.removesuffix(".gguf")
    model = config.model.model_copy(update={"path": path, "served_name": name})
    return config.model_copy(update={"model": model})


def check_start(config: TandemConfig) -> None:
    """Raise ``ConfigError`` with one sentence when this start cannot succeed."""
    refuse_clashes()
    if config.kv.transport == "loopback" and config.mode is Mode.DISAGGREGATED:
        raise ConfigError(
            "kv.transport: loopback joins workers of one process, and here each has its own; "
            "choose p2p or auto",
            field="kv.transport",
        )
    if not on_this_machine(config):
        return
    check_model(config)
    addresses = {"router.http": config.router.http, "router.grpc": config.router.grpc}
    taken: dict[tuple[str, int], str] = {}
    for field, address in addresses.items():
        host, port = split_address(address, field)
        if port and (host, port) in taken:
            raise ConfigError(f"{field}: {address} is {taken[host, port]} already", field=field)
        taken[host, port] = field
        _check_free(field, host, port, address)


def missing_model(config: TandemConfig) -> str:
    """What is wrong with the place where the model should be; empty when a model is there."""
    folder = Path(config.model.path).expanduser()
    if (folder / "config.json").is_file() or gguf_file(folder) is not None:
        return ""
    if folder.is_file():
        fault = "a file"
    else:
        fault = "has no config.json" if folder.is_dir() else "there is no such folder"
    return f"model.path: {folder}: {fault}; it must be a Hugging Face model folder or a GGUF file"


def check_model(config: TandemConfig) -> None:
    """Raise ``ConfigError`` for a model that no worker could load, as far as files tell at once.

    ``field`` of the error is ``model.path`` when there is no model at all. What only transformers
    knows (a family that is not supported) workers find: importing it takes seconds. A GGUF file
    is converted here, once for all workers of this host.
    """
    if missing := missing_model(config):
        raise ConfigError(missing, field="model.path")
    folder, asked = model_folder(config.model.path), config.model.max_model_len
    _check_ranks(config, folder)
    fingerprint(folder)  # looks for the weights and reads the header of each file
    own = _number(folder, _POSITIONS)
    if asked is not None and own is not None and asked > own:
        raise ConfigError(
            f"model.max_model_len: {asked} is longer than the {own} positions that {folder} knows",
            field="model.max_model_len",
        )


def warnings(config: TandemConfig) -> tuple[str, ...]:
    """What will work, but not as well as one might think."""
    threads = sum(
        pool.replicas * pool.threads * pool.tensor_parallel for pool in used_pools(config)
    )
    cores = usable_cores()
    if config.ray.address == "local" and threads > cores:
        return (
            f"the workers use {threads} threads and this machine has {cores} cores: "
            "they will slow each other down",
        )
    return ()


def cpus_to_offer(config: TandemConfig) -> int:
    """What a Ray of our own says it has: enough for every worker, at least the cores."""
    wanted = sum(pool.replicas * pool.resources.num_cpus for pool in used_pools(config))
    return max(usable_cores(), math.ceil(wanted))


def check_offer(config: TandemConfig, offered: dict[str, float]) -> None:
    """Raise ``ConfigError`` when a Ray that cannot grow has not what the pools ask for."""
    wanted: dict[str, float] = {}
    for pool in used_pools(config):
        wants = {"GPU": pool.resources.num_gpus, **pool.resources.custom}
        for name, amount in wants.items():
            wanted[name] = wanted.get(name, 0) + pool.replicas * amount
    for name, amount in wanted.items():
        there = offered.get(name, 0)
        if amount > there:
            raise ConfigError(
                f"pools: the workers ask for {amount:g} {name}, this machine has {there:g}"
            )


def used_pools(config: TandemConfig) -> tuple[PoolConfig, ...]:
    """The pools that this mode has."""
    pools = config.pools
    return (pools.prefill, pools.decode) if config.mode is Mode.DISAGGREGATED else (pools.decode,)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_ranks(config: TandemConfig, folder: Path) -> None:
    """Whether the ranks of a worker can share the heads, as far as the model's config tells."""
    ranks = config.pools.decode.tensor_parallel
    counts = {name: _number(folder, (name,)) for name in _HEADS}
    if any(count % ranks for count in counts.values() if count is not None):
        has = ", ".join(f"{name} {count}" for name, count in counts.items() if count is not None)
        raise ConfigError(
            f"pools.decode.tensor_parallel: {folder} has {has}, and {ranks} ranks must get equal "
            f"whole numbers of heads",
            field="pools.decode.tensor_parallel",
        )


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    """The first of these entries that the model's config has; None where it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config") or config
        found = next((config[k] for k in names if config.get(k) is not None), None)
    except (OSError, ValueError, AttributeError) as e:
        raise ConfigError(f"{folder / 'config.json'}: not readable: {e}") from None
    return found if isinstance(found, int) else None


def _check_free(field: str, host: str, port: int, address: str) -> None:
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                fault = "is in use; stop what listens there or choose another address"
            else:
                fault = f"cannot be listened on: {os.strerror(e.errno) if e.errno else e}"
            raise ConfigError(f"{field}: {address} {fault}", field=field) from None

"""Everything that one worker process must be told, as one plain value.

This file owns the translation from the configuration tree to a worker's options, and their JSON
form. It must never read files or look at the machine: what depends on the device (memory, page
counts, an automatic budget) is settled in the worker.

Life: ``worker_options`` in whoever starts a worker -> by Ray argument or JSON into the process ->
``WorkerProcess``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.worker.budget import BudgetRule
from protocol.config import PoolConfig, Profile, TandemConfig, TimingConfig
from protocol.errors import ConfigError
from protocol.types import Role

DEFAULT_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """One worker. ``sharers``: workers that divide this device's memory, itself included.

    ``max_num_batched_tokens`` 0 means measured at start, by ``profile`` and ``itl_target_s``.
    ``listen`` is ``host:port`` of the gRPC server (port 0: any free one). ``secret`` is the
    cluster's.
    """

    worker_id: str
    role: Role
    model_path: str
    secret: str = field(default="", repr=False)
    dtype: str = "auto"
    max_model_len: int | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    kv_memory: str = "auto"
    sharers: int = 1
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 32
    min_prefill_tokens: int = 64
    chunked_prefill: bool = True
    profile: Profile = Profile.CHAT
    itl_target_s: float = 0.3
    threads: int = 1
    tensor_parallel: int = 1
    use_gpu: bool = False
    transport: str = "p2p"
    window: int = 8
    reserve_tokens: int = 64
    host_memory: str = "auto"
    interface: str = "127.0.0.1"
    listen: str = "127.0.0.1:0"
    node: str = ""
    poison_freed_pages: bool = False
    timing: TimingConfig = field(default_factory=TimingConfig)

    @property
    def budget_rule(self) -> BudgetRule:
        """By what the token budget is chosen when none is configured."""
        return BudgetRule(
            role=self.role,
            profile=self.profile,
            itl_s=self.itl_target_s,
            max_num_seqs=self.max_num_seqs,
            min_prefill_tokens=self.min_prefill_tokens,
        )

    def to_json(self) -> str:
        """This value as one JSON object, the secret included."""
        return json.dumps(asdict(self) | {"timing": self.timing.model_dump()})

    @staticmethod
    def from_json(text: str) -> WorkerOptions:
        """The value that ``to_json`` wrote. Raises ``ConfigError``."""
        try:
            values: dict[str, Any] = json.loads(text)
            values["role"] = Role(values["role"])
            if "profile" in values:
                values["profile"] = Profile(values["profile"])
            values["timing"] = TimingConfig(**values.get("timing", {}))
            return WorkerOptions(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"worker options: {error}") from error


def worker_options(
    config: TandemConfig,
    role: Role,
    index: int,
    *,
    secret: str,
    sharers: int = 1,
    host: str = "",
    node: str = "",
) -> WorkerOptions:
    """The options of worker number ``index`` of a pool.

    ``host`` is the address that its server binds to and others dial; empty: ``kv.interface``.
    """
    pool: PoolConfig = config.pools.prefill if role is Role.PREFILL else config.pools.decode
    interface = "127.0.0.1" if config.kv.interface == "auto" else config.kv.interface
    budget = pool.max_num_batched_tokens
    page_size = config.kv.page_size
    return WorkerOptions(
        worker_id=f"{role.value}-{index}",
        role=role,
        model_path=config.model.path,
        secret=secret,
        dtype=config.model.dtype,
        max_model_len=config.model.max_model_len,
        page_size=DEFAULT_PAGE_SIZE if page_size == "auto" else page_size,
        kv_memory=config.kv.memory,
        sharers=sharers,
        max_num_batched_tokens=0 if budget == "auto" else budget,
        max_num_seqs=pool.max_num_seqs,
        min_prefill_tokens=pool.min_prefill_tokens,
        chunked_prefill=config.chunked_prefill,
        profile=config.profile,
        itl_target_s=config.slo.itl_ms / 1e3,
        threads=pool.threads,
        tensor_parallel=pool.tensor_parallel,
        use_gpu=pool.resources.num_gpus > 0,
        transport="p2p" if config.kv.transport == "auto" else config.kv.transport,
        window=config.kv.window,
        reserve_tokens=config.kv.reserve,
        host_memory=config.kv.host_memory,
        interface=interface,
        listen=f"{host or interface}:0",
        node=node,
        poison_freed_pages=config.debug.poison_freed_pages,
        timing=config.timing,
    )

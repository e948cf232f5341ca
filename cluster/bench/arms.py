"""The arms of the interference comparison: the same model on the same cores, three ways.

Owns how an arm's configuration follows from the base configuration. Every arm gets the same
number of CPU threads in all; what differs is who runs prompts, and in what portions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from protocol.config import (
    KvConfig,
    ModelConfig,
    PoolConfig,
    PoolsConfig,
    RouterConfig,
    TandemConfig,
)
from protocol.errors import InvalidArgument
from protocol.types import Mode

MAX_NUM_SEQS = 16
MIN_PREFILL_TOKENS = 16
PREFILL_BUDGET = 512  # of the disaggregated arm's prefill worker: nobody waits for its steps


@dataclass(frozen=True)
class Arm:
    """One way to serve. ``budget`` is the token budget of the steps that chats wait for."""

    name: str
    budget: int | None
    config: TandemConfig

    @property
    def workers(self) -> int:
        """Workers of this arm."""
        return len(self.threads_per_worker)

    @property
    def threads_per_worker(self) -> tuple[int, ...]:
        """CPU threads of each worker, prefill first."""
        pools = self.config.pools
        decode = (pools.decode.threads,) * pools.decode.replicas
        if self.config.mode is Mode.COLOCATED:
            return decode
        return (pools.prefill.threads,) * pools.prefill.replicas + decode

    def describe_workers(self) -> str:
        """For example "2 workers (1 + 1 threads)"."""
        threads = self.threads_per_worker
        plural = "s" if len(threads) > 1 else ""
        unit = "threads" if sum(threads) > 1 else "thread"
        return f"{len(threads)} worker{plural} ({' + '.join(map(str, threads))} {unit})"


def default_config(model: Path) -> TandemConfig:
    """What is compared when no configuration is named."""
    return TandemConfig(
        model=ModelConfig(path=str(model), max_model_len=4096),
        kv=KvConfig(memory="2GiB"),
        name="tandem-bench",
    )


def parse_budgets(text: str) -> tuple[int, ...]:
    """For example "64,128". Raises ``InvalidArgument`` naming what is no whole number."""
    budgets = []
    for part in text.split(","):
        try:
            budgets.append(int(part))
        except ValueError:
            raise InvalidArgument(
                f"budgets {text!r}: {part.strip()!r} is not a whole number", field="budgets"
            ) from None
    return tuple(sorted(set(budgets)))


def make_arms(base: TandemConfig, cores: int, budgets: tuple[int, ...]) -> list[Arm]:
    """naive, one chunked arm per budget, disaggregated: ``cores`` threads each.

    Model, KV and timing come from ``base``; pools, mode and addresses are the arm's own.
    Raises ``InvalidArgument`` for fewer than two cores or a budget too small to chunk with.
    """
    if cores < 2:
        raise InvalidArgument(
            f"cores {cores}: a prefill and a decode worker need two", field="cores"
        )
    smallest = MAX_NUM_SEQS + MIN_PREFILL_TOKENS
    for budget in budgets:
        if budget < smallest:
            raise InvalidArgument(
                f"budget {budget} is smaller than max_num_seqs {MAX_NUM_SEQS} + "
                f"min_prefill_tokens {MIN_PREFILL_TOKENS} = {smallest}",
                field="budgets",
            )

    def pool(threads: int, budget: int) -> PoolConfig:
        return PoolConfig(
            replicas=1,
            threads=threads,
            max_num_batched_tokens=budget,
            max_num_seqs=MAX_NUM_SEQS,
            min_prefill_tokens=MIN_PREFILL_TOKENS,
        )

    def arm(name: str, budget: int | None, mode: Mode, chunked: bool, pools: PoolsConfig) -> Arm:
        config = base.model_copy(
            update={
                "mode": mode,
                "chunked_prefill": chunked,
                "pools": pools,
                "router": RouterConfig(http="127.0.0.1:0", grpc="127.0.0.1:0"),
            }
        )
        return Arm(name, budget, config)

    whole_prompt = base.model.max_model_len or 1 << 16
    naive = PoolsConfig(decode=pool(cores, max(whole_prompt, smallest)))
    split = PoolsConfig(
        prefill=pool(cores // 2, PREFILL_BUDGET), decode=pool(cores - cores // 2, 256)
    )
    return [
        arm("naive", None, Mode.COLOCATED, False, naive),
        *(
            arm(f"chunked-{b}", b, Mode.COLOCATED, True, PoolsConfig(decode=pool(cores, b)))
            for b in budgets
        ),
        arm("disaggregated", None, Mode.DISAGGREGATED, True, split),
    ]


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

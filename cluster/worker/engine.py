"""What a worker computes with: the model, its pool of KV pages and the runner, made together.

This file owns the order in which a device is filled: threads first, then the model, then the
pool from what memory is left. It must never know a ticket.

Life: ``use_threads`` -> ``load_engine`` at the worker's start -> ``prepare_thread`` in the engine
thread, once -> ``run`` for every step, in that thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cluster.worker.options import WorkerOptions
from kernels.model import load_model
from kernels.runner import Runner
from kv_transfer.pool import KvPool, available_memory, pages_in, parse_memory
from protocol.errors import ConfigError
from protocol.step import StepPlan, StepResult
from protocol.types import KvGeometry, ModelInfo

_log = logging.getLogger(__name__)


def _nothing() -> None:
    """An engine without anything to warm up."""


@dataclass(slots=True)
class Engine:
    """A device ready to run steps. ``warm_up`` is called while no page is in use."""

    model: ModelInfo
    pool: KvPool
    run: Callable[[StepPlan], StepResult]
    max_num_batched_tokens: int
    warm_up: Callable[[], None] = _nothing
    threads_used: int = field(default=0)

    def prepare_thread(self, threads: int) -> None:
        """Called in the engine thread before its first step.

        OpenMP keeps the count of threads per calling thread: without this call, the thread that
        computes could use every core although the main thread was told otherwise.
        """
        torch.set_num_threads(threads)
        self.threads_used = torch.get_num_threads()
        self.warm_up()


def use_threads(threads: int) -> None:
    """Set this process's compute threads; the first call also fixes the inter-op pool to one."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def load_engine(options: WorkerOptions) -> Engine:
    """Load the model and allocate its pool. Raises ``ConfigError`` with one plain sentence."""
    device = "cpu"
    if options.use_gpu:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{options.worker_id} was given a GPU, but torch finds none", field="resources"
            )
        device = "cuda"
    loaded = load_model(
        options.model_path,
        dtype=options.dtype,
        threads=options.threads,
        device=device,
        max_model_len=options.max_model_len,
    )
    model = loaded.info(options.page_size)
    pool = KvPool(model.geometry, _pages(options, model, device), device)
    runner = Runner(loaded, pool.tensor, options.page_size)
    _log.info(
        "%s: %d pages of %d tokens (%s), %s",
        options.worker_id,
        pool.pages,
        options.page_size,
        model.geometry.dtype,
        runner.attention,
    )
    return Engine(
        model=model,
        pool=pool,
        run=lambda plan: runner.run(plan.rows),
        max_num_batched_tokens=options.budget(cuda=device == "cuda"),
        warm_up=runner.warm_up,
    )


def _pages(options: WorkerOptions, model: ModelInfo, device: str) -> int:
    geometry: KvGeometry = model.geometry
    useful = options.max_num_seqs * geometry.pages_for(model.max_model_len) * geometry.page_bytes
    memory = parse_memory(
        options.kv_memory,
        available=available_memory(device),
        sharers=options.sharers,
        useful=useful,
    )
    return pages_in(geometry, memory, max_model_len=model.max_model_len)

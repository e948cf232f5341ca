"""What a worker computes with: the model, its pool of KV pages and the runner, made together.

This file owns the order in which a device is filled: threads first, then the further ranks, then
the model, then the pool from what memory is left. It must never know a ticket.

Life: ``use_threads`` -> ``load_engine`` at the worker's start -> ``prepare_thread`` in the engine
thread, once -> ``run`` for every step, in that thread only -> ``close``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cluster.worker.budget import Chosen, StepTimer, find_budget
from cluster.worker.options import WorkerOptions
from cluster.worker.ranks import FollowerRanks
from kernels.attention import Needs
from kernels.model import load_model
from kernels.parallel import (
    RankPlace,
    bound_waits,
    encode_step,
    join,
    leave,
    smallest_of_ranks,
)
from kernels.runner import Runner
from kv_transfer.pool import KvPool, available_memory, pages_in, parse_memory
from protocol.errors import ConfigError, Unavailable
from protocol.step import StepPlan, StepResult
from protocol.types import KvGeometry, ModelInfo, Role

_log = logging.getLogger(__name__)

_CPU_POOL = 1 << 30  # bytes of an automatic pool on a CPU


def _nothing() -> None:
    """An engine without anything to warm up or to close."""


@dataclass(slots=True)
class Loss:
    """Why an engine cannot compute any more: said once, whenever somebody listens."""

    reason: str = ""
    _listener: Callable[[str], None] | None = None

    def happened(self, reason: str) -> None:
        """From any thread."""
        self.reason = self.reason or reason
        if self._listener is not None:
            self._listener(self.reason)

    def tell(self, listener: Callable[[str], None]) -> None:
        """Tell ``listener``, at once if it has happened already."""
        self._listener = listener
        if self.reason:
            listener(self.reason)


@dataclass(slots=True)
class Engine:
    """A device ready to run steps. ``warm_up`` is called while no page is in use; ``loss`` says
    when the worker as a whole is lost with one of its ranks; ``described`` is a line for people:
    pool, attention, linear layers, and why these."""

    model: ModelInfo
    pool: KvPool
    run: Callable[[StepPlan], StepResult]
    warm_up: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
    loss: Loss = field(default_factory=Loss)
    threads_used: int = field(default=0)
    host_pages: int = 0  # that preempted sequences may move to
    described: str = ""

    def find_budget(self, options: WorkerOptions) -> Chosen:
        """The configured token budget, or one found by timing steps. Called in the engine thread
        while no page is in use."""
        if options.max_num_batched_tokens:
            return Chosen(options.max_num_batched_tokens, options.max_num_seqs, "configured")
        timer = StepTimer(
            self.run,
            pages=self.pool.pages,
            page_size=self.pool.geometry.page_size,
            max_model_len=self.model.max_model_len,
        )
        chosen = find_budget(options.budget_rule, timer, cuda=self.pool.device.type == "cuda")
        _log.log(
            logging.WARNING if chosen.target_missed else logging.INFO,
            "%s: %s",
            options.worker_id,
            chosen.note,
        )
        return chosen

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
    if options.tensor_parallel == 1:
        return load_rank(options, None)
    loss = Loss()
    followers = FollowerRanks(options)
    try:
        followers.start(loss.happened)
        place = RankPlace(0, options.tensor_parallel)
        engine = load_rank(options, place, followers.meeting)
    except BaseException as error:
        followers.close()
        leave()
        if loss.reason and isinstance(error, Exception):
            raise ConfigError(
                f"{options.worker_id}: {loss.reason}: {_first_line(error)}"
            ) from error
        raise
    compute = engine.run

    def run(plan: StepPlan) -> StepResult:
        if loss.reason:
            raise Unavailable(loss.reason)
        followers.send(encode_step(plan.rows, plan.copies))
        try:
            return compute(plan)
        except Exception as error:
            # The ranks may be out of step now, and nothing brings them together again.
            loss.happened(f"a step of {options.worker_id}'s ranks failed: {_first_line(error)}")
            raise Unavailable(loss.reason) from error

    def close() -> None:
        followers.close()
        leave()

    engine.run, engine.close, engine.loss = run, close, loss
    return engine


def load_rank(options: WorkerOptions, place: RankPlace | None, meeting: Path = Path()) -> Engine:
    """What one process computes with; with a ``place`` it meets the other ranks first."""
    device = "cpu"
    if options.use_gpu:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{options.worker_id} was given a GPU, but torch finds none", field="resources"
            )
        device = "cuda"
    if place is not None:
        join(place, meeting, device, options.timing.start_s)
    loaded = load_model(
        options.model_path,
        dtype=options.dtype,
        threads=options.threads,
        device=device,
        max_model_len=options.max_model_len,
        place=place,
    )
    model, geometry = loaded.info(options.page_size), loaded.geometry(options.page_size)
    pages = _pages(options, geometry, model.max_model_len, device)
    if place is not None:
        pages = smallest_of_ranks(pages, device)
    host_pages = _host_pages(options, geometry, pages, device)
    if place is not None:
        host_pages = smallest_of_ranks(host_pages, device)
    pool = KvPool(geometry, pages, device)
    runner = Runner(loaded, pool.tensor, options.page_size, host_kv=_host_memory(pool, host_pages))
    described = (
        f"{pool.pages} pages of {options.page_size} tokens ({geometry.dtype}), {host_pages} more "
        f"in host memory, {runner.attention}, {loaded.linear}"
        f"{_window_cost(loaded.needs, geometry, model.max_model_len)}"
    )
    _log.info("%s: %s", options.worker_id, described)

    def warm_up() -> None:
        runner.warm_up()
        if place is not None:
            # Until all have compiled what they need, one may be far behind the others.
            smallest_of_ranks(0, device)
            bound_waits(options.timing.link_op_s + options.timing.peer_dead_s)

    return Engine(
        model=model,
        pool=pool,
        run=lambda plan: runner.run(plan.rows, plan.copies),
        warm_up=warm_up,
        host_pages=host_pages,
        described=described,
    )


def _window_cost(needs: Needs, geometry: KvGeometry, max_model_len: int) -> str:
    """What it costs that layers with a window keep all their KV; empty where it costs nothing."""
    unseen = sum(max(0, max_model_len - window) for window in needs.windows)
    if not unseen:
        return ""
    whole = geometry.layers * max_model_len
    return (
        f", {len(needs.windows)} of {geometry.layers} layers see only their last "
        f"{max(needs.windows)} tokens and keep the KV of all: {100 * unseen // whole} % of a "
        f"sequence of {max_model_len} tokens"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _pages(options: WorkerOptions, geometry: KvGeometry, max_model_len: int, device: str) -> int:
    """Pages of one rank's pool. The ranks of a worker share a host's memory, not a GPU's."""
    longest = geometry.pages_for(max_model_len) * geometry.page_bytes
    useful = options.max_num_seqs * longest
    if device == "cpu":  # beyond a full house the pool caches prefixes, as far as they may go
        useful = max(longest, min(_CPU_POOL, 4 * useful))
    memory = parse_memory(
        options.kv_memory,
        available=available_memory(device),
        sharers=options.sharers * (options.tensor_parallel if device == "cpu" else 1),
        useful=useful,
    )
    return pages_in(geometry, memory, max_model_len=max_model_len)


def _host_pages(options: WorkerOptions, geometry: KvGeometry, pages: int, device: str) -> int:
    """Host pages of one rank, for sequences that a decode worker preempts."""
    if options.role is not Role.DECODE or (options.host_memory == "auto" and device == "cpu"):
        return 0  # on a CPU the pool itself could be larger instead
    ranks = options.sharers * options.tensor_parallel
    available = available_memory("cpu")
    if options.host_memory == "auto":
        return min(pages, available // (4 * ranks * geometry.page_bytes))
    memory = parse_memory(
        options.host_memory, available=available, sharers=ranks, field="kv.host_memory"
    )
    return memory // geometry.page_bytes


def _host_memory(pool: KvPool, n_pages: int) -> torch.Tensor | None:
    """``n_pages`` like those of the pool; pinned where a GPU copies to and from them."""
    if n_pages == 0:
        return None
    shape = (n_pages, *pool.tensor.shape[1:])
    return torch.empty(shape, dtype=pool.tensor.dtype, pin_memory=pool.device.type == "cuda")

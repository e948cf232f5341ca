"""CUDA graphs for decode steps: recorded once per batch size, replayed with new tables.

This file owns the fixed buffers that a recorded step reads, and the rule which steps may use it:
one token per row, every row sampled. Such a step is filled up with padding rows (they touch no
page) to the next recorded size, its numbers go to the device in one copy, and one launch replays
the whole model. It must never wait for the device between ``run``'s start and its return. On a
CPU the same path runs with the model called anew instead of a replay, which is how it is tested.

Life of a ``GraphedDecode``:
 1. Built by a runner whose backend is graph-safe and whose model has no ``obstacle``.
 2. ``record`` once, before the first step, while nobody else uses the device.
 3. ``run`` for every step; ``None`` means: this step is none for a graph. Its logits are valid
    until the next ``run``.

Layout of the buffer, the same bytes on host and device: tokens and positions as int64, then the
backend's words as int32, whose last part, the page table, has a length of its own every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from kernels.attention import AttentionBackend, Declaration, Plan
from kernels.batch import Batch, pad
from kernels.staging import HostPlan, end_of, views
from protocol.errors import InternalError
from protocol.types import KvGeometry

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Plan], torch.Tensor]
"""``(tokens_T, positions_T, sampled_at, plan) -> logits [S, vocab]``, the step's KV written."""


class GraphBackend(Protocol):
    """An attention backend whose plan has shapes that depend on padded sizes alone."""

    @property
    def declaration(self) -> Declaration:
        """``graph_safe`` is set."""
        ...

    def host_plan(self, batch: Batch, geometry: KvGeometry) -> HostPlan:
        """The plan before its copy; all parts but the last, and all numbers, have fixed shape."""
        ...


def obstacle(module: Any, dtype: torch.dtype) -> str | None:
    """What in a model keeps it out of CUDA graphs, or None.

    Experts run one by one in a loop on the host unless transformers' ``grouped_mm`` takes them;
    its kernel is for bfloat16, and other dtypes fall back to such a loop.
    """
    for part in module.modules():
        if not type(part).__name__.endswith("Experts"):
            continue
        how = getattr(getattr(part, "config", None), "_experts_implementation", "eager")
        if how != "grouped_mm":
            return f"its experts run as {how}, with loops on the host"
        if dtype != torch.bfloat16:
            return f"its experts have no grouped product in {str(dtype).removeprefix('torch.')}"
    return None


def decode_graphs(
    forward: Forward,
    module: Any,
    backend: AttentionBackend,
    geometry: KvGeometry,
    device: torch.device,
    max_positions: int,
    ranks: int = 1,
) -> tuple[GraphedDecode | None, str]:
    """Graphs for a model on a CUDA device if it can have them, and words for the start-up line."""
    if device.type != "cuda":
        return None, ""
    declaration = backend.declaration
    why = None if declaration.graph_safe else f"{declaration.name} is not safe in them"
    if ranks > 1:
        why = "its ranks meet on the host"
    if why := why or obstacle(module, getattr(torch, geometry.dtype)):
        return None, f", no CUDA graphs: {why}"
    graphs = GraphedDecode(forward, cast(GraphBackend, backend), geometry, device, max_positions)
    return graphs, f", CUDA graphs for decode steps of up to {graphs.max_rows} rows"


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One batch size."""

    replay: Callable[[], torch.Tensor]  # returns the logits [size, vocab]
    shapes: tuple[tuple[int, ...], ...]  # of the plan's parts but the last
    numbers: list[int]


class GraphedDecode:
    """See the file's head."""

    def __init__(
        self,
        forward: Forward,
        backend: GraphBackend,
        geometry: KvGeometry,
        device: torch.device,
        max_positions: int,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """Rows have up to ``max_positions`` positions; ``sizes`` ascend."""
        if not backend.declaration.graph_safe:
            raise InternalError(f"{backend.declaration.name} is not safe in CUDA graphs")
        self._forward = forward
        self._backend = backend
        self._geometry = geometry
        self._device = device
        self._max_positions = max_positions
        self._sizes = tuple(sizes)
        self._recorded: dict[int, _Recorded] = {}
        self._in_flight: torch.cuda.Event | None = None
        largest = self._sizes[-1]
        fixed = len(backend.host_plan(_padding(largest, max_positions), geometry).words)
        n_words = 4 * largest + fixed + largest * geometry.pages_for(max_positions)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(n_words, dtype=torch.int32, pin_memory=on_gpu)
        self._words = torch.zeros(n_words, dtype=torch.int32, device=device)

    @property
    def max_rows(self) -> int:
        """The largest step that a graph takes."""
        return self._sizes[-1]

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size, the largest first so that the others share its memory.

        Raises whatever the model raises when it does what a graph cannot.
        """
        pool = None
        for size in reversed(self._sizes):
            plan = self._backend.host_plan(_padding(size, self._max_positions), self._geometry)
            step = self._step(size, plan)
            replay, pool = _record(step, self._device, pool)
            self._recorded[size] = _Recorded(replay, plan.shapes[:-1], plan.numbers)

    def _step(self, size: int, plan: HostPlan) -> Callable[[], torch.Tensor]:
        """The forward pass of ``size`` rows over the fixed buffer."""
        inputs = self._words[: 4 * size].view(torch.int64)
        own = self._words[4 * size :]
        tensors = [*views(own, plan.shapes[:-1]), own[end_of(plan.shapes[:-1]) :]]
        device_plan = Plan(tensors, plan.numbers)
        every_row = torch.arange(size, device=self._device)
        return lambda: self._forward(inputs[:size], inputs[size:], every_row, device_plan)

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Logits ``[rows, vocab]`` of a batch packed on the host; None if it is not for a graph."""
        n_rows = len(batch.q_len_R)
        if (
            n_rows > self.max_rows
            or len(batch.tokens_T) != n_rows
            or len(batch.sampled) != n_rows
            or batch.kv_bound > self._max_positions
        ):
            return None
        size = self._sizes[bisect_left(self._sizes, n_rows)]
        if (recorded := self._recorded.get(size)) is None:
            return None
        padded = pad(batch, size, self._max_positions)
        plan = self._backend.host_plan(padded, self._geometry)
        if plan.shapes[:-1] != recorded.shapes or plan.numbers != recorded.numbers:
            raise InternalError(f"{self._backend.declaration.name}: a decode plan changed shape")
        self._send(padded, plan)
        return recorded.replay()[:n_rows]

    def _send(self, padded: Batch, plan: HostPlan) -> None:
        """One copy to the device. The host buffer is free again once the last copy is through."""
        if self._in_flight is not None:
            self._in_flight.synchronize()
        size = len(padded.tokens_T)
        host = self._host.numpy()
        inputs = host[: 4 * size].view(np.int64)
        inputs[:size] = padded.tokens_T.numpy()
        inputs[size:] = padded.positions_T.numpy()
        used = 4 * size + len(plan.words)
        host[4 * size : used] = plan.words
        self._words[:used].copy_(self._host[:used], non_blocking=True)
        if self._device.type == "cuda":
            self._in_flight = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._in_flight.record()


def _padding(size: int, max_positions: int) -> Batch:
    """A decode batch of padding rows alone."""
    none = np.zeros(0, dtype=np.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = Batch(empty, empty, none, none, none, none, none, none, none, 0, (), empty)
    return pad(batch, size, max_positions)


def _record(
    step: Callable[[], torch.Tensor], device: torch.device, pool: Any
) -> tuple[Callable[[], torch.Tensor], Any]:
    """``step`` as one launch, and the memory pool that later records may share."""
    if device.type != "cuda":
        return step, None
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()  # compiles kernels and sizes workspaces, which cannot happen while recording
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device for their own work meanwhile (page transfers).
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        logits = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return logits

    return replay, graph.pool()

"""Chooses between attention backends that can serve a model by trying them.

This file owns the trial: one layer of a made-up decode batch and of one prompt chunk, on a scratch
pool of the model's own shape. It must never touch the real pool, and never decide against the
declared order for a difference that noise explains. A backend that fails here (its compiler is
broken, say) is passed over, and the line for the start-up log says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kernels.attention import AttentionBackend, LayerCall, Needs, choose, why_not
from kernels.attn_reference import ReferenceAttention
from kernels.batch import pack
from protocol.step import StepRow
from protocol.types import KvGeometry, TicketId

Work = Callable[[], torch.Tensor]
_log = logging.getLogger(__name__)

_CONTEXT = 256
_DECODES, _CHUNK = 8, 64
_REPEATS = 5
_CLEARLY = 0.8  # a later backend must take less than this share of an earlier one's time


@dataclass(slots=True)
class _Trial:
    """One backend and its least times, in seconds per layer."""

    backend: AttentionBackend
    works: tuple[Work, Work]  # a decode batch, a prompt chunk
    ready: float  # what the first results took more than later ones: compilation
    least: list[float] = field(default_factory=lambda: [float("inf")] * 2)

    @property
    def name(self) -> str:
        return self.backend.declaration.name


def fastest(
    backends: Sequence[AttentionBackend],
    needs: Needs,
    geometry: KvGeometry,
    group: int,
    device: torch.device,
) -> tuple[AttentionBackend, str]:
    """The backend to use and a line that says why; ``group`` query heads share a KV head.

    By declaration where one is left or the device is no CPU, else by trial. Raises ``ConfigError``
    naming every backend's reason when none can serve.
    """
    first, line = choose(backends, needs, geometry, device.type)
    oracle = ReferenceAttention.declaration.name
    able = [
        b
        for b in backends
        if b.declaration.name != oracle
        and why_not(b.declaration, needs, geometry, device.type) is None
    ]
    if device.type != "cpu" or len(able) < 2:
        return first, line
    trials: list[_Trial] = []
    passed_over = [
        f"{b.declaration.name}: {reason}"
        for b in backends
        if (reason := why_not(b.declaration, needs, geometry, device.type))
    ]
    for backend in able:
        try:
            trials.append(_prepare(backend, needs, geometry, group, device))
        except Exception as e:  # a compiler, a foreign library: whatever it raises means the same
            name, reason = backend.declaration.name, (str(e).splitlines() or [type(e).__name__])[0]
            passed_over.append(f"{name}: {reason}")
            _log.warning("attention backend %s fails its trial and is not used: %s", name, reason)
    if not trials:
        return choose([b for b in backends if b not in able], needs, geometry, device.type)
    for _ in range(_REPEATS):  # in turns, so that a busy moment hits all
        for trial in trials:
            for i, work in enumerate(trial.works):
                trial.least[i] = min(trial.least[i], _seconds(work))
    best = trials[0]
    for trial in trials[1:]:
        if math.prod(trial.least) < _CLEARLY**2 * math.prod(best.least):
            best = trial
    return best.backend, _line(best, trials, passed_over)


def _line(best: _Trial, trials: list[_Trial], reasons: list[str]) -> str:
    order = sorted(trials, key=lambda trial: trial is not best)
    decode = ", ".join(f"{trial.name} {trial.least[0] * 1e3:.2g} ms" for trial in order)
    chunk = ", ".join(f"{trial.name} {trial.least[1] * 1e3:.2g} ms" for trial in order)
    passed_over = f" (passed over: {'; '.join(reasons)})" if reasons else ""
    return (
        f"attention: {decode} per layer at {_DECODES} x {_CONTEXT}; {chunk} for {_CHUNK} tokens "
        f"after {_CONTEXT}; ready in {best.ready:.1f} s{passed_over}"
    )


def _prepare(
    backend: AttentionBackend,
    needs: Needs,
    geometry: KvGeometry,
    group: int,
    device: torch.device,
) -> _Trial:
    """Run both shapes once, which compiles what there is to compile."""
    shapes = [(_CONTEXT - 1, 1)] * _DECODES, [(_CONTEXT, _CHUNK)]
    decode, chunk = (_work(backend, needs, geometry, group, device, shape) for shape in shapes)
    works = decode, chunk
    ready = sum(_seconds(work) for work in works)
    return _Trial(backend, works, max(0.0, ready - sum(_seconds(work) for work in works)))


def _seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _work(
    backend: AttentionBackend,
    needs: Needs,
    geometry: KvGeometry,
    group: int,
    device: torch.device,
    shape: list[tuple[int, int]],
) -> Work:
    """One layer's attention of ``(start, tokens)`` rows on a pool of its own."""
    geometry = replace(geometry, layers=1)
    counts = [geometry.pages_for(start + n) for start, n in shape]
    firsts = [sum(counts[:r]) for r in range(len(counts))]
    rows = [
        StepRow(TicketId("trial"), [0] * n, start, tuple(range(first, first + count)))
        for (start, n), first, count in zip(shape, firsts, counts, strict=True)
    ]
    batch = pack(rows, geometry.page_size, sum(counts), 1, device)
    dtype, kv_heads, head_dim = getattr(torch, geometry.dtype), geometry.kv_heads, geometry.head_dim

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    pool = zeros(sum(counts), 1, 2, geometry.page_size, kv_heads, head_dim)
    q = zeros(len(batch.tokens_T), kv_heads * group, head_dim)
    k = zeros(len(batch.tokens_T), kv_heads, head_dim)
    sinks = zeros(kv_heads * group) if needs.sinks else None
    call = LayerCall(0, head_dim**-0.5, 0, 30.0 if needs.softcap else 0.0, sinks)
    plan = backend.plan(batch, geometry, device)
    return lambda: backend.attend(q, k, k, pool, plan, call)

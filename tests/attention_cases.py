"""The table of mixed batches and features on which every attention backend meets the oracle.

The pool starts as NaN everywhere; only the cells that a row's context owns are filled. So a
backend that reads one cell too many, of its own page or of a stranger's, answers NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import torch

from kernels.attention import AttentionBackend, LayerCall, Needs, why_not
from kernels.attention_op import PagedStep
from kernels.attn_reference import ReferenceAttention
from kernels.batch import Batch, pack
from protocol.step import StepRow
from protocol.types import KvGeometry, TicketId

LAYERS, VOCAB = 3, 50


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    dtype: str = "float32"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def geometry(self) -> KvGeometry:
        return KvGeometry(LAYERS, self.kv_heads, self.head_dim, self.page_size, self.dtype)


SHAPES = {
    "gqa": Shape(),
    "mha": Shape(heads=3, kv_heads=3),
    "mqa": Shape(heads=6, kv_heads=1, head_dim=8),
    "smollm2": Shape(heads=9, kv_heads=3, head_dim=64, page_size=16),
    "page of 1": Shape(page_size=1),
    "bfloat16": Shape(dtype="bfloat16"),
    "window 1": Shape(window=1),
    "window 5": Shape(window=5),
    "window 100": Shape(window=100),
    "softcap": Shape(softcap=2.0),
    "sinks": Shape(sinks=True),
    "all of them": Shape(window=6, softcap=3.0, sinks=True),
}
ROWS = {  # (start, tokens) per row; the page size of most shapes is 4
    "one token, no context": [(0, 1)],
    "decode around a page": [(3, 1), (4, 1), (5, 1), (7, 1), (8, 1)],
    "decode, very unequal": [(0, 1), (1, 1), (60, 1), (2, 1), (61, 1)],
    "prompt around a page": [(0, 3), (0, 4), (0, 5)],
    "chunks around a page": [(3, 3), (4, 4), (5, 8), (8, 2), (4, 5)],
    "chunk after one token": [(1, 6)],
    "mixed": [(9, 1), (0, 7), (3, 1), (12, 5), (30, 1), (0, 1), (1, 2)],
}


def random_rows(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    lengths = (1, 1, 1, 2, 3, 4, 5, 9, 17)
    starts = (0, 0, 1, 3, 4, 5, 15, 16, 17, 40)
    return [(rng.choice(starts), rng.choice(lengths)) for _ in range(rng.randint(1, 12))]


def prepare(shape: Shape, rows: list[tuple[int, int]], seed: int) -> tuple[Batch, torch.Tensor]:
    """A packed batch over shuffled pages, and a pool that is NaN outside the rows' contexts."""
    geometry = shape.geometry
    counts = [geometry.pages_for(start + n) for start, n in rows]
    free = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(free)
    generator = torch.Generator().manual_seed(seed)
    size = (len(free), LAYERS, 2, shape.page_size, shape.kv_heads, shape.head_dim)
    pool = torch.full(size, float("nan"), dtype=getattr(torch, shape.dtype))
    step_rows = []
    for i, ((start, n), count) in enumerate(zip(rows, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        for position in range(start):
            page, offset = pages[position // shape.page_size], position % shape.page_size
            cell = torch.randn(LAYERS, 2, shape.kv_heads, shape.head_dim, generator=generator)
            pool[page, :, :, offset] = cell.to(pool.dtype)
        step_rows.append(StepRow(TicketId(str(i)), [1] * n, start, pages))
    batch = pack(step_rows, shape.page_size, len(pool), VOCAB, torch.device("cpu"))
    return batch, pool


# FlashAttention's kinds want pages of a multiple of 256 tokens.
ROWS_256 = ROWS | {
    "decode around a page of 256": [(254, 1), (255, 1), (256, 1)],
    "chunks around a page of 256": [(0, 257), (255, 3), (9, 1), (300, 5)],
}
SHAPES_256 = {
    f"{name}, {dtype}": replace(s, page_size=256, dtype=dtype)
    for name, s in SHAPES.items()
    if name not in ("page of 1", "bfloat16")
    for dtype in (("bfloat16", "float16") if name == "gqa" else ("bfloat16",))
}


@dataclass(frozen=True)
class Layer:
    """One layer's inputs for a batch: ``q [T, H, D]``, ``k`` and ``v [T, N, D]``, the call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    call: LayerCall


def layer_inputs(shape: Shape, batch: Batch, seed: int) -> Layer:
    """Random inputs, as strided as a model's own tensors."""
    generator = torch.Generator().manual_seed(seed + 1)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(heads, len(batch.tokens_T), shape.head_dim, generator=generator)
        return x.to(getattr(torch, shape.dtype)).transpose(0, 1)

    sinks = torch.randn(shape.heads, generator=generator) if shape.sinks else None
    call = LayerCall(1, 0.3, shape.window, shape.softcap, sinks)
    return Layer(draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), call)


@cache
def _oracle(shape: Shape, rows: tuple[tuple[int, int], ...], seed: int):
    batch, pool = prepare(shape, list(rows), seed)
    layer = layer_inputs(shape, batch, seed)
    kv = pool.clone()
    oracle = ReferenceAttention()
    plan = oracle.plan(batch, shape.geometry, torch.device("cpu"))
    out = PagedStep(kv, plan, "reference").attend(layer.q, layer.k, layer.v, layer.call)
    return out, kv


def agree(
    backend: AttentionBackend,
    shape: Shape,
    rows: list[tuple[int, int]],
    seed: int = 0,
    device: str = "cpu",
    declared: str | None = None,
) -> str | None:
    """``backend`` computes and writes what the oracle does; or the reason why it declares not to.

    ``declared`` is the device by which the declaration is read, where a kernel for another device
    is interpreted or replaced here. Raises ``AssertionError`` where they differ.
    """
    needs = Needs(shape.window > 0, shape.softcap > 0, shape.sinks)
    declaration = backend.declaration
    if declared:
        declaration = replace(declaration, missing=None)
    if reason := why_not(declaration, needs, shape.geometry, declared or device):
        return reason
    want, kv_want = _oracle(shape, tuple(rows), seed)
    batch, pool = prepare(shape, rows, seed)
    layer = layer_inputs(shape, batch, seed)
    there = torch.device(device)
    kv = pool.to(there, copy=True)
    q, k, v = (x.to(there) for x in (layer.q, layer.k, layer.v))
    call = layer.call
    if call.sinks_H is not None:
        call = replace(call, sinks_H=call.sinks_H.to(there))
    plan = backend.plan(batch, shape.geometry, there)
    got = backend.attend(q, k, v, kv, plan, call).cpu()
    # A GPU's exponentials and sums in another order cost fp32 a little more.
    fp32 = 2e-6 if there.type == "cpu" else 1e-5
    tolerance = fp32 if shape.dtype == "float32" else 2e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    kv_got = kv.cpu()
    assert torch.equal(kv_got.nan_to_num(nan=7e7), kv_want.nan_to_num(nan=7e7)), "the pool differs"
    assert not torch.equal(kv_got.nan_to_num(), pool.nan_to_num()), "nothing was written"
    return None


def check(
    backend: AttentionBackend,
    shape: Shape,
    rows: list[tuple[int, int]],
    seed: int = 0,
    device: str = "cpu",
    declared: str | None = None,
) -> None:
    """``agree`` as a test: a case that is not declared is skipped."""
    import pytest  # the GPU check needs ``agree`` on machines without pytest

    if reason := agree(backend, shape, rows, seed, device, declared):
        pytest.skip(reason)

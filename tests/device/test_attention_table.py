"""Every backend against the oracle, on one table of mixed batches and features.

The pool starts as NaN everywhere; only the cells that a row's context owns are filled. So a
backend that reads one cell too many, of its own page or of a stranger's, answers NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.attention import LayerCall, Needs, why_not
from kernels.attention_op import BACKENDS, PagedStep
from kernels.attn_reference import ReferenceAttention
from kernels.batch import Batch, pack
from protocol.step import StepRow
from protocol.types import KvGeometry, TicketId

LAYERS, VOCAB = 3, 50
TESTED = [b for b in BACKENDS if b.declaration.name != "reference"]


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


def check(backend, shape: Shape, rows: list[tuple[int, int]], seed: int = 0) -> None:
    needs = Needs(shape.window > 0, shape.softcap > 0, shape.sinks)
    if reason := why_not(backend.declaration, needs, shape.geometry, "cpu"):
        pytest.skip(reason)
    batch, pool = prepare(shape, rows, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    n_tokens = len(batch.tokens_T)

    def draw(heads: int) -> torch.Tensor:
        x = torch.randn(heads, n_tokens, shape.head_dim, generator=generator)
        return x.to(pool.dtype).transpose(0, 1)  # as strided as a model's own tensors

    sinks = torch.randn(shape.heads, generator=generator) if shape.sinks else None
    call = LayerCall(1, 0.3, shape.window, shape.softcap, sinks)
    q, k, v = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)
    results = []
    for tested in (ReferenceAttention(), backend):
        kv = pool.clone()
        plan = tested.plan(batch, shape.geometry, torch.device("cpu"))
        out = PagedStep(kv, plan, tested.declaration.name).attend(q, k, v, call)
        results.append((out, kv))
    (want, kv_want), (got, kv_got) = results
    tolerance = 2e-6 if shape.dtype == "float32" else 2e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert torch.equal(kv_got.nan_to_num(nan=7e7), kv_want.nan_to_num(nan=7e7))
    assert not torch.equal(kv_got.nan_to_num(), pool.nan_to_num())  # something was written


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", TESTED, ids=lambda b: b.declaration.name)
def test_backend_agrees_with_the_oracle(backend, shape, rows) -> None:
    check(backend, shape, rows)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("backend", TESTED, ids=lambda b: b.declaration.name)
def test_random_mixtures_agree_with_the_oracle(backend, seed) -> None:
    shapes = list(SHAPES.values())
    check(backend, shapes[seed % len(shapes)], random_rows(seed), seed)


def test_oracle_equals_a_hand_computed_case() -> None:
    """Two positions, one head: weights e^1 : e^0 over values 1 and 3."""
    geometry = KvGeometry(1, 1, 1, 4, "float32")
    pool = torch.full((1, 1, 2, 4, 1, 1), float("nan"))
    pool[0, 0, 0, 0], pool[0, 0, 1, 0] = 1.0, 1.0
    rows = [StepRow(TicketId("a"), [1], 1, [0])]
    batch = pack(rows, 4, 1, VOCAB, torch.device("cpu"))
    one = torch.ones(1, 1, 1)
    oracle = ReferenceAttention()
    plan = oracle.plan(batch, geometry, torch.device("cpu"))
    out = oracle.attend(one, 0 * one, 3 * one, pool, plan, LayerCall(0, 1.0))
    e = torch.e
    assert out.item() == pytest.approx((e * 1 + 1 * 3) / (e + 1), abs=1e-6)
    assert pool[0, 0, 1, :2, 0, 0].tolist() == [1.0, 3.0]


def test_operator_declares_its_mutation_and_passes_torchs_own_checks() -> None:
    shape = SHAPES["gqa"]
    batch, pool = prepare(shape, ROWS["mixed"], 0)
    pool = pool.nan_to_num()
    backend = TESTED[0]
    plan = backend.plan(batch, shape.geometry, torch.device("cpu"))
    n = len(batch.tokens_T)
    q, k = torch.randn(n, shape.heads, shape.head_dim), torch.randn(n, 2, shape.head_dim)
    name = backend.declaration.name
    arguments = (q, k, k.clone(), pool, plan.tensors, plan.numbers, name, 0, 0.25, 0, 0.0, None)
    torch.library.opcheck(
        torch.ops.tandem.paged_attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )

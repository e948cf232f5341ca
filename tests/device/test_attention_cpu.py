"""The CPU backends beyond the common table: random mixtures, shared pages, neighbours, bad numbers,
cut rows and several threads, and vectors of other widths than this machine's."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_cases import VOCAB, Shape, check, layer_inputs, prepare

from kernels import attn_compiled
from kernels.attention import LayerCall
from kernels.attn_cpu import CpuAttention
from kernels.attn_numba import NumbaAttention
from kernels.attn_reference import ReferenceAttention
from kernels.batch import pack
from protocol.step import StepRow
from protocol.types import TicketId

CPU = torch.device("cpu")
BACKENDS = [NumbaAttention(), CpuAttention()]
GQA, MHA, MQA = Shape(), Shape(heads=3, kv_heads=3), Shape(heads=6, kv_heads=1, head_dim=8)
SHAPES = (GQA, MHA, MQA, Shape(heads=9, kv_heads=3, head_dim=64), replace(GQA, dtype="bfloat16"))
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.declaration.name)


def _long(value: object):
    return pytest.param(value, marks=pytest.mark.long)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_case(seed: int) -> tuple[Shape, list[tuple[int, int]]]:
    """A shape with random features, and rows whose ends lie around pages and inner blocks."""
    rng = random.Random(seed)
    page = rng.choice((1, 3, 4, 16))
    shape = replace(
        rng.choice(SHAPES),
        page_size=page,
        window=rng.choice((0, 0, 1, 2, 7, 33, 100)),
        softcap=rng.choice((0.0, 0.0, 1.5, 30.0)),
        sinks=rng.random() < 0.3,
    )
    edges = (0, 1, page - 1, page, page + 1, 2 * page, 31, 32, 33, 64)
    rows = [
        (rng.choice(edges), rng.choice((1, 1, 1, 2, 3, page, page + 1)))
        for _ in range(rng.randint(1, 5))
    ]
    return shape, rows


@pytest.mark.parametrize("part", [*range(2), *(_long(part) for part in range(2, 10))])
@each_backend
def test_random_mixtures_agree_with_the_oracle(backend, part) -> None:
    for seed in range(20 * part, 20 * part + 20):
        check(backend, *random_case(seed), seed)


@pytest.mark.parametrize("dtype", [_long("float32"), _long("bfloat16"), "float16"])
@each_backend
def test_ragged_heads_of_every_dtype(backend, dtype) -> None:
    """20 numbers are a vector of 16 and one of 4, and no whole tile of 8."""
    shape = Shape(heads=10, kv_heads=2, head_dim=20, dtype=dtype, window=50, softcap=5.0)
    check(backend, shape, [(60, 1), (0, 1), (33, 40), (3, 2)])


@each_backend
def test_rows_that_share_pages(backend) -> None:
    """Two rows over the same first pages (a prefix hit) see what each would see alone."""
    batch, pool = prepare(GQA, [(8, 1), (12, 1)], 3)
    own = batch.pages_R[0][:2].tolist()
    rows = [
        StepRow(TicketId("a"), [1], 8, (*own, 0)),
        StepRow(TicketId("b"), [1] * 5, 8, (*own, 1, 2)),
        StepRow(TicketId("c"), [1], 8, (*own, 3)),
    ]
    free = [p for p in range(len(pool)) if p not in own]
    rows = [replace(row, pages=(*own, *(free.pop() for _ in row.pages[2:]))) for row in rows]
    pool = pool.nan_to_num()
    batch = pack(rows, GQA.page_size, len(pool), VOCAB, CPU)
    layer = layer_inputs(GQA, batch, 4)
    outs = []
    for tested in (ReferenceAttention(), backend):
        plan = tested.plan(batch, GQA.geometry, CPU)
        outs.append(tested.attend(layer.q, layer.k, layer.v, pool.clone(), plan, layer.call))
    torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=2e-6)


@each_backend
def test_a_row_does_not_depend_on_its_neighbours(backend) -> None:
    rows = [(9, 1), (0, 7), (70, 1), (33, 40), (3, 2)]
    batch, pool = prepare(GQA, rows, 5)
    layer = layer_inputs(GQA, batch, 5)
    plan = backend.plan(batch, GQA.geometry, CPU)
    together = backend.attend(layer.q, layer.k, layer.v, pool.clone(), plan, layer.call)
    for r, (start, n) in enumerate(rows):
        step_row = StepRow(TicketId("x"), [1] * n, start, batch.pages_R[r].tolist())
        single = pack([step_row], GQA.page_size, len(pool), VOCAB, CPU)
        own = slice(int(batch.q_start_R[r]), int(batch.q_start_R[r]) + n)
        q, k, v = (x[own] for x in (layer.q, layer.k, layer.v))
        plan = backend.plan(single, GQA.geometry, CPU)
        alone = backend.attend(q, k, v, pool.clone(), plan, layer.call)
        torch.testing.assert_close(together[own], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["key", "value"])
@each_backend
def test_a_number_that_is_none_stays_in_its_row(backend, where, bad) -> None:
    rows = [(40, 1), (40, 1), (40, 3), (40, 3)]
    batch, pool = prepare(GQA, rows, 6)
    layer = layer_inputs(GQA, batch, 6)
    plan = backend.plan(batch, GQA.geometry, CPU)
    clean = backend.attend(layer.q, layer.k, layer.v, pool.clone(), plan, layer.call)
    half = 0 if where == "key" else 1
    for r in (0, 2):
        pool[batch.pages_R[r][3], layer.call.layer, half, 1] = bad
    got = backend.attend(layer.q, layer.k, layer.v, pool, plan, layer.call)
    for r, (_, n) in enumerate(rows):
        own = slice(int(batch.q_start_R[r]), int(batch.q_start_R[r]) + n)
        if r in (1, 3):
            assert torch.equal(got[own], clean[own])
        elif bad != float("-inf") or where == "value":  # a key of -inf may also mean: weight 0
            assert not got[own].isfinite().all()


@each_backend
def test_logits_that_leave_nothing_to_divide_by_stay_in_their_row(backend) -> None:
    """All logits of a row minus infinity: its weights sum to nothing, and only its own."""
    rows = [(40, 1), (40, 1), (40, 3), (40, 3)]
    batch, pool = prepare(GQA, rows, 7)
    layer = layer_inputs(GQA, batch, 7)
    plan = backend.plan(batch, GQA.geometry, CPU)
    clean = backend.attend(layer.q, layer.k, layer.v, pool.clone(), plan, layer.call)
    owns = [slice(int(s), int(s) + n) for s, (_, n) in zip(batch.q_start_R, rows, strict=True)]
    for r in (0, 2):
        pool[batch.pages_R[r], :, 0] = 1e38
        layer.k[owns[r]] = 1e38
        layer.q[owns[r]] = -1e10
    got = backend.attend(layer.q, layer.k, layer.v, pool, plan, layer.call)
    for r in (1, 3):
        assert torch.equal(got[owns[r]], clean[owns[r]])


@pytest.mark.parametrize("window", [0, 200])
@pytest.mark.usefixtures("two_threads")
def test_long_contexts_are_cut_and_joined(window) -> None:
    shape = replace(GQA, page_size=16, window=window, sinks=True)
    rows = [(700, 1), (5, 1), (500, 1), (250, 150)]
    backend = NumbaAttention()
    batch, _ = prepare(shape, rows, 7)
    n_partials, *threads = backend.plan(batch, shape.geometry, CPU).numbers
    assert threads == [2, 2] and n_partials >= 4
    check(backend, shape, rows, 7)


@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_compute_at_once() -> None:
    """Two workers in one process do not share scratch memory, counters or teams."""
    shape = replace(GQA, page_size=16)
    batch, pool = prepare(shape, [(700, 1), (400, 1), (200, 170)], 8)
    layer = layer_inputs(shape, batch, 8)
    backend = NumbaAttention()
    plan = backend.plan(batch, shape.geometry, CPU)

    def attend() -> torch.Tensor:
        return backend.attend(layer.q, layer.k, layer.v, pool.clone(), plan, layer.call)

    want, wrong = attend(), []

    def many() -> None:
        wrong.extend(i for i in range(20) if not torch.equal(attend(), want))

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("lanes", [8, _long(4)])
def test_vectors_of_other_processors(lanes, monkeypatch) -> None:
    """AVX2 and narrower machines have other tiles; this one can run them all."""
    monkeypatch.setattr(attn_compiled, "machine", lambda: (lanes, 16))
    attn_compiled.compiled.cache_clear()
    try:
        shape = Shape(heads=6, kv_heads=2, head_dim=20, window=50)
        check(NumbaAttention(), shape, [(60, 1), (0, 1), (33, 40), (3, 2)])
        check(NumbaAttention(), replace(shape, softcap=3.0, window=0), [(70, 1), (20, 30)])
    finally:
        attn_compiled.compiled.cache_clear()


def test_inputs_may_be_strided_in_every_dimension() -> None:
    batch, pool = prepare(GQA, [(5, 1), (3, 4)], 9)
    layer = layer_inputs(GQA, batch, 9)
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (layer.q, layer.k, layer.v)]
    assert odd[0].stride(2) != 1
    backend, outs = NumbaAttention(), []
    for q, k, v in ((layer.q, layer.k, layer.v), odd):
        plan = backend.plan(batch, GQA.geometry, CPU)
        outs.append(backend.attend(q, k, v, pool.clone(), plan, LayerCall(2, 0.2)))
    assert torch.equal(*outs)

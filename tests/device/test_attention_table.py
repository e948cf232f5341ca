"""Every backend of this device against the oracle, on the table of mixed batches and features."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ROWS, SHAPES, VOCAB, check, prepare, random_rows

from kernels.attention import LayerCall
from kernels.attention_op import BACKENDS
from kernels.attn_reference import ReferenceAttention
from kernels.batch import pack
from protocol.step import StepRow
from protocol.types import KvGeometry, TicketId

TESTED = [
    b for b in BACKENDS if b.declaration.name != "reference" and "cpu" in b.declaration.devices
]


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

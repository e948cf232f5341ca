"""Our Triton kernels in Triton's interpreter against the oracle: no GPU is needed.

Two ways of cutting the work: as on a GPU that few programs keep busy (no joins), and with tiny
tiles and many programs (every loop runs several times, every context is split and joined).
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import ROWS, SHAPES, Shape, check, layer_inputs, prepare, random_rows
from triton_kernels_as import interpreted_kernels

from kernels.attn_triton import Tile, TritonAttention, n_parts
from kernels.batch import pad

WHOLE = TritonAttention(programs=1)
SPLIT = TritonAttention(programs=64, tiles=lambda one, dtype, head_dim: Tile(16, 4, 4, 2))
CUTS = {"whole": WHOLE, "split": SPLIT}
FP16 = Shape(dtype="float16")
LONG_ROWS = [(150, 1), (70, 40), (0, 130), (200, 3)]  # several blocks of the real tiles


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted_kernels():
        yield


@pytest.mark.parametrize("shape", ["smollm2", "bfloat16", "all of them"])
@pytest.mark.parametrize("cut", CUTS)
def test_mixed_batch_agrees_with_the_oracle(cut, shape) -> None:
    check(CUTS[cut], SHAPES[shape], ROWS["mixed"], declared="cuda")


@pytest.mark.long
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cut", CUTS)
def test_the_whole_table_agrees_with_the_oracle(cut, shape, rows) -> None:
    check(CUTS[cut], SHAPES[shape], ROWS[rows], declared="cuda")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cut", CUTS)
def test_random_mixtures_agree_with_the_oracle(cut, seed) -> None:
    shapes = [*SHAPES.values(), FP16]
    check(CUTS[cut], shapes[seed % len(shapes)], random_rows(seed), seed, declared="cuda")


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("features", ["plain", "all"])
def test_real_tiles_over_long_rows_agree_with_the_oracle(features, head_dim) -> None:
    shape = Shape(4, 2, head_dim, 16)
    if features == "all":
        shape = Shape(4, 2, head_dim, 16, window=33, softcap=3.0, sinks=True)
    check(TritonAttention(programs=64), shape, LONG_ROWS, declared="cuda")


@pytest.mark.parametrize("cut", CUTS)
def test_padding_rows_write_nothing_and_change_nothing(cut) -> None:
    shape = SHAPES["all of them"]
    batch, pool = prepare(shape, ROWS["decode, very unequal"], 0)
    padded = pad(batch, 8, 100)
    layer = layer_inputs(shape, padded, 0)
    n = len(batch.q_len_R)
    results = []
    for run, size in ((batch, n), (padded, 8)):
        kv = pool.clone()
        plan = CUTS[cut].plan(run, shape.geometry, torch.device("cpu"))
        out = CUTS[cut].attend(layer.q[:size], layer.k[:size], layer.v[:size], kv, plan, layer.call)
        results.append((out, kv.nan_to_num(nan=7e7)))
    (plain, kv_plain), (with_padding, kv_padded) = results
    assert torch.equal(kv_plain, kv_padded)
    torch.testing.assert_close(with_padding[:n], plain, atol=1e-6, rtol=1e-6)
    assert (with_padding[n:] == 0).all()


def test_contexts_are_split_only_where_programs_are_few() -> None:
    assert n_parts(programs=8, wanted=264, positions=8192, block=64) == 32
    assert n_parts(programs=512, wanted=264, positions=8192, block=64) == 1
    assert n_parts(programs=1, wanted=264, positions=512, block=64) == 2
    assert n_parts(programs=64, wanted=264, positions=131072, block=64) == 5

"""Every backend of a CUDA device against the oracle, on the same table as all others."""

from __future__ import annotations

import pytest
from attention_cases import ROWS, ROWS_256, SHAPES, SHAPES_256, check, random_rows

from kernels.attention_op import BACKENDS

pytestmark = pytest.mark.gpu
ON_GPU = {b.declaration.name: b for b in BACKENDS if "cuda" in b.declaration.devices}
ANY_PAGE = [n for n, b in ON_GPU.items() if b.declaration.page_multiple == 1 and n != "reference"]
LARGE_PAGES = [n for n, b in ON_GPU.items() if b.declaration.page_multiple > 1]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ANY_PAGE)
def test_backend_agrees_with_the_oracle(name, shape, rows) -> None:
    check(ON_GPU[name], SHAPES[shape], ROWS[rows], device="cuda")


@pytest.mark.parametrize("rows", ROWS_256)
@pytest.mark.parametrize("shape", SHAPES_256)
@pytest.mark.parametrize("name", LARGE_PAGES)
def test_backend_with_large_pages_agrees_with_the_oracle(name, shape, rows) -> None:
    check(ON_GPU[name], SHAPES_256[shape], ROWS_256[rows], device="cuda")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ANY_PAGE)
def test_random_mixtures_agree_with_the_oracle(name, seed) -> None:
    shapes = list(SHAPES.values())
    check(ON_GPU[name], shapes[seed % len(shapes)], random_rows(seed), seed, device="cuda")

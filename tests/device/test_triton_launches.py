"""The launches of our Triton backend as a GPU's driver would see them, compiled but not run.

Everything up to the driver is real: argument types, specialisation, options, the compiler for
sm_90. So a wrong argument is found here, and so is a kernel that would be compiled anew, seconds
long, in the middle of serving.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_cases import Shape, layer_inputs, prepare
from triton_kernels_as import NAME, load

from kernels.attn_triton import TritonAttention

triton = pytest.importorskip("triton")
BF16 = Shape(8, 2, 64, 16, "bfloat16")
BACKEND = TritonAttention(programs=264)


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The compiled module, launched against a driver that has an H100 and no memory."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    module = load(interpreted=False)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    monkeypatch.setitem(sys.modules, NAME, module)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(
        JITFunction,
        "__getitem__",
        lambda self, grid: (
            lambda *args, **kwargs: self.run(*args, grid=grid, warmup=True, **kwargs)
        ),
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "triton")
        yield module


def compiled(kernel) -> int:
    """How many versions of a kernel there are."""
    return sum(len(cache[0]) for cache in kernel.device_caches.values())


def run(rows: list[tuple[int, int]], layers=(0, 1)) -> None:
    batch, pool = prepare(BF16, rows, 0)
    layer = layer_inputs(BF16, batch, 0)
    plan = BACKEND.plan(batch, BF16.geometry, torch.device("cpu"))
    for number in layers:
        BACKEND.attend(layer.q, layer.k, layer.v, pool, plan, replace(layer.call, layer=number))


def test_sizes_layers_and_contexts_do_not_compile_anew(kernels) -> None:
    run([(3, 1), (0, 5)])
    assert compiled(kernels.attend) == 2  # rows of one token, rows of several
    run([(17, 1), (1, 1), (0, 1), (16, 33), (5, 2), (48, 16)], layers=(0, 1, 2))
    run([(1, 1)])
    run([(0, 1), (0, 2), (0, 3)])
    assert compiled(kernels.attend) == 2
    assert compiled(kernels.join) == 0


@pytest.mark.long
def test_contexts_that_are_cut_into_parts_compile_once_for_any_number_of_parts(kernels) -> None:
    run([(600, 1), (590, 3)])
    run([(900, 1), (3, 1), (810, 20)])
    assert compiled(kernels.attend) == 2
    assert compiled(kernels.join) == 2  # its tokens per item differ

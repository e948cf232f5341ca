"""Our Triton kernels compile for an H100 (sm_90) without one: tensor cores, registers, memory.

Every specialisation that the tile table yields is compiled to a cubin; its registers, spills and
shared memory are read from the cubin and printed (`pytest -s`).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from triton_kernels_as import load

from kernels.attn_triton import tile

triton = pytest.importorskip("triton")
SHARED_LIMIT = 227 * 1024  # bytes one program may use on sm_90
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
KERNELS = load(interpreted=False)


def options(window=False, softcap=False, sinks=False, split=False) -> dict[str, bool]:
    return {"WINDOW": window, "SOFTCAP": softcap, "SINKS": sinks, "SPLIT": split}


FEATURES = {
    "plain": options(),
    "split": options(split=True),
    "window": options(window=True),
    "softcap": options(softcap=True),
    "sinks": options(sinks=True),
    "all": options(True, True, True, True),
}
SIXTEEN_BITS = [
    *(("bfloat16", 128, name) for name in FEATURES),
    *(("bfloat16", head_dim, name) for head_dim in (64, 256) for name in ("plain", "all")),
    ("float16", 128, "plain"),
]


def compiled(kernel, constants, pointers, warps, stages=2, floats=()):
    """The kernel for sm_90 with 16-byte-aligned pointers and strides, as a model's tensors are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = pointers.get(name, "fp32" if name in floats else "i32")
        if name in pointers or name.endswith(("_token", "_head")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    how = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=how)


def attend(dtype: str, head_dim: int, one_token: bool, features: dict[str, bool], group: int = 4):
    t = tile(one_token, getattr(torch, dtype), head_dim)
    constants = {
        **features,
        "LAYERS": 32,
        "PAGE": 16,
        "KV": 8,
        "GROUP": group,
        "HEAD": head_dim,
        "BLOCK_Q": 1 if one_token else max(t.lines // group, 8),
        "BLOCK_G": max(t.lines, group) if one_token else group,
        "BLOCK_N": t.positions,
        "BLOCK_D": head_dim,
    }
    pointers = {name: f"*{SHORT[dtype]}" for name in ("q", "k", "v", "kv", "out", "sinks")}
    pointers |= {"part_acc": "*fp32", "part_ml": "*fp32"}
    pointers |= {"items": "*i32", "rows": "*i32", "table": "*i32"}
    floats = ("scale", "softcap")
    return compiled(KERNELS.attend, constants, pointers, t.warps, t.stages, floats)


def spilled_bytes(kernel, folder: Path) -> int:
    """Registers are 255 at most by hardware; what does not fit lies on the stack."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    run = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", run.stdout))
    print(f"registers {found['REG']}, stack {found['STACK']}, shared {kernel.metadata.shared}")
    return int(found["STACK"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Compiles anew: a cached kernel would prove nothing about this machine's compiler."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "triton")
        yield


def test_prompt_rows_of_an_8b_shape_use_hopper_tensor_cores_without_spills(tmp_path) -> None:
    kernel = attend("bfloat16", 128, False, FEATURES["plain"])
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert "cp.async" in kernel.asm["ptx"]  # the next pages' cells load while these are used
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.long
@pytest.mark.parametrize("one_token", [True, False], ids=["one token", "several"])
@pytest.mark.parametrize(("dtype", "head_dim", "features"), SIXTEEN_BITS)
def test_16_bit_kernels_use_tensor_cores_without_spills(
    dtype, head_dim, one_token, features, tmp_path
) -> None:
    kernel = attend(dtype, head_dim, one_token, FEATURES[features])
    assert ("mma.sync" if one_token else "wgmma.mma_async") in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_LIMIT
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.long
@pytest.mark.parametrize("one_token", [True, False], ids=["one token", "several"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_fp32_kernels_compile_and_keep_full_precision(head_dim, one_token, tmp_path) -> None:
    kernel = attend("float32", head_dim, one_token, FEATURES["plain"])
    assert "tf32" not in kernel.asm["ptx"]
    assert kernel.metadata.shared <= SHARED_LIMIT
    spilled_bytes(kernel, tmp_path)  # printed: fp32 is for exactness


@pytest.mark.long
@pytest.mark.parametrize("group", [1, 16])
def test_other_head_groupings_compile_without_spills(group, tmp_path) -> None:
    kernel = attend("bfloat16", 128, False, FEATURES["plain"], group)
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.long
def test_the_joining_kernel_compiles(tmp_path) -> None:
    constants = {"HEADS": 32, "HEAD": 128, "BLOCK_Q": 1, "BLOCK_D": 128, "BLOCK_S": 32}
    pointers = {"out": "*bf16", "part_acc": "*fp32", "part_ml": "*fp32"}
    pointers |= {"items": "*i32", "rows": "*i32"}
    kernel = compiled(KERNELS.join, constants, pointers, warps=4)
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.long
def test_addresses_in_a_pool_beyond_2_to_the_31_are_64_bits() -> None:
    """The product of page number and page size is a 64-bit multiplication."""
    kernel = attend("bfloat16", 128, True, FEATURES["plain"])
    assert re.search(r"arith\.muli [^\n]*i64", kernel.asm["ttir"])

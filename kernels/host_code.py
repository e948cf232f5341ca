"""Machine code for this host: compiles IR text, and finds the OpenMP team that torch computes with.

This file owns what depends on the machine: which register tile it can run, the compiled code,
which lives as long as the process, and the address of the OpenMP runtime's entry. It must never
start threads of its own: a second pool beside torch's would spin on the same cores.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

from kernels import norm_ir, tile_ir
from kernels.tile_ir import Tile

_OPTIMISE = 2
# CPUs with one of these multiply such numbers themselves; torch knows how, we would widen them.
_MULTIPLIERS = {
    "bfloat16": ("avx512bf16", "amx-bf16", "bf16"),
    "float16": ("avx512fp16", "amx-fp16", "fullfp16"),
}
_compiled: list[Any] = []  # engines own the code's memory


@cache
def register_tile(depth: int, dtype: str) -> Tile | None:
    """The tile for weights of this depth and dtype on this CPU, None where it has no such code.

    16 or 8 rows of accumulators leave room for one vector of x and a broadcast weight among 32 or
    16 registers. Rows that lie a multiple of 4 KiB apart share one set of 8 ways in the first
    cache, so there may be no more than 8 of them. (Measured at depth 4,096: 8 rows take 0.4 times
    what 16 take.) Without fused multiply-add the code would call a library per element.
    """
    features = binding.get_host_cpu_features()
    lanes: tuple[int, ...]
    if features.get("avx512f") and features.get("avx512vl"):
        rows, lanes = 16, (4, 8, 16)
    elif features.get("avx2") and features.get("fma") and features.get("f16c"):
        rows, lanes = 8, (4, 8)
    elif features.get("neon"):
        rows, lanes = 16, (4,)
    else:
        return None
    pairs = dtype == "bfloat16" and bool(features.get("avx512bf16")) and len(lanes) == 3
    if not pairs and any(features.get(name) for name in _MULTIPLIERS.get(dtype, ())):
        return None
    bytes_apart = depth * (2 if pairs else 4)
    if (pairs and depth % 2) or depth < 1:
        return None
    return Tile(depth, dtype, min(rows, 8) if bytes_apart % 4096 == 0 else rows, lanes, pairs)


@cache
def team() -> int:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch uses, 0 where it has none.

    A symbol looked up through a library is searched in what that library was linked with, so two
    runtimes in one process are not mixed up.
    """
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(folder.glob("libtorch_cpu.*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


@cache
def compiled(tile: Tile) -> Any:
    """A function over ``tile_ir.RUN_ARGUMENTS`` that gives up Python's lock while it runs."""
    return _function(tile_ir.module_ir(tile), tile_ir.RUN, len(tile_ir.RUN_ARGUMENTS))


@cache
def compiled_norm(norm: norm_ir.Norm) -> Any:
    """A function over ``norm_ir.RUN_ARGUMENTS`` that gives up Python's lock while it runs."""
    return _function(norm_ir.norm_ir(norm), norm_ir.RUN, len(norm_ir.RUN_ARGUMENTS))


def _function(text: str, name: str, n_arguments: int) -> Any:
    """The function ``name`` of ``text``; it takes 64-bit integers and returns nothing."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(text)
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=_OPTIMISE,
    )
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _compiled.append(engine)
    kind = ctypes.CFUNCTYPE(None, *([ctypes.c_int64] * n_arguments))
    return kind(engine.get_function_address(name))

"""Compiles paged attention for this processor and keeps the machine code on disk.

This file owns which constants the loops are compiled with. One model needs one set: (query heads
per KV head, head size, stored dtype). It must never run them. A layer of a step calls ``store``
first, then every thread enters ``rows`` and ``prompts``, then one calls ``merge``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding
import torch
from numba import cfunc, types

from kernels import attn_simd, attn_table, simd
from kernels.attn_prompts import make_prompts
from kernels.attn_rows import make_merge, make_rows, make_store
from kernels.attn_table import BLOCK, CACHE_LINE, ROW_BLOCK, SPARE
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loops:
    """Addresses of compiled functions ``void f(int64 table)``, and what a thread must have."""

    store: int
    rows: int
    prompts: int
    merge: int
    scratch: Callable[[int], int]  # KV heads -> bytes
    keep: tuple[Any, ...]  # owns the code


_SIGNATURE = types.void(types.int64)
# The disk cache knows a function by its own text and constants; this adds the text it builds on.
_STAMP = zlib.crc32(
    b"".join(Path(str(module.__file__)).read_bytes() for module in (simd, attn_simd, attn_table))
)


def machine() -> tuple[int, int]:
    """Lanes of a vector and number of vector registers of this processor."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 32
    if features.get("avx2") and features.get("fma"):
        return 8, 16
    return 4, 16


def _reads_halves() -> bool:
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("f16c") or features.get("neon"))


# How the loops call what the pool stores.
_STORED = {
    torch.float32: simd.FLOAT32,
    torch.bfloat16: simd.BFLOAT16,
    torch.float16: simd.FLOAT16,
}


def _compile(function: Callable[[int], None]) -> Any:
    try:
        return cfunc(_SIGNATURE, cache=True)(function)
    except RuntimeError:  # nowhere to keep code on disk: neither beside this file nor in the home
        return cfunc(_SIGNATURE)(function)


@cache
def _shared() -> tuple[Any, Any]:
    """What is the same for every model."""
    return _compile(make_store(_STAMP)), _compile(make_merge(_STAMP))


@cache
def compiled(group: int, dim: int, dtype: torch.dtype) -> Loops:
    """The functions for ``group`` query heads per KV head of ``dim`` numbers, stored as ``dtype``.

    Takes seconds on a machine that compiles them first. Raises ``ConfigError`` for a dtype that
    this processor cannot read, else whatever numba raises.
    """
    width, registers = machine()
    kind = _STORED[dtype]
    if kind == simd.FLOAT16 and not _reads_halves():
        raise ConfigError("this processor has no instruction that reads float16")
    tile = (8, 3) if registers == 32 else (4, 3)
    store, merge = _shared()
    rows = _compile(make_rows(group, dim, kind, width, registers // 2, ROW_BLOCK, _STAMP))
    prompts = _compile(make_prompts(group, dim, kind, width, *tile, BLOCK, _STAMP))
    columns = tile[1] * width

    def scratch(kv_heads: int) -> int:
        heads = kv_heads * group
        a_row = heads * (2 * dim + ROW_BLOCK + 3 + 16)
        a_block = columns * (2 * dim + BLOCK + tile[0] + 5) + 2 * BLOCK * dim
        return 4 * max(a_row, a_block) + 16 * (BLOCK + SPARE) + 16 * CACHE_LINE

    at = [int(function.address) for function in (store, rows, prompts, merge)]
    return Loops(at[0], at[1], at[2], at[3], scratch, (store, rows, prompts, merge))

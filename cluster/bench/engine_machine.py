"""What this machine can do at most: matrix products and memory reads, measured in the same run.

Owns the two yardsticks that the engine's rates are held against. They are an arm among the others,
measured beside them in every repeat, because a shared machine is not always equally fast. It never
looks at an engine.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path

import torch

from cluster.bench.arms import usable_cores
from cluster.bench.engine_work import Case, Phase

_SIDE = 1024
_READ_BYTES = 256 << 20
_SECONDS = 0.3


class Machine:
    """The yardsticks as an arm: GFLOP/s where a case is prefill, GB/s where it is decode."""

    name = "machine"

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def measure(self, case: Case) -> float:
        """What bounds this kind of case."""
        return matmul_gflops(self._dtype) if case.phase is Phase.PREFILL else read_gbytes()


def matmul_gflops(dtype: str) -> float:
    """Square matrix products of this process' threads, GFLOP/s."""
    a, b = (torch.randn(_SIDE, _SIDE).to(getattr(torch, dtype)) for _ in range(2))
    out = a @ b
    begin, products = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < _SECONDS:
        torch.mm(a, b, out=out)
        products += 1
    return products * 2 * _SIDE**3 / spent / 1e9


def read_gbytes() -> float:
    """Sequential memory reads of this process' threads, GB/s."""
    data = torch.ones(_READ_BYTES // 4)
    data.sum()
    begin, reads = time.perf_counter(), 0
    while (spent := time.perf_counter() - begin) < _SECONDS:
        data.sum()
        reads += 1
    return reads * _READ_BYTES / spent / 1e9


def describe() -> dict[str, object]:
    """Processor, cores and versions, as the report prints them."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

"""The device memory that holds the KV cache: one tensor, and its pages as runs of bytes.

This file owns the tensor ``[pages, layers, 2, page_size, kv_heads, head_dim]``, its size and its
poisoning. Which page belongs to whom is ``kv_transfer.pages``' business: nothing here knows
whether a page is free.

Life of the pool: sized once at the start of a worker (``parse_memory`` and ``pages_in``),
allocated zeroed, shared by the kernels (per-layer views) and the links (byte views) until the
worker ends.

Shape suffixes: P pages, L layers, S page_size, H kv_heads, D head_dim, B bytes of one page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from protocol.errors import ConfigError
from protocol.types import KvGeometry

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")

AUTO_SHARE = 0.5
_HUGE = 2**21  # bytes of a huge page, to whose start the pool is aligned


class KvPool:
    """The pages of one rank.

    ``tensor`` is the cache itself; ``rows`` is the same memory as bytes, one row per
    page. Both live as long as the pool.
    """

    def __init__(self, geometry: KvGeometry, pages: int, device: str | torch.device = "cpu"):
        """Allocate ``pages`` zeroed pages. Raises ``ConfigError`` when the memory is not there."""
        if pages < 1:
            raise ConfigError(f"a KV pool needs at least one page, not {pages}", field="kv.memory")
        self.geometry = geometry
        self.pages = pages
        shape = (
            pages,
            geometry.layers,
            2,
            geometry.page_size,
            geometry.kv_heads,
            geometry.head_dim,
        )
        try:
            # Zeroed, not empty: what a page holds before its first write must be finite, because
            # attention may multiply it by a weight of zero.
            self.tensor = _zeros(shape, getattr(torch, geometry.dtype), torch.device(device))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"cannot allocate {pages} KV pages of {geometry.page_bytes} bytes "
                f"({_readable(pages * geometry.page_bytes)}) on {device}: "
                f"{str(error).splitlines()[0]}",
                field="kv.memory",
            ) from error
        self.rows = self.tensor.view(pages, -1).view(torch.uint8)

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.tensor.device

    def row(self, page: int) -> torch.Tensor:
        """One page as uint8 ``[page_bytes]``, without a copy."""
        return self.rows[page]

    def poison(self, pages: Iterable[int]) -> None:
        """Fill freed pages with NaN, so that a stale read shows (debug mode)."""
        for page in pages:
            self.tensor[page].fill_(float("nan"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory; a host's large pools lie in huge memory pages where the kernel has some.

    numpy asks for them (``MADV_HUGEPAGE``), torch does not. Scattered KV pages are then found with
    fewer look-ups of addresses. (Measured: attention over them reads 14.5 against 11.7 GB/s.)
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _HUGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = np.empty(size + _HUGE, np.uint8)
    skipped = -memory.ctypes.data % _HUGE
    return torch.from_numpy(memory[skipped : skipped + size]).view(dtype).view(shape).zero_()


def parse_memory(
    text: str,
    *,
    available: int,
    sharers: int = 1,
    useful: int | None = None,
    field: str = "kv.memory",
) -> int:
    """Bytes that ``kv.memory`` (or another ``field``) means on a device with ``available`` free.

    A size (``"2GiB"``, ``"500 MB"``) means itself. A share (``"80%"``) and ``"auto"`` (half) are
    taken of what is free, divided by the ``sharers`` workers on the device; ``auto`` takes no
    more than ``useful`` bytes, what the worker can fill at most. Raises ``ConfigError``.
    """
    word = text.strip()
    if word.lower() == "auto":
        share = int(available * AUTO_SHARE / sharers)
        return share if useful is None else min(share, useful)
    if match := _SHARE.fullmatch(word):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise ConfigError(
                f"{field} {text!r}: a share lies above 0% and at most at 100%", field=field
            )
        return int(available * percent / 100 / sharers)
    match = _SIZE.fullmatch(word)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f'{field} {text!r} is none of a size ("2GiB"), a share ("80%") and "auto"',
            field=field,
        )
    size = int(float(match[1]) * unit)
    if size * sharers > available:
        raise ConfigError(
            f"{field} {text!r} for each of {sharers} worker(s) is {_readable(size * sharers)}, "
            f"but only {_readable(available)} are free",
            field=field,
        )
    return size


def pages_in(geometry: KvGeometry, memory: int, *, max_model_len: int) -> int:
    """Pages that fit into ``memory`` bytes.

    Raises ``ConfigError`` with the numbers when one sequence of ``max_model_len`` tokens, the
    longest that is served, would not fit.
    """
    pages = memory // geometry.page_bytes
    needed = geometry.pages_for(max_model_len)
    if pages < needed:
        raise ConfigError(
            f"kv.memory of {_readable(memory)} holds {pages} pages ({pages * geometry.page_size} "
            f"tokens), but max_model_len {max_model_len} needs {needed} pages "
            f"({_readable(needed * geometry.page_bytes)})",
            field="kv.memory",
        )
    return pages


def available_memory(device: str | torch.device = "cpu") -> int:
    """Free bytes on a device; on the host within the limit of this process' control group."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file():
        limit_text = limit.read_text(encoding="ascii").strip()
        if limit_text != "max":
            free = min(free, max(0, int(limit_text) - int(used.read_text(encoding="ascii"))))
    return free


def _readable(size: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.upper()]:
            return f"{size / _UNITS[unit.upper()]:.2f} {unit}"
    return f"{size} bytes"

"""Linear layers on a CPU with our own matrix product, in place of torch's where it is faster.

A decode step multiplies every weight of the model with a handful of rows. MKL takes twice as long
for that as the weights take to come from memory; ``tile_ir`` does not. This file owns the exchange
of the ``forward`` of each fitting ``nn.Linear``, and the choice up to how many rows it is used. It
must never copy a weight (they stay memory-mapped, one copy for all workers of a host), change a
layer's class or parameters, or know a model family. Layers that do not fit keep torch's way, and so
does everything where llvmlite is missing.

Life: ``speed_up`` once, when the weights are where they stay. All code is compiled in it, none in a
step. The layers may then be called from any thread; scratch memory is each thread's own.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from kernels.large_outputs import LargeOutputs

try:
    from kernels import host_code
    from kernels.tile_ir import WEIGHT_DTYPES, Tile, scratch_floats

    _MISSING = ""
except ImportError as e:  # no llvmlite for this platform: torch's products serve
    _MISSING = str(e)

_ROWS_PER_PASS = 512  # bounds the scratch; the weights are read once per pass
_FEW_ROWS = 32  # up to here memory bounds the product, and ours reads it faster
_TRIAL_ROWS = 256  # decides for all larger counts
_TRIAL_OPERATIONS = 2.5e8
_TRIALS = 5
_A_TIE = 1.05  # as good as equal: then ours, whose results are the same bits in every batch
_ALIGN = 64


def speed_up(module: nn.Module) -> str:
    """Give the linear layers of a loaded model our product; a line for the start-up log.

    The parameters must stay on their device and in their dtype from here on. Blocks for the
    compilation, 0.1 to 0.2 s per distinct depth, and for a short trial of larger row counts.
    """
    if _MISSING:
        return f"linear layers: torch ({_MISSING})"
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    fitting = [(linear, tile) for linear in linears if (tile := _tile(linear)) is not None]
    if not fitting:
        return "linear layers: torch"
    scratch = _Scratch()
    most_rows = _most_rows(fitting, scratch)
    for linear, tile in fitting:
        product = _Product(linear.weight, linear.bias, tile, scratch, most_rows)
        linear.forward = product  # type: ignore[method-assign,assignment]
    reach = f"up to {most_rows} rows" if most_rows < math.inf else "any number of rows"
    others = len(linears) - len(fitting)
    rest = f", {others} by torch's" if others else ""
    return f"linear layers: {len(fitting)} by our own product for {reach}{rest}"


def _tile(linear: nn.Linear) -> Tile | None:
    """The code for this layer, or None if it must stay as it is."""
    weight, bias = linear.weight, linear.bias
    dtype = str(weight.dtype).removeprefix("torch.")
    plain = (
        type(linear) is nn.Linear
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.requires_grad
        and (bias is None or bias.dtype == weight.dtype)
    )
    if not plain or dtype not in WEIGHT_DTYPES:
        return None
    tile = host_code.register_tile(linear.in_features, dtype)
    return tile if tile is not None and tile.rows <= linear.out_features else None


class _Scratch(threading.local):
    """Packed rows of one thread, grown to the largest product so far; memory of large results."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self.outputs = LargeOutputs()

    def address(self, floats: int) -> int:
        """Where ``floats`` float32 fit, aligned; valid until the thread's next call."""
        if self._memory.numel() < floats + _ALIGN:
            self._memory = torch.empty(floats + _ALIGN, dtype=torch.float32)
        return -(-self._memory.data_ptr() // _ALIGN) * _ALIGN


class _Product:
    """What replaces the ``forward`` of one layer: ``x @ weight^T + bias`` for any leading shape."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tile: Tile,
        scratch: _Scratch,
        most_rows: float,
    ) -> None:
        self._weight, self._bias = weight, bias
        self._bias_N = torch.zeros(1) if bias is None else bias.float().contiguous()
        self._bias_step = 0 if bias is None else 1
        self._n, self._depth = weight.shape
        self._float32 = weight.dtype == torch.float32
        # One row of float16: torch has a product of its own for it, twice as fast as widening.
        self._rows = (2 if weight.dtype == torch.float16 else 1, most_rows)
        self._numbers = 2 if tile.pairs else 1  # per column of 4 bytes
        self._tile, self._scratch = tile, scratch
        self._run, self._team = host_code.compiled(tile), host_code.team()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As ``F.linear``; where that is faster, or to be asked for its errors, it is called."""
        weight, depth, n = self._weight, self._depth, self._n
        rows = x.numel() // depth
        fewest, most = self._rows
        if (
            rows < fewest
            or x.dtype != weight.dtype
            or x.shape[-1] != depth
            or x.requires_grad
            or type(x) is not torch.Tensor
        ):
            return F.linear(x, weight, self._bias)
        if rows > most:
            return self._by_torch(x, rows)
        x_MK = x.reshape(rows, depth)
        numbers = self._numbers
        if numbers == 1 and not self._float32:
            x_MK = x_MK.float()
        x_stride = x_MK.stride(0)
        if x_MK.stride(1) != 1 or x_stride % numbers:
            x_MK = x_MK.contiguous()
            x_stride = x_MK.stride(0)
        x_stride //= numbers
        y = self._scratch.outputs.empty((*x.shape[:-1], n))
        x_at, y_at = x_MK.data_ptr(), y.data_ptr()
        scratch = self._scratch.address(scratch_floats(self._tile, min(rows, _ROWS_PER_PASS)))
        for first in range(0, rows, _ROWS_PER_PASS):
            self._run(
                self._team,
                scratch,
                x_at + 4 * first * x_stride,
                x_stride,
                weight.data_ptr(),
                self._bias_N.data_ptr(),
                self._bias_step,
                y_at + 4 * first * n,
                n,
                min(rows - first, _ROWS_PER_PASS),
            )
        return y if self._float32 else y.to(weight.dtype)

    def _by_torch(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """``F.linear``, with our memory for a large result where torch would take fresh one."""
        weight, bias = self._weight, self._bias
        if not self._float32 or not self._scratch.outputs.is_large(rows * self._n):
            return F.linear(x, weight, bias)
        y = self._scratch.outputs.empty((rows, self._n))
        x_MK = x.reshape(rows, self._depth)
        if bias is None:
            torch.mm(x_MK, weight.t(), out=y)
        else:
            torch.addmm(bias, x_MK, weight.t(), out=y)
        return y.view(*x.shape[:-1], self._n)


def _most_rows(fitting: list[tuple[nn.Linear, Tile]], scratch: _Scratch) -> float:
    """Up to how many rows our product is to be used: measured, as libraries differ per CPU.

    One part of the model's most common layer stands for all; the best of alternating runs, as
    others may use the machine meanwhile.
    """
    weights = Counter[Tile]()
    for linear, tile in fitting:
        weights[tile] += linear.weight.numel()
    main = weights.most_common(1)[0][0]
    weight = next(linear.weight for linear, tile in fitting if tile == main)
    part = int(_TRIAL_OPERATIONS / (2 * _TRIAL_ROWS * main.depth))
    weight = weight[: max(part, main.rows)]
    ours = _Product(weight, None, main, scratch, math.inf)
    x = torch.ones(_TRIAL_ROWS, main.depth, dtype=weight.dtype)
    best_ours = best_torch = math.inf
    with torch.inference_mode():
        for _ in range(_TRIALS):
            started = time.perf_counter()
            ours(x)
            between = time.perf_counter()
            F.linear(x, weight)
            best_ours = min(best_ours, between - started)
            best_torch = min(best_torch, time.perf_counter() - between)
    return math.inf if best_ours <= _A_TIE * best_torch else _FEW_ROWS

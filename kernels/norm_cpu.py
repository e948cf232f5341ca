"""RMS norms on a CPU in one pass of our own code, in place of the five operators that torch runs.

In a decode step those operators are nearly all call and no arithmetic: 75 us per norm, two norms
per layer. This file owns the exchange of the ``forward`` of each module that has the structure of
such a norm and, tried on random rows at load, answers as ours does. It must never know a model
family, change a module's class or parameters, or exchange what it could not compare: a module
that answers differently keeps its own forward, and so does everything where llvmlite is missing.

Life: ``speed_up_norms`` once, when the weights are where they stay. All code is compiled in it. The
modules may then be called from any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

try:
    from kernels import host_code
    from kernels.norm_ir import DTYPES, Norm

    _MISSING = ""
except ImportError as e:  # no llvmlite for this platform: the modules' own ways serve
    _MISSING = str(e)

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_TEAM_NUMBERS = 1 << 16  # below, one thread is done before a second one is awake
_TRIAL_SCALES = (0.0, 1e-3, 0.03, 1.0, 1.0, 30.0)  # the small ones show where epsilon is added
_FLOAT32_RELATIVE = 1e-6
# Of 16-bit results this share may be rounded the other way, as sums in another order differ in
# their last bits. Rounding at other points changes a fifth of them or more.
_ROUNDED_OTHERWISE = 0.01


def speed_up_norms(module: nn.Module) -> str:
    """Give the RMS norms of a loaded model our code; a phrase for the start-up log.

    The parameters must keep their device, dtype and values from here on. Blocks for the
    compilation (0.1 s per distinct row length) and the trials.
    """
    if _MISSING:
        return f"norms: torch ({_MISSING})"
    if host_code.register_tile(64, "float32") is None:
        return "norms: torch"
    exchanged = 0
    candidates = [(m, eps) for m in module.modules() if (eps := _epsilon(m)) is not None]
    for norm, eps in candidates:
        if (fused := _agreeing(norm, eps)) is not None:
            norm.forward = fused
            exchanged += 1
    if not exchanged:
        return "norms: torch"
    others = len(candidates) - exchanged
    return f"norms: {exchanged} by our own code" + (f", {others} by torch's" if others else "")


def _epsilon(module: nn.Module) -> float | None:
    """Epsilon of a module that is built like an RMS norm in use, None of any other."""
    parameters = list(module.named_parameters())
    if [name for name, _ in parameters] != ["weight"] or module.training:
        return None
    weight = parameters[0][1]
    plain = (
        type(weight) is nn.Parameter
        and weight.dim() == 1
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and not weight.requires_grad
        and str(weight.dtype).removeprefix("torch.") in DTYPES
        and not any(True for _ in module.children())
        and not any(True for _ in module.buffers())
    )
    if not plain or not len(weight):
        return None
    found = [v for name in _EPS_NAMES if isinstance(v := getattr(module, name, None), float)]
    return found[0] if len(found) == 1 else None


def _agreeing(norm: Any, eps: float) -> _Fused | None:
    """The one of our ways that answers as ``norm`` does on rows of every size, if any."""
    weight = norm.weight
    depth, dtype = len(weight), weight.dtype
    name = str(dtype).removeprefix("torch.")
    chance = torch.Generator().manual_seed(depth)
    scales = torch.tensor(_TRIAL_SCALES)[:, None]
    # A mean that is not zero, as some norms take it away.
    x = ((torch.randn(len(_TRIAL_SCALES), depth, generator=chance) + 0.25) * scales).to(dtype)
    with torch.inference_mode():
        try:
            expected = norm(x[None])
        except Exception:  # foreign code that wants other arguments: it is not what we take it for
            return None
        ways = [(weight.float(), False), (1.0 + weight.float(), False)]
        if dtype != torch.float32:
            ways.insert(0, (weight.float(), True))
        for factor, between in ways:
            fused = _Fused(norm.forward, weight, factor, eps, Norm(depth, name, between))
            if _same(fused(x[None]), expected):
                return fused
    return None


def _same(ours: torch.Tensor, theirs: Any) -> bool:
    if type(theirs) is not torch.Tensor or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    away = (ours.double() - theirs.double()).abs()
    if ours.dtype == torch.float32:
        return bool((away <= _FLOAT32_RELATIVE * theirs.double().abs()).all())
    # Two units: one step before the factor may be two after it.
    info = torch.finfo(ours.dtype)
    near = away <= 2 * info.eps * theirs.double().abs() + info.smallest_normal * info.eps
    share = (ours != theirs).double().mean().item()
    return bool(near.all()) and share <= _ROUNDED_OTHERWISE


class _Fused:
    """What replaces the ``forward`` of one norm, for any leading shape."""

    def __init__(
        self, own: Callable[..., Any], weight: nn.Parameter, factor: Any, eps: float, norm: Norm
    ) -> None:
        self._own = own
        self._factor = factor.contiguous()  # float32; the weight itself where it is float32
        self._factor_at = self._factor.data_ptr()
        self._depth, self._dtype = norm.depth, weight.dtype
        self._eps = struct.unpack("<i", struct.pack("<f", eps))[0]
        self._run, self._team = host_code.compiled_norm(norm), host_code.team()

    def __call__(self, x: torch.Tensor, *others: Any, **named: Any) -> Any:
        """As the module's own forward; that is called for whatever was not tried."""
        depth = self._depth
        if (
            others
            or named
            or type(x) is not torch.Tensor
            or x.dtype is not self._dtype
            or not x.is_cpu
            or x.requires_grad
            or x.shape[-1] != depth
        ):
            return self._own(x, *others, **named)
        numbers = x.numel()
        y = torch.empty(x.shape, dtype=self._dtype)
        if not numbers:
            return y
        stride = depth
        if not x.is_contiguous():
            x = x.reshape(-1, depth)
            if x.stride(1) != 1:
                x = x.contiguous()
            stride = x.stride(0)
        self._run(
            self._team if numbers >= _TEAM_NUMBERS else 0,
            x.data_ptr(),
            stride,
            self._factor_at,
            y.data_ptr(),
            self._eps,
            numbers // depth,
        )
        return y

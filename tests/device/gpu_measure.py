"""How the GPU check takes times: medians of whole steps, a device's bandwidth, who used the time.

This file owns clocks and the profiler's sums. It must never decide what is good.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ATTENTION = ("attend", "join", "flash", "paged_attention")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "splitk", "mm", "matmul", "linear")


class Budget:
    """Minutes that the whole check may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(step: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median time of a whole step, host work included, after two for warming up."""
    times = []
    for i in range(repeats + 2):
        wait(device)
        started = time.perf_counter()
        step()
        wait(device)
        if i >= 2:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def alternating(
    arms: dict[str, Callable[[], object]], device: torch.device, repeats: int = 9
) -> dict[str, float]:
    """Median seconds of each arm, taken in turns so that a busy moment hits all."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(repeats + 2):
        for name, step in arms.items():
            wait(device)
            started = time.perf_counter()
            step()
            wait(device)
            if i >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def bandwidth(device: torch.device) -> float:
    """Bytes per second that the device's memory gives to reading: the best of copies and sums."""
    n = 2**30 if device.type == "cuda" else 2**24
    x = torch.ones(n, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    copied = 2 * size / step_seconds(lambda: y.copy_(x), device)
    summed = size / step_seconds(lambda: torch.sum(x, dtype=torch.float32), device)
    return max(copied, summed)


@dataclass(frozen=True)
class Shares:
    """Where one step's time went."""

    kernels: int  # kernels (operators on a CPU) run
    busy_s: float  # the device's own time
    attention: float  # shares of busy_s
    products: float


def shares(step: Callable[[], object], device: torch.device) -> Shares:
    """Profile one step."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    step()
    wait(device)
    with profile(activities=kinds) as seen:
        step()
        wait(device)
    count, total, attention, products = 0, 0.0, 0.0, 0.0
    for event in seen.key_averages():
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own <= 0 or (on_gpu and str(event.device_type).endswith("CPU")):
            continue
        count += event.count
        total += own
        name = event.key.lower()
        if any(word in name for word in ATTENTION):
            attention += own
        elif any(word in name for word in PRODUCTS):
            products += own
    whole = total or 1.0
    return Shares(count, total / 1e6, attention / whole, products / whole)

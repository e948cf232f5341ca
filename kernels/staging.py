"""Small integers of a step on their way to a device: packed on the host, copied once.

This file owns the form in which a backend's tables cross to the device: one line of 32-bit words
with named parts, so that a step costs one copy however many tables it has. It must never wait for
the device. A ``HostPlan`` lives for one step; a CUDA graph keeps the device side of one and
copies later plans of the same shape over it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import Plan

ALIGNED = 4  # words: Triton compiles a kernel anew for a pointer that is not 16-byte aligned
Words = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A plan before its copy. The last part may be as long as it likes; the others' shapes are
    those that a captured graph knows."""

    words: Words
    shapes: tuple[tuple[int, ...], ...]
    numbers: list[int]

    def to(self, device: torch.device) -> Plan:
        """The plan on ``device``: one copy, without waiting for it."""
        words = torch.from_numpy(self.words)
        if device.type != "cpu":
            words = words.pin_memory().to(device, non_blocking=True)
        return Plan(views(words, self.shapes), self.numbers)


def host_plan(parts: Sequence[np.ndarray], numbers: list[int]) -> HostPlan:
    """Lay ``parts`` (integers below 2^31 of any shape) out one after another."""
    shapes = tuple(part.shape for part in parts)
    words = np.zeros(end_of(shapes[:-1]) + parts[-1].size, dtype=np.int32)
    for part, at in zip(parts, _starts(shapes), strict=True):
        words[at : at + part.size] = part.reshape(-1)
    return HostPlan(words, shapes, numbers)


def views(words: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The parts of a line of words, as views of it."""
    return [
        words[at : at + math.prod(shape)].view(shape)
        for shape, at in zip(shapes, _starts(shapes), strict=True)
    ]


def end_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Where a part after these begins, in words."""
    return sum(-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes)


def _starts(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    return [end_of(shapes[:i]) for i in range(len(shapes))]

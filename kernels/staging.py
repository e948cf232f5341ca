"""Small integers of a step on their way to a device: packed on the host, copied once.

This file owns the form in which a backend's tables cross to the device: one line of 32-bit words
with named parts, so that a step costs one copy however many tables it has. It must never wait for
the device. A ``HostPlan`` lives for one step; a CUDA graph keeps the device side of one and
copies later plans of the same shape over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import Plan

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
    words = np.concatenate(
        [part.reshape(-1) for part in parts], dtype=np.int32, casting="same_kind"
    )
    return HostPlan(words, tuple(part.shape for part in parts), numbers)


def views(words: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The parts of a line of words, as views of it; the last may be shorter than its shape."""
    tensors, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        tensors.append(words[at : at + size].view(shape))
        at += size
    return tensors

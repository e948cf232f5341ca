"""Memory for results so large that the C library would return them to the system every time.

glibc never keeps a block above 32 MiB: the logits of 256 rows over a vocabulary of 49,152 are taken
from the kernel page by page and given back in every step, which took a third of the time of a small
model's step (24 of 65 ms, measured). This file owns blocks of that size and hands one out again
when nobody holds any tensor over it. It must never take a block that is still held.

Life of a ``LargeOutputs``: one per thread; blocks stay until a larger one is needed, so what it
keeps is what was once in use at the same time.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

_LARGE = 32 << 20  # bytes; glibc's largest M_MMAP_THRESHOLD
_UNHELD = 2  # references to a block that only the list of blocks holds: that one, and the count's


class LargeOutputs:
    """Uninitialised float32 tensors. See the file's head."""

    def __init__(self, large: int = _LARGE) -> None:
        """``large``: up to so many bytes the C library is asked."""
        self._large = large
        self._blocks: list[np.ndarray] = []

    @property
    def kept(self) -> int:
        """Bytes that it holds."""
        return sum(block.nbytes for block in self._blocks)

    def is_large(self, n: int) -> bool:
        """Whether ``n`` numbers are more than the C library keeps."""
        return 4 * n > self._large

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor whose memory is its holder's until its last view is gone."""
        n = math.prod(shape)
        if not self.is_large(n):
            return torch.empty(shape, dtype=torch.float32)
        blocks = self._blocks  # a tensor over a block holds a reference to it
        unheld = [i for i in range(len(blocks)) if sys.getrefcount(blocks[i]) == _UNHELD]
        fitting = [i for i in unheld if blocks[i].size >= n]
        if fitting:
            block = blocks[min(fitting, key=lambda i: blocks[i].size)]
        else:
            for i in reversed(unheld):
                del blocks[i]
            block = np.empty(n, dtype=np.float32)
            blocks.append(block)
        return torch.from_numpy(block[:n]).view(shape)

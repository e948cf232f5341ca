"""Copies whole pages: within the pool, out to host memory, back in.

This file owns the order of a step's copies. On a GPU they are queued on the step's stream, before
its rows, and nothing waits: a later step that reads a host page is queued behind the copy that
wrote it. It must never know why a page moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from protocol.errors import InternalError
from protocol.step import CopyKind, PageCopy


class PageCopier:
    """Over the pool ``kv`` and the host's pages ``host_kv`` (same shape but for the first number).

    For copies that do not wait, ``host_kv`` of a GPU's pool must be pinned.
    """

    def __init__(self, kv: torch.Tensor, host_kv: torch.Tensor | None) -> None:
        """Raises ``InternalError`` for host pages of another shape, dtype or place."""
        self._kv, self._host = kv, host_kv
        if host_kv is None:
            return
        if host_kv.shape[1:] != kv.shape[1:] or host_kv.dtype != kv.dtype:
            raise InternalError(
                f"host pages {tuple(host_kv.shape[1:])} {host_kv.dtype} for a pool of "
                f"{tuple(kv.shape[1:])} {kv.dtype}"
            )
        if host_kv.device.type != "cpu" or (kv.device.type == "cuda" and not host_kv.is_pinned()):
            raise InternalError("host pages must be in host memory, pinned for a GPU's pool")

    def run(self, copies: Sequence[PageCopy]) -> None:
        """Carry out ``copies`` in their order. Raises ``InternalError`` before the first if one
        of them names a page that does not exist."""
        ways = [self._way(copy) for copy in copies]
        for source, target in ways:
            target.copy_(source, non_blocking=True)

    def _way(self, copy: PageCopy) -> tuple[torch.Tensor, torch.Tensor]:
        source = self._host if copy.kind is CopyKind.FROM_HOST else self._kv
        target = self._host if copy.kind is CopyKind.TO_HOST else self._kv
        if source is None or target is None:
            raise InternalError(f"a copy {copy.kind} on a worker without host pages")
        if not 0 <= copy.source < len(source) or not 0 <= copy.target < len(target):
            raise InternalError(
                f"a copy {copy.kind} of page {copy.source} of {len(source)} to page "
                f"{copy.target} of {len(target)}"
            )
        return source[copy.source], target[copy.target]

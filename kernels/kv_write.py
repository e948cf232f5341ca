"""Writes the keys and values of a step's tokens into their cells of the KV pool.

This file owns the address of a cell: the pool ``[pages, layers, 2, page_size, kv_heads,
head_dim]`` seen as rows of one token's ``kv_heads * head_dim`` numbers. It must never touch a
cell that the step did not name.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.batch import IntArray


def cells_T(page_T: IntArray, offset_T: IntArray, layers: int, page_size: int) -> IntArray:
    """Row number of each token's layer-0 key cell; 64 bits, as pools exceed 2^31 numbers."""
    return np.asarray(page_T * (layers * 2 * page_size) + offset_T)


def write_kv(
    kv: torch.Tensor, cells: torch.Tensor, layer: int, k_TND: torch.Tensor, v_TND: torch.Tensor
) -> None:
    """Store ``k_TND`` and ``v_TND`` (``[T, kv_heads, head_dim]``) of one layer.

    ``cells`` are ``cells_T`` on the pool's device. Every cell occurs once, so order is free.
    """
    page_size, kv_heads, head_dim = kv.shape[3:]
    rows = kv.view(-1, kv_heads * head_dim)
    keys = cells + 2 * layer * page_size
    rows.index_copy_(0, keys, k_TND.reshape(-1, kv_heads * head_dim))
    rows.index_copy_(0, keys + page_size, v_TND.reshape(-1, kv_heads * head_dim))

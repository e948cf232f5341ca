"""Packs the rows of a step into one line of tokens with everything attention needs to know.

This file owns the translation from ``StepRow`` (requests, pages) to tensors and plain arrays; past
it nothing knows requests. It must never look into the KV pool. A ``Batch`` is built once per
step, read by every layer, and dropped.

Shape suffixes: T packed tokens of the step, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protocol.errors import InternalError
from protocol.step import StepRow

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, packed. Row ``r`` owns tokens ``q_start_R[r] .. + q_len_R[r] - 1``."""

    tokens_T: torch.Tensor  # int64, on the device
    positions_T: torch.Tensor  # int64, on the device
    page_T: IntArray  # page that takes each token's KV
    offset_T: IntArray  # and the cell inside it
    q_start_R: IntArray
    q_len_R: IntArray
    kv_len_R: IntArray  # positions that a row's last token sees, itself included
    pages_R: tuple[IntArray, ...]  # exactly the pages that hold kv_len positions
    sampled: tuple[int, ...]  # rows that want a token
    sampled_at: torch.Tensor  # int64, on the device: their last tokens' places in T


def pack(
    rows: Sequence[StepRow], page_size: int, n_pages: int, vocab_size: int, device: torch.device
) -> Batch:
    """Pack ``rows``. Raises ``InternalError`` for a row that the pool cannot hold.

    A row without tokens, a page out of range or too few pages is a scheduler's bug; it is caught
    here because past this point it would write into someone else's page.
    """
    if not rows:
        raise InternalError("a step without rows")
    q_len_R = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    start_R = np.array([row.start for row in rows], dtype=np.int64)
    q_start_R = np.cumsum(q_len_R) - q_len_R
    kv_len_R = start_R + q_len_R
    if q_len_R.min() < 1 or start_R.min() < 0:
        raise InternalError("a step row without tokens or with a negative start")

    tokens_T = np.fromiter((t for row in rows for t in row.tokens), np.int64, int(q_len_R.sum()))
    if tokens_T.min() < 0 or tokens_T.max() >= vocab_size:
        raise InternalError(f"a token id outside 0..{vocab_size - 1} in a step")
    within_T = np.arange(len(tokens_T)) - np.repeat(q_start_R, q_len_R)
    positions_T = within_T + np.repeat(start_R, q_len_R)

    pages_R = []
    for row, kv_len in zip(rows, kv_len_R.tolist(), strict=True):
        need = -(-kv_len // page_size)
        if len(row.pages) < need:
            raise InternalError(
                f"{row.ticket_id}: {len(row.pages)} pages cannot hold {kv_len} tokens"
            )
        pages_R.append(np.array(row.pages[:need], dtype=np.int64))
    table = np.concatenate(pages_R)
    if table.min() < 0 or table.max() >= n_pages:
        raise InternalError(f"a page outside 0..{n_pages - 1} in a step")
    page_count_R = np.array([len(pages) for pages in pages_R])
    first_page_R = np.cumsum(page_count_R) - page_count_R
    page_T = table[np.repeat(first_page_R, q_len_R) + positions_T // page_size]

    sampled = tuple(r for r, row in enumerate(rows) if row.sample is not None)
    last_R = q_start_R + q_len_R - 1
    return Batch(
        tokens_T=torch.from_numpy(tokens_T).to(device),
        positions_T=torch.from_numpy(positions_T).to(device),
        page_T=page_T,
        offset_T=positions_T % page_size,
        q_start_R=q_start_R,
        q_len_R=q_len_R,
        kv_len_R=kv_len_R,
        pages_R=tuple(pages_R),
        sampled=sampled,
        sampled_at=torch.from_numpy(last_R[list(sampled)]).to(device),
    )

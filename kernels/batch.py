"""Packs the rows of a step into one line of tokens with everything attention needs to know.

This file owns the translation from ``StepRow`` (requests, pages) to tensors and plain arrays; past
it nothing knows requests. It must never look into the KV pool. A ``Batch`` is built once per
step, read by every layer, and dropped.

Shape suffixes: T packed tokens of the step, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F

from kernels.page_tables import PageTables
from protocol.errors import InternalError
from protocol.step import StepRow

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, packed. Row ``r`` owns tokens ``q_start_R[r] .. + q_len_R[r] - 1``.

    A padding row (see ``pad``) has one token and ``kv_len`` 0, its token has page -1: a backend
    that is safe in graphs writes nothing for it, reads nothing, and answers zeros.
    """

    tokens_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    page_T: IntArray  # page that takes each token's KV
    offset_T: IntArray  # and the cell inside it
    q_start_R: IntArray
    q_len_R: IntArray
    kv_len_R: IntArray  # positions that a row's last token sees, itself included
    table: IntArray  # the pages of all rows, one row after another, exactly those kv_len needs
    n_pages_R: IntArray  # how many of them belong to each row
    kv_bound: int  # no row has more positions; what grids and splits may be sized by
    sampled: tuple[int, ...]  # rows that want a token
    sampled_at: torch.Tensor  # int64: their last tokens' places in T

    @property
    def first_page_R(self) -> IntArray:
        """Where each row's pages begin in ``table``."""
        return np.cumsum(self.n_pages_R) - self.n_pages_R

    @property
    def pages_R(self) -> tuple[IntArray, ...]:
        """Exactly the pages of each row (views of ``table``)."""
        return tuple(np.split(self.table, np.cumsum(self.n_pages_R)[:-1]))

    def to(self, device: torch.device) -> Batch:
        """This batch with its tensors on ``device``: one copy, without waiting for it."""
        if self.tokens_T.device == device or device.type == "cpu":
            return self
        host = torch.cat([self.tokens_T, self.positions_T, self.sampled_at]).pin_memory()
        there = host.to(device, non_blocking=True)
        n = len(self.tokens_T)
        return replace(
            self, tokens_T=there[:n], positions_T=there[n : 2 * n], sampled_at=there[2 * n :]
        )


def pack(
    rows: Sequence[StepRow],
    page_size: int,
    n_pages: int,
    vocab_size: int,
    device: torch.device,
    tables: PageTables | None = None,
) -> Batch:
    """Pack ``rows``. Raises ``InternalError`` for a row that the pool cannot hold.

    ``tables`` remembers the page table of the step before.

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

    n_tokens = int(q_len_R.sum())
    tokens_T = np.fromiter(chain.from_iterable([row.tokens for row in rows]), np.int64, n_tokens)
    if tokens_T.min() < 0 or tokens_T.max() >= vocab_size:
        raise InternalError(f"a token id outside 0..{vocab_size - 1} in a step")
    decodes = n_tokens == len(rows)  # one token each: what is per row is per token already
    positions_T = start_R
    if not decodes:
        positions_T = np.arange(n_tokens) + np.repeat(start_R - q_start_R, q_len_R)

    n_pages_R = -(-kv_len_R // page_size)
    given_R = np.array([len(row.pages) for row in rows], dtype=np.int64)
    if (given_R < n_pages_R).any():
        r = int(np.argmax(given_R < n_pages_R))
        raise InternalError(
            f"{rows[r].ticket_id}: {given_R[r]} pages cannot hold {kv_len_R[r]} tokens"
        )
    table = (tables or PageTables()).table([row.pages for row in rows], n_pages_R)
    if table.min() < 0 or table.max() >= n_pages:
        raise InternalError(f"a page outside 0..{n_pages - 1} in a step")
    first_page_R = np.cumsum(n_pages_R) - n_pages_R
    first_page_T = first_page_R if decodes else np.repeat(first_page_R, q_len_R)
    page_T = table[first_page_T + positions_T // page_size]

    sampled = tuple([r for r, row in enumerate(rows) if row.sample is not None])
    last_R = q_start_R + q_len_R - 1
    if len(sampled) < len(rows):
        last_R = last_R[list(sampled)]
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(positions_T),
        page_T=page_T,
        offset_T=positions_T % page_size,
        q_start_R=q_start_R,
        q_len_R=q_len_R,
        kv_len_R=kv_len_R,
        table=table,
        n_pages_R=n_pages_R,
        kv_bound=int(kv_len_R.max()),
        sampled=sampled,
        sampled_at=torch.from_numpy(last_R),
    ).to(device)


def pad(batch: Batch, n_rows: int, kv_bound: int) -> Batch:
    """A decode batch (one token per row, on the host) made ``n_rows`` rows with padding rows.

    Every row is sampled. With equal ``n_rows`` and ``kv_bound`` all shapes but ``table``'s are
    equal.
    """
    n = n_rows - len(batch.q_len_R)
    if n < 0 or len(batch.tokens_T) != len(batch.q_len_R) or kv_bound < batch.kv_bound:
        raise InternalError("a batch that does not fit into its padded form")
    zeros = np.zeros(n, dtype=np.int64)
    places = np.arange(n_rows)
    return Batch(
        tokens_T=F.pad(batch.tokens_T, (0, n)),
        positions_T=F.pad(batch.positions_T, (0, n)),
        page_T=np.concatenate([batch.page_T, zeros - 1]),
        offset_T=np.concatenate([batch.offset_T, zeros]),
        q_start_R=places,
        q_len_R=np.ones(n_rows, dtype=np.int64),
        kv_len_R=np.concatenate([batch.kv_len_R, zeros]),
        table=batch.table,
        n_pages_R=np.concatenate([batch.n_pages_R, zeros]),
        kv_bound=kv_bound,
        sampled=tuple(range(n_rows)),
        sampled_at=torch.from_numpy(places),
    )

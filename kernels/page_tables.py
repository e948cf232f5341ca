"""The page table of a step, made from that of the step before.

A decode step names thousands of pages, and all but a few are those of the step before: turning them
from lists into an array anew costs 30 ns a page, 4 ms for 256 sequences of 8,192 tokens, and grows
with their lengths. This file owns the memory of the last table. It must never look into a list that
it has seen before further than at its new end: whoever makes rows only ever appends to a sequence's
list, and takes a new list when its pages become others (``kv_transfer.pages.Reservation.bound``).

Life of a ``PageTables``: one per runner; ``table`` once per step, in that step's order of rows.

Shape suffix: R rows. All arrays are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from operator import is_

import numpy as np


class PageTables:
    """See the file's head. Keeps the lists that it knows alive, so that none is mistaken."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lists: list[Sequence[int]] = []
        self._row_of: dict[int, int] = {}  # by the identity of a list
        self._n_R = np.zeros(0, dtype=np.int64)
        self._table = np.zeros(0, dtype=np.int64)

    def table(self, lists: list[Sequence[int]], n_pages_R: np.ndarray) -> np.ndarray:
        """The first ``n_pages_R[r]`` pages of every list, one row after another; not to be
        written to. Every list must have so many."""
        same = len(lists) == len(self._lists) and all(map(is_, lists, self._lists))
        if same and np.array_equal(n_pages_R, self._n_R):
            return self._table
        table = self._grown(lists, n_pages_R) if self._lists else None
        if table is None:
            own = chain.from_iterable(map(islice, lists, n_pages_R.tolist()))
            table = np.fromiter(own, np.int64, int(n_pages_R.sum()))
        if not same:
            self._row_of = {id(pages): r for r, pages in enumerate(lists)}
        self._lists, self._n_R, self._table = lists, n_pages_R, table
        return table

    def _grown(self, lists: list[Sequence[int]], n_pages_R: np.ndarray) -> np.ndarray | None:
        """The table by moving what is known in one piece; None if rows changed places or lost
        pages."""
        row_of = self._row_of
        old_R = np.array([row_of.get(id(pages), -1) for pages in lists], dtype=np.int64)
        known_R = old_R >= 0
        stay = old_R[known_R]
        if (np.diff(stay) <= 0).any() or (n_pages_R[known_R] < self._n_R[stay]).any():
            return None
        kept_R = np.zeros_like(n_pages_R)
        kept_R[known_R] = self._n_R[stay]
        stays_R = np.zeros(len(self._n_R), dtype=bool)
        stays_R[stay] = True
        # For every row its known pages, then its new ones.
        lengths = np.stack([kept_R, n_pages_R - kept_R], axis=1).ravel()
        known = np.repeat(np.arange(len(lengths)) % 2 == 0, lengths)
        table = np.empty(len(known), dtype=np.int64)
        table[known] = self._table[np.repeat(stays_R, self._n_R)]
        ends_R = np.cumsum(n_pages_R)
        for r in np.flatnonzero(kept_R < n_pages_R).tolist():
            kept, n, end = int(kept_R[r]), int(n_pages_R[r]), int(ends_R[r])
            table[end - n + kept : end] = lists[r][kept:n]
        return table

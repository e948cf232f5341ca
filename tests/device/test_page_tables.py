"""A step's page table made from the one before is the one made anew, and reads only what is new."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import torch

from kernels.batch import pack
from kernels.page_tables import PageTables
from protocol.step import StepRow
from protocol.types import SamplingParams, TicketId

CPU = torch.device("cpu")


class Watched(list[int]):
    """A page list that says which of its places were read."""

    def __init__(self, pages: list[int]) -> None:
        super().__init__(pages)
        self.read: list[int] = []

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += range(len(self))[at] if isinstance(at, slice) else [at]
        return found


def counts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def plain(lists: list[Any], n_pages: np.ndarray) -> list[int]:
    return [
        page
        for pages, n in zip(lists, n_pages.tolist(), strict=True)
        for page in islice(list.__iter__(pages) if isinstance(pages, list) else pages, n)
    ]


def test_random_lives_of_sequences_give_the_tables_made_anew() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        tables = PageTables()
        lists: list[list[int]] = []
        used: list[int] = []
        kept_steps = 0
        for _ in range(60):
            for _ in range(draw.choice((0, 0, 1, 3))):  # arrivals
                lists.append([draw.randrange(99) for _ in range(draw.randrange(1, 5))])
                used.append(draw.randrange(1, len(lists[-1]) + 1))
            for _ in range(draw.choice((0, 0, 1))):  # a departure
                if lists:
                    gone = draw.randrange(len(lists))
                    del lists[gone], used[gone]
            if lists and draw.random() < 0.1:  # preempted and back with other pages
                i = draw.randrange(len(lists))
                lists[i], used[i] = [draw.randrange(99)], 1
            if lists and draw.random() < 0.05:  # rows in another order
                order = draw.sample(range(len(lists)), len(lists))
                lists, used = [lists[i] for i in order], [used[i] for i in order]
            for i, pages in enumerate(lists):
                if draw.random() < 0.2:
                    pages.append(draw.randrange(99))
                used[i] = min(len(pages), used[i] + draw.choice((0, 0, 1)))
            if not lists:
                continue
            n_pages = counts(*used)
            got = tables.table(list(lists), n_pages)
            assert got.tolist() == plain(lists, n_pages), (seed, used)
            kept_steps += 1
        assert kept_steps > 10


def test_only_new_pages_are_read() -> None:
    tables = PageTables()
    first, second, third = Watched([1, 2, 3]), Watched([4]), Watched([5, 6])
    assert tables.table([first, second], counts(2, 1)).tolist() == [1, 2, 4]
    first.read.clear()
    second.read.clear()
    assert tables.table([first, second], counts(2, 1)).tolist() == [1, 2, 4]
    second.append(7)
    assert tables.table([first, second, third], counts(3, 2, 2)).tolist() == [1, 2, 3, 4, 7, 5, 6]
    assert (first.read, second.read, third.read) == ([2], [1], [0, 1])
    assert tables.table([second, third], counts(2, 2)).tolist() == [4, 7, 5, 6]
    assert (first.read, second.read, third.read) == ([2], [1], [0, 1])


def test_one_list_in_several_rows_and_fewer_pages_than_before() -> None:
    tables = PageTables()
    pages = [1, 2, 3]
    for n_pages in (counts(3, 2), counts(3, 3), counts(1, 2), counts(3, 1)):
        assert tables.table([pages, pages], n_pages).tolist() == plain([pages, pages], n_pages)


def test_a_list_that_died_is_not_taken_for_one_at_its_address() -> None:
    tables = PageTables()
    for page in range(200):  # each list may get the memory of one that is gone
        assert tables.table([[page, page]], counts(2)).tolist() == [page, page]


def test_packing_with_tables_is_packing_without() -> None:
    sampling = SamplingParams(max_tokens=9)
    draw = random.Random(1)
    pages = [[draw.randrange(50) for _ in range(3)] for _ in range(5)]
    tables = PageTables()
    starts = [draw.randrange(1, 9) for _ in pages]
    for step in range(40):
        rows = []
        for i, own in enumerate(pages):
            n = draw.choice((1, 1, 1, 3)) if step % 3 else 1
            while len(own) * 4 < starts[i] + n:
                own.append(draw.randrange(50))
            asked = sampling if draw.random() < 0.8 else None
            rows.append(StepRow(TicketId(f"{i}"), [7 + i] * n, starts[i], own, asked))
            starts[i] += n
        with_tables = pack(rows, 4, 50, 99, CPU, tables)
        without = pack(rows, 4, 50, 99, CPU)
        for name in without.__slots__:
            mine, other = getattr(with_tables, name), getattr(without, name)
            assert np.array_equal(np.asarray(mine), np.asarray(other)), (step, name)

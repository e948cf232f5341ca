"""The table through which compiled attention is told about a step, and how it reads it.

This file owns the places of the table (int64 each: counts, addresses, strides in bytes) and what
every loop over it shares: where positions lie, what sinks do to a sum. It must never read a cell.
A table lives for one layer of one step.
"""

from __future__ import annotations

import math

from numba import njit

from kernels.simd import get_float, get_int, set_int

# Places in the table: counters and what holds for the step, then what one layer adds. Addresses and
# strides in bytes; CAP and SCALE are fp32 in the first half of their place.
NEXT_PIECE, ROW_THREADS, NEXT_BLOCK, PROMPT_THREADS, N_TOKENS, CELLS = range(6)
N_PIECES, PIECES, N_PROMPTS, PROMPTS, N_MERGES, MERGES, PAGES, PAGE_SIZE = range(6, 14)
PAGE_STRIDE, TO_VALUES, KV_HEADS, DIM, HEAD_BYTES = range(14, 19)
CALL = 19  # the first place that a layer fills
KEYS, WINDOW, CAP, SCALE, SINKS, HEADS = range(19, 25)
Q, Q_TOKEN, Q_HEAD, OUT, SCRATCH, SCRATCH_STRIDE, PARTIALS = range(25, 32)
K, K_TOKEN, K_HEAD, V, V_TOKEN, V_HEAD = range(32, 38)
TABLE = 38

# Token, its first place in PAGES, positions from, to, all; partial result (-1: here is all).
PIECE = 6
PROMPT = 4  # first token, tokens, positions that the last one sees, first place in PAGES
MERGE = 3  # token, first partial result, how many

# Positions that go through the softmax together, in rows of one token and in prompts.
ROW_BLOCK, BLOCK = 32, 64
CACHE_LINE = 64  # bytes of a cache line
SPARE = 16  # places behind an offset table's last entry


@njit(cache=True)
def first_seen(piece: int, window: int) -> int:
    """The first position of a piece that its row's token sees."""
    first: int = get_int(piece, 2)
    return max(first, get_int(piece, 4) - window) if window else first


@njit(cache=True)
def locate(table: int, pages: int, first: int, end: int, most: int, step: int, at: int) -> None:
    """Write to ``at`` the byte offsets of up to ``most`` positions' cells from ``first`` on.

    The last one is repeated for loops that round up.
    """
    n = min(most, end - first)
    if n <= 0:
        return
    page_size, page_stride = get_int(table, PAGE_SIZE), get_int(table, PAGE_STRIDE)
    page = first // page_size
    within = first - page * page_size
    place = 0
    while place < n:
        cell = get_int(pages, page) * page_stride + within * step
        stop = min(n, place + page_size - within)
        while place < stop:
            set_int(at, place, cell)
            cell += step
            place += 1
        page += 1
        within = 0
    for extra in range(n, n + SPARE):
        set_int(at, extra, get_int(at, n - 1))


@njit(cache=True, error_model="numpy")  # a total of 0 spoils its row alone
def share(most: float, total: float, sinks: int, head: int) -> float:
    """What sums of weighted values are to be multiplied with; a sink is one more logit."""
    if sinks == 0:
        return 1.0 / total
    sink = get_float(sinks, head)
    level = max(most, sink)
    return math.exp(most - level) / (total * math.exp(most - level) + math.exp(sink - level))

"""Compiled attention for rows of one token: write the new cells, attend, join what was cut.

This file owns the walk over the context of decode rows. It must never read a cell outside the
positions that a piece names (freed pages may hold NaN), never take the GIL, never allocate.
Names in capitals are compile-time constants; STAMP tells numba's disk cache which version of the
other files the code was built from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kernels import attn_table as at
from kernels import simd
from kernels.attn_simd import LOWEST, cap_line, dot_rows, soften_line, weigh_rows
from kernels.simd import copy, get_float, get_int, set_float, set_int, take


def make_store(STAMP: int) -> Callable[[int], None]:
    """Copy the new tokens' keys and values into their cells."""

    def store(table: int) -> None:
        heads, n_bytes = get_int(table, at.KV_HEADS), get_int(table, at.HEAD_BYTES)
        to_values = get_int(table, at.TO_VALUES)
        for t in range(get_int(table, at.N_TOKENS) if STAMP else 0):
            cell = get_int(table, at.KEYS) + get_int(get_int(table, at.CELLS), t)
            key = get_int(table, at.K) + t * get_int(table, at.K_TOKEN)
            value = get_int(table, at.V) + t * get_int(table, at.V_TOKEN)
            for n in range(heads):
                copy(cell, key + n * get_int(table, at.K_HEAD), n_bytes)
                copy(cell + to_values, value + n * get_int(table, at.V_HEAD), n_bytes)
                cell += n_bytes

    return store


def make_rows(
    GROUP: int, DIM: int, KIND: int, WIDTH: int, VECTORS: int, BLOCK: int, STAMP: int
) -> Callable[[int], None]:
    """Rows of one token: take pieces of context until none is left.

    The piece after the one at hand is taken early, so that its first cells are on their way from
    memory when its turn comes. BLOCK positions go through the softmax together.
    """
    NUMBERS = DIM * simd.size(KIND)
    FLOATS = 4 * DIM
    LINE = 4 * BLOCK

    def rows(table: int) -> None:
        me = take(table + 8 * at.ROW_THREADS)
        kv_heads, window = get_int(table, at.KV_HEADS), get_int(table, at.WINDOW)
        heads = kv_heads * GROUP
        scale = get_float(table, 2 * at.SCALE)
        keys, values = (
            get_int(table, at.KEYS),
            get_int(table, at.KEYS) + get_int(table, at.TO_VALUES),
        )
        offsets = get_int(table, at.SCRATCH) + me * get_int(table, at.SCRATCH_STRIDE)
        following = offsets + 8 * (BLOCK + at.SPARE)
        query = following + 8 * (BLOCK + at.SPARE)
        logits = query + (heads * FLOATS + at.CACHE_LINE - 1) // at.CACHE_LINE * at.CACHE_LINE
        sums = logits + heads * LINE
        most = sums + heads * FLOATS
        total, factor = most + 4 * heads, most + 8 * heads
        for p in range(2 * (BLOCK + at.SPARE)):
            set_int(offsets, p, 0)

        n_pieces = get_int(table, at.N_PIECES) if STAMP else 0
        piece, located = take(table + 8 * at.NEXT_PIECE), False
        while piece < n_pieces:
            own = get_int(table, at.PIECES) + 8 * at.PIECE * piece
            after = take(table + 8 * at.NEXT_PIECE)
            token, pages = get_int(own, 0), get_int(table, at.PAGES) + 8 * get_int(own, 1)
            end, partial = get_int(own, 3), get_int(own, 5)
            position = at.first_seen(own, window)
            if not located:
                at.locate(table, pages, position, end, BLOCK, kv_heads * NUMBERS, following)
            located = False
            given = get_int(table, at.Q) + token * get_int(table, at.Q_TOKEN)
            for h in range(heads):
                for d in range(DIM):
                    number = get_float(given + h * get_int(table, at.Q_HEAD), d)
                    set_float(query + h * FLOATS, d, number * scale)
                    set_float(sums + h * FLOATS, d, 0.0)
                set_float(most, h, LOWEST)
                set_float(total, h, 0.0)
            while position < end:
                n = min(BLOCK, end - position)
                offsets, following = following, offsets
                position += n
                if position < end:
                    at.locate(table, pages, position, end, BLOCK, kv_heads * NUMBERS, following)
                elif after < n_pieces:
                    nxt = get_int(table, at.PIECES) + 8 * at.PIECE * after
                    at.locate(
                        table, get_int(table, at.PAGES) + 8 * get_int(nxt, 1),
                        at.first_seen(nxt, window), get_int(nxt, 3), BLOCK, kv_heads * NUMBERS,
                        following,
                    )  # fmt: skip
                    located = True
                dot_rows(
                    GROUP, DIM, WIDTH, KIND, kv_heads, query, keys, offsets, following, n, logits,
                    LINE,
                )  # fmt: skip
                if get_float(table, 2 * at.CAP) > 0:
                    cap_line(WIDTH, logits, heads * BLOCK, table + 8 * at.CAP)
                for h in range(heads):
                    soften_line(
                        BLOCK, WIDTH, logits + h * LINE, n, most + 4 * h, total + 4 * h,
                        factor + 4 * h,
                    )  # fmt: skip
                weigh_rows(
                    GROUP, DIM, WIDTH, KIND, VECTORS, kv_heads, logits, LINE, values, offsets,
                    following, n, sums, factor,
                )  # fmt: skip
            for h in range(heads):
                if partial < 0:
                    out = get_int(table, at.OUT) + (token * heads + h) * FLOATS
                    by = at.share(
                        get_float(most, h), get_float(total, h), get_int(table, at.SINKS), h
                    )
                else:
                    out = get_int(table, at.PARTIALS) + (partial * heads + h) * (FLOATS + 8)
                    by = 1.0
                    set_float(out, DIM, get_float(most, h))
                    set_float(out, DIM + 1, get_float(total, h))
                for d in range(DIM):
                    set_float(out, d, get_float(sums + h * FLOATS, d) * by)
            piece = after

    return rows


def make_merge(STAMP: int) -> Callable[[int], None]:
    """Join the partial results of rows that were cut."""

    def merge(table: int) -> None:
        heads, dim = get_int(table, at.HEADS), get_int(table, at.DIM)
        size = 4 * (dim + 2)
        for m in range(get_int(table, at.N_MERGES) if STAMP else 0):
            own = get_int(table, at.MERGES) + 8 * at.MERGE * m
            token, first, count = get_int(own, 0), get_int(own, 1), get_int(own, 2)
            for h in range(heads):
                part = get_int(table, at.PARTIALS) + (first * heads + h) * size
                out = get_int(table, at.OUT) + (token * heads + h) * 4 * dim
                most = get_float(part, dim)
                for i in range(1, count):
                    most = max(most, get_float(part + i * heads * size, dim))
                total = 0.0
                for d in range(dim):
                    set_float(out, d, 0.0)
                for i in range(count):
                    line = part + i * heads * size
                    by = math.exp(get_float(line, dim) - most)
                    total += get_float(line, dim + 1) * by
                    for d in range(dim):
                        set_float(out, d, get_float(out, d) + get_float(line, d) * by)
                by = at.share(most, total, get_int(table, at.SINKS), h)
                for d in range(dim):
                    set_float(out, d, get_float(out, d) * by)

    return merge

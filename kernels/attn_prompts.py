"""Compiled attention for rows of several tokens: chunks of prompts, recompute, whole prompts.

This file owns the walk of blocks of queries over their context and their own chunk. It must never
read a cell outside the positions that a row has (freed pages may hold NaN), never take the GIL,
never allocate. A block's columns are (token, head) pairs of one KV head, so that cached numbers are
read once for all heads that share them; nothing is computed for positions that no column sees.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels import attn_table as at
from kernels import simd
from kernels.attn_simd import LOWEST, cap_line, dot_tile, soften_tile, weigh_tile, widen
from kernels.simd import get_float, get_int, set_float, set_int, set_int32, take


def make_prompts(
    GROUP: int, DIM: int, KIND: int, WIDTH: int, ROWS: int, VECTORS: int, BLOCK: int, STAMP: int
) -> Callable[[int], None]:
    """Rows of several tokens: take blocks of (query, head) pairs until none is left."""
    COLUMNS = VECTORS * WIDTH
    STRIDE = 4 * COLUMNS
    NUMBERS = DIM * simd.size(KIND)
    TAIL = DIM % ROWS
    NARROW = KIND != simd.FLOAT32

    def prompts(table: int) -> None:
        me = take(table + 8 * at.PROMPT_THREADS)
        kv_heads = get_int(table, at.KV_HEADS)
        heads = kv_heads * GROUP
        scale = get_float(table, 2 * at.SCALE)
        keys, to_values = get_int(table, at.KEYS), get_int(table, at.TO_VALUES)
        window = get_int(table, at.WINDOW)
        offsets = get_int(table, at.SCRATCH) + me * get_int(table, at.SCRATCH_STRIDE)
        packed = offsets + 8 * (BLOCK + at.SPARE)  # offsets in the widened copies
        query = packed + 8 * (BLOCK + at.SPARE)
        logits = query + DIM * STRIDE
        sums = logits + (BLOCK + ROWS) * STRIDE
        most = sums + DIM * STRIDE
        total, factor, low, high = (
            most + STRIDE, most + 2 * STRIDE, most + 3 * STRIDE, most + 4 * STRIDE
        )  # fmt: skip
        wide_keys = most + 5 * STRIDE
        wide_values = wide_keys + BLOCK * 4 * DIM
        for p in range(BLOCK + at.SPARE):
            set_int(packed, p, p * 4 * DIM if p < BLOCK else 0)
        block = take(table + 8 * at.NEXT_BLOCK)
        row, passed = 0, 0
        while STAMP:
            own = get_int(table, at.PROMPTS) + 8 * at.PROMPT * row
            n_pairs = get_int(own, 1) * GROUP
            per_head = (n_pairs + COLUMNS - 1) // COLUMNS
            while row < get_int(table, at.N_PROMPTS) and block - passed >= per_head * kv_heads:
                passed += per_head * kv_heads
                row += 1
                own += 8 * at.PROMPT
                if row < get_int(table, at.N_PROMPTS):
                    n_pairs = get_int(own, 1) * GROUP
                    per_head = (n_pairs + COLUMNS - 1) // COLUMNS
            if row >= get_int(table, at.N_PROMPTS):
                return
            token, before = get_int(own, 0), get_int(own, 2) - get_int(own, 1)
            pages = get_int(table, at.PAGES) + 8 * get_int(own, 3)
            g = (block - passed) % kv_heads
            first_pair = (per_head - 1 - (block - passed) // kv_heads) * COLUMNS  # long ones first
            n_columns = min(COLUMNS, n_pairs - first_pair)
            for c in range(COLUMNS):
                pair = min(first_pair + c, n_pairs - 1)
                seen = before + pair // GROUP
                given = get_int(table, at.Q) + (token + pair // GROUP) * get_int(table, at.Q_TOKEN)
                given += (g * GROUP + pair % GROUP) * get_int(table, at.Q_HEAD)
                for d in range(DIM):
                    set_float(query + d * STRIDE, c, get_float(given, d) * scale)
                    set_float(sums + d * STRIDE, c, 0.0)
                set_float(most, c, LOWEST)
                set_float(total, c, 0.0)
                set_int32(low, c, seen - window + 1 if window else 0)
                set_int32(high, c, seen)
            earliest = before + first_pair // GROUP
            last_seen = before + (first_pair + n_columns - 1) // GROUP
            position = max(0, earliest - window + 1) if window else 0
            vectors = (n_columns + WIDTH - 1) // WIDTH
            while position <= last_seen:
                n = min(BLOCK, last_seen + 1 - position)
                at.locate(table, pages, position, last_seen + 1, BLOCK, kv_heads * NUMBERS, offsets)
                cells, key, value = offsets, keys + g * NUMBERS, keys + g * NUMBERS + to_values
                if NARROW:
                    widen(DIM, WIDTH, KIND, key, offsets, n, wide_keys)
                    widen(DIM, WIDTH, KIND, value, offsets, n, wide_values)
                    cells, key, value = packed, wide_keys, wide_values
                for p in range(0, n, ROWS):
                    if vectors > 1:
                        dot_tile(
                            ROWS, VECTORS, DIM, WIDTH, query, key, cells + 8 * p,
                            logits + p * STRIDE, STRIDE,
                        )  # fmt: skip
                    else:
                        dot_tile(
                            ROWS, 1, DIM, WIDTH, query, key, cells + 8 * p,
                            logits + p * STRIDE, STRIDE,
                        )  # fmt: skip
                if get_float(table, 2 * at.CAP) > 0:
                    cap_line(WIDTH, logits, n * COLUMNS, table + 8 * at.CAP)
                whole = position + n - 1 <= earliest
                whole = whole and (window == 0 or position > last_seen - window)
                if whole:
                    soften_tile(
                        0, WIDTH, logits, n, vectors, STRIDE, position, low, high, most, total,
                        factor,
                    )  # fmt: skip
                else:
                    soften_tile(
                        1, WIDTH, logits, n, vectors, STRIDE, position, low, high, most, total,
                        factor,
                    )  # fmt: skip
                for d in range(0, DIM - TAIL, ROWS):
                    if vectors > 1:
                        weigh_tile(
                            ROWS, VECTORS, WIDTH, logits, STRIDE, value + 4 * d, cells, n,
                            sums + d * STRIDE, factor,
                        )  # fmt: skip
                    else:
                        weigh_tile(
                            ROWS, 1, WIDTH, logits, STRIDE, value + 4 * d, cells, n,
                            sums + d * STRIDE, factor,
                        )  # fmt: skip
                if TAIL:
                    weigh_tile(
                        TAIL, VECTORS, WIDTH, logits, STRIDE, value + 4 * (DIM - TAIL), cells, n,
                        sums + (DIM - TAIL) * STRIDE, factor,
                    )  # fmt: skip
                position += n
            for c in range(n_columns):
                pair = first_pair + c
                head = g * GROUP + pair % GROUP
                by = at.share(
                    get_float(most, c), get_float(total, c), get_int(table, at.SINKS), head
                )
                out = get_int(table, at.OUT) + ((token + pair // GROUP) * heads + head) * 4 * DIM
                for d in range(DIM):
                    set_float(out, d, get_float(sums + d * STRIDE, c) * by)
            block = take(table + 8 * at.NEXT_BLOCK)

    return prompts

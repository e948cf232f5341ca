"""The innermost loops of attention on a CPU, as vector instructions inside numba functions.

This file owns dot products of cached keys with the queries of a head group, weighted sums of cached
values, the register-blocked products of prompt blocks, and the softmax between them. It must never
allocate and never look at a page table: callers hand in the byte offset of every position, so pages
may have any size. Names in capitals are compile-time constants; all else are int64: addresses and
strides in bytes, counts. All scratch is fp32.

Online softmax: Milakov and Gimelshein (2018), FlashAttention (Dao et al., 2022). Layouts: a decode
row keeps one line of logits per query head and sums across vector lanes (lanes are head numbers of
one head, D); a prompt block keeps its (query, head) pairs in the lanes, so nothing is ever summed
across lanes and cached numbers are broadcast as they lie.
"""

# mypy: disable-error-code=no-untyped-def
# (numba gives the arguments of intrinsics their types)

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.simd import F32, I32, I64, Emit, i64, intrinsic, loop, parts, size, void

LOWEST = -1e30  # a running maximum before anything was seen; finite, so that -inf - LOWEST = -inf
_FLOAT = 4  # bytes
_SLICE = 8  # positions per turn of ``weigh_rows``
_AT_ONCE = 4  # positions per turn of ``dot_rows``; the offset table repeats its last entry so far


@intrinsic(prefer_literal=True)
def dot_rows(
    typingctx, GROUP, DIM, WIDTH, KIND, kv_heads, q, keys, offsets, following, n, out, stride
):
    """``out[h][p] = q[h] . keys[offsets[p]][h // GROUP]``.

    Position by position over all heads, so that memory is read as it lies; meanwhile the keys at
    ``following`` are asked for.
    """
    return void((GROUP, DIM, WIDTH, KIND), 8, _dot_rows)


def _dot_rows(
    e: Emit, group: int, dim: int, width: int, kind: int, kv_heads: Any, q: Any, keys: Any,
    offsets: Any, following: Any, n: Any, out: Any, stride: Any,
) -> None:  # fmt: skip
    b, pieces = e.b, parts(dim, width)
    turns = b.sdiv(b.add(n, i64(_AT_ONCE - 1)), i64(_AT_ONCE))
    with loop(e, turns) as turn:
        first = b.mul(turn.index, i64(_AT_ONCE))
        cells, nexts = [], []
        for i in range(_AT_ONCE):
            place = b.mul(b.add(first, i64(i)), i64(8))
            cells.append(b.add(keys, b.load(e.at(offsets, place), typ=I64, align=8)))
            nexts.append(b.add(keys, b.load(e.at(following, place), typ=I64, align=8)))
        with loop(e, kv_heads) as head:
            queries = b.add(q, b.mul(head.index, i64(group * dim * _FLOAT)))
            lines = b.add(out, b.mul(head.index, b.mul(stride, i64(group))))
            own = b.mul(head.index, i64(dim * size(kind)))
            for half in range(0, _AT_ONCE, 2):
                pair = [b.add(cell, own) for cell in cells[half : half + 2]]
                for cell in nexts[half : half + 2]:
                    e.prefetch(b.add(cell, own), 0, dim * size(kind))
                sums: dict[tuple[int, int, int], Any] = {}
                for at, lanes in pieces:
                    stored = [e.load(cell, at * size(kind), lanes, kind) for cell in pair]
                    for g in range(group):
                        query = e.load(queries, (g * dim + at) * _FLOAT, lanes)
                        for i, key in enumerate(stored):
                            old = sums.get((g, i, lanes))
                            new = b.fmul(query, key) if old is None else e.fma(query, key, old)
                            sums[g, i, lanes] = new
                for g in range(group):
                    line = b.add(lines, b.mul(stride, i64(g)))
                    for i in range(2):
                        place = b.mul(b.add(first, i64(half + i)), i64(_FLOAT))
                        e.store(_across(e, sums, g, i, width), line, place)


def _across(e: Emit, sums: dict[tuple[int, int, int], Any], g: int, i: int, width: int) -> Any:
    """The sum over lanes of one dot product whose vectors have several lengths."""
    total = None
    lanes = width
    while lanes >= 1:
        own = sums.get((g, i, lanes))
        if own is not None:
            total = own if total is None else e.b.fadd(total, own)
        if lanes > 1 and total is not None:
            total, _ = e.fold(total, lanes, e.b.fadd)
        lanes //= 2
    return total


@intrinsic(prefer_literal=True)
def weigh_rows(
    typingctx,
    GROUP,
    DIM,
    WIDTH,
    KIND,
    VECTORS,
    kv_heads,
    weights,
    stride,
    values,
    offsets,
    following,
    n,
    sums,
    scale,
):
    """``sums[h] = sums[h] * scale[h] + sum of weights[h][p] * values[offsets[p]][h // GROUP]``.

    A few positions at a time over all heads, so that memory is read nearly as it lies; meanwhile
    the values at ``following`` are asked for. VECTORS sums are kept in registers.
    """
    return void((GROUP, DIM, WIDTH, KIND, VECTORS), 9, _weigh_rows)


def _weigh_rows(
    e: Emit, group: int, dim: int, width: int, kind: int, vectors: int, kv_heads: Any,
    weights: Any, stride: Any, values: Any, offsets: Any, following: Any, n: Any, sums: Any,
    scale: Any,
) -> None:  # fmt: skip
    b, pieces = e.b, parts(dim, width)
    per_turn = max(1, vectors // group)
    one = e.cell("one", ir.ArrayType(F32, group))
    ones = b.ptrtoint(one, I64)
    for g in range(group):
        e.store(e.const(1.0, 1), ones, g * _FLOAT)
    with loop(e, b.sdiv(b.add(n, i64(_SLICE - 1)), i64(_SLICE))) as part:
        begin = b.mul(part.index, i64(_SLICE))
        left = b.sub(n, begin)
        count = b.select(b.icmp_signed("<", left, i64(_SLICE)), left, i64(_SLICE))
        is_first = b.icmp_signed("==", part.index, i64(0))
        with loop(e, kv_heads) as head:
            own_sums = b.add(sums, b.mul(head.index, i64(group * dim * _FLOAT)))
            lines = b.add(weights, b.mul(head.index, b.mul(stride, i64(group))))
            cell = b.add(values, b.mul(head.index, i64(dim * size(kind))))
            own_scale = b.add(scale, b.mul(head.index, i64(group * _FLOAT)))
            factors = b.select(is_first, own_scale, ones)
            for start in range(0, len(pieces), per_turn):
                own = pieces[start : start + per_turn]
                cells = {}
                for g in range(group):
                    factor = e.load(factors, g * _FLOAT, 1)
                    for at, lanes in own:
                        cells[g, at] = e.cell("sum", e.vec(lanes))
                        old = e.load(own_sums, (g * dim + at) * _FLOAT, lanes)
                        b.store(b.fmul(old, e.splat(factor, lanes)), cells[g, at])
                with loop(e, count) as turn:
                    index = b.add(begin, turn.index)
                    offset = b.load(e.at(offsets, b.mul(index, i64(8))), typ=I64, align=8)
                    value = b.add(cell, offset)
                    stored = {at: e.load(value, at * size(kind), l_, kind) for at, l_ in own}
                    later = b.load(e.at(following, b.mul(index, i64(8))), typ=I64, align=8)
                    n_bytes = sum(lanes for _, lanes in own) * size(kind)
                    e.prefetch(b.add(cell, later), own[0][0] * size(kind), n_bytes)
                    for g in range(group):
                        line = b.add(lines, b.mul(stride, i64(g)))
                        weight = e.load(line, b.mul(index, i64(_FLOAT)), 1)
                        for at, lanes in own:
                            sum_cell = cells[g, at]
                            new = e.fma(e.splat(weight, lanes), stored[at], b.load(sum_cell))
                            b.store(new, sum_cell)
                for g in range(group):
                    for at, _ in own:
                        e.store(b.load(cells[g, at]), own_sums, (g * dim + at) * _FLOAT)


@intrinsic(prefer_literal=True)
def soften_line(typingctx, BLOCK, WIDTH, line, n, maximum, total, scale):
    """Turn the first ``n`` of BLOCK logits into weights and go on with maximum and total.

    Places from ``n`` on become 0. ``scale`` receives what earlier sums are to be multiplied with.
    """
    return void((BLOCK, WIDTH), 5, _soften_line)


def _soften_line(
    e: Emit, block: int, width: int, line: Any, n: Any, maximum: Any, total: Any, scale: Any
) -> None:
    b = e.b
    count = e.splat(b.trunc(n, I32), width)
    vectors = []
    for at in range(0, block, width):
        lane = ir.Constant(ir.VectorType(I32, width), list(range(at, at + width)))
        hidden = e.const(float("-inf"), width)
        seen = b.icmp_signed("<", lane, count)
        vectors.append(b.select(seen, e.load(line, at * _FLOAT, width), hidden))
    most = vectors[0]
    for vector in vectors[1:]:
        most = e.greater(vector, most)
    old = e.load(maximum, 0, 1)
    new = e.greater(e.reduce(most, width, e.greater), old)
    factor = e.exp(b.fsub(old, new), 1)
    level, added = e.splat(new, width), None
    for i, vector in enumerate(vectors):
        weight = e.exp(b.fsub(vector, level), width)
        e.store(weight, line, i * width * _FLOAT)
        added = weight if added is None else b.fadd(added, weight)
    own = e.reduce(added, width, b.fadd)
    e.store(e.fma(e.load(total, 0, 1), factor, own), total)
    e.store(new, maximum)
    e.store(factor, scale)


@intrinsic(prefer_literal=True)
def cap_line(typingctx, WIDTH, line, n, cap):
    """``x = cap * tanh(x / cap)`` for ``n`` numbers, rounded up to whole vectors of WIDTH.

    ``cap`` is the address of a number.
    """
    return void((WIDTH,), 3, _cap_line)


def _cap_line(e: Emit, width: int, line: Any, n: Any, cap: Any) -> None:
    b = e.b
    one, two = e.const(1.0, width), e.const(2.0, width)
    limit = e.splat(e.load(cap, 0, 1), width)
    turns = b.sdiv(b.add(n, i64(width - 1)), i64(width))
    sign = ir.Constant(ir.VectorType(I32, width), [-(2**31)] * width)
    with loop(e, turns) as turn:
        place = b.mul(turn.index, i64(width * _FLOAT))
        x = b.fdiv(e.load(line, place, width), limit)
        bits = b.bitcast(x, sign.type)
        minus_size = b.bitcast(b.or_(bits, sign), x.type)
        small = e.exp(b.fmul(minus_size, two), width)
        tanh = b.fdiv(b.fsub(one, small), b.fadd(one, small))
        signed = b.or_(b.bitcast(tanh, sign.type), b.and_(bits, sign))
        e.store(b.fmul(b.bitcast(signed, x.type), limit), line, place)


@intrinsic(prefer_literal=True)
def widen(typingctx, DIM, WIDTH, KIND, source, offsets, n, target):
    """``target[p] = source[offsets[p]]`` as fp32, DIM numbers each, packed."""
    return void((DIM, WIDTH, KIND), 4, _widen)


def _widen(
    e: Emit, dim: int, width: int, kind: int, source: Any, offsets: Any, n: Any, target: Any
) -> None:
    b = e.b
    with loop(e, n) as turn:
        place = b.mul(turn.index, i64(8))
        cell = b.add(source, b.load(e.at(offsets, place), typ=I64, align=8))
        line = b.add(target, b.mul(turn.index, i64(dim * _FLOAT)))
        for at, lanes in parts(dim, width):
            e.store(e.load(cell, at * size(kind), lanes, kind), line, at * _FLOAT)


@intrinsic(prefer_literal=True)
def dot_tile(typingctx, ROWS, VECTORS, DIM, WIDTH, q, keys, offsets, out, stride):
    """``out[r][c] = sum over d of keys[offsets[r]][d] * q[d][c]``: ROWS fp32 keys, DIM deep.

    Columns: VECTORS * WIDTH. ``stride`` is that of ``q``'s and ``out``'s lines.
    """
    return void((ROWS, VECTORS, DIM, WIDTH), 5, _dot_tile)


def _dot_tile(
    e: Emit, rows: int, vectors: int, dim: int, width: int, q: Any, keys: Any, offsets: Any,
    out: Any, stride: Any,
) -> None:  # fmt: skip
    b = e.b
    cells = [
        b.add(keys, b.load(e.at(offsets, 8 * r), typ=I64, align=8)) for r in range(rows)
    ]  # fmt: skip
    sums = [[e.cell("sum", e.vec(width)) for _ in range(vectors)] for _ in range(rows)]
    for line in sums:
        for cell in line:
            b.store(e.const(0.0, width), cell)
    with loop(e, i64(dim)) as turn:
        row = b.add(q, b.mul(turn.index, stride))
        columns = [e.load(row, v * width * _FLOAT, width) for v in range(vectors)]
        place = b.mul(turn.index, i64(_FLOAT))
        for r in range(rows):
            key = e.splat(e.load(cells[r], place, 1), width)
            for v in range(vectors):
                b.store(e.fma(key, columns[v], b.load(sums[r][v])), sums[r][v])
    for r in range(rows):
        line = b.add(out, b.mul(stride, i64(r)))
        for v in range(vectors):
            e.store(b.load(sums[r][v]), line, v * width * _FLOAT)


@intrinsic(prefer_literal=True)
def weigh_tile(typingctx, ROWS, VECTORS, WIDTH, weights, stride, values, offsets, n, sums, scale):
    """``sums[d][c] = sums[d][c] * scale[c] + sum over p of values[offsets[p]][d] * weights[p][c]``.

    ROWS numbers of each fp32 value. ``stride`` is that of ``weights``' and ``sums``' lines.
    """
    return void((ROWS, VECTORS, WIDTH), 7, _weigh_tile)


def _weigh_tile(
    e: Emit, rows: int, vectors: int, width: int, weights: Any, stride: Any, values: Any,
    offsets: Any, n: Any, sums: Any, scale: Any,
) -> None:  # fmt: skip
    b = e.b
    cells = [[e.cell("sum", e.vec(width)) for _ in range(vectors)] for _ in range(rows)]
    for v in range(vectors):
        factor = e.load(scale, v * width * _FLOAT, width)
        for r in range(rows):
            line = b.add(sums, b.mul(stride, i64(r)))
            b.store(b.fmul(e.load(line, v * width * _FLOAT, width), factor), cells[r][v])
    with loop(e, n) as turn:
        offset = b.load(e.at(offsets, b.mul(turn.index, i64(8))), typ=I64, align=8)
        value = b.add(values, offset)
        row = b.add(weights, b.mul(turn.index, stride))
        columns = [e.load(row, v * width * _FLOAT, width) for v in range(vectors)]
        for r in range(rows):
            number = e.splat(e.load(value, r * _FLOAT, 1), width)
            for v in range(vectors):
                b.store(e.fma(number, columns[v], b.load(cells[r][v])), cells[r][v])
    for r in range(rows):
        line = b.add(sums, b.mul(stride, i64(r)))
        for v in range(vectors):
            e.store(b.load(cells[r][v]), line, v * width * _FLOAT)


@intrinsic(prefer_literal=True)
def soften_tile(
    typingctx, MASKED, WIDTH, lines, n, vectors, stride, first, low, high, maximum, total, scale
):
    """Turn ``n`` lines of logits into weights; each column has its own maximum and total.

    If MASKED, line ``p`` is position ``first + p`` and counts in columns whose ``low <= position
    <= high`` (32-bit integers). ``scale`` receives the factors for earlier sums.
    """
    return void((MASKED, WIDTH), 10, _soften_tile)


def _soften_tile(
    e: Emit, masked: int, width: int, lines: Any, n: Any, vectors: Any, stride: Any, first: Any,
    low: Any, high: Any, maximum: Any, total: Any, scale: Any,
) -> None:  # fmt: skip
    b = e.b
    ints = ir.VectorType(I32, width)
    most, added = e.cell("most", e.vec(width)), e.cell("added", e.vec(width))
    with loop(e, vectors) as vector:
        own = b.mul(vector.index, i64(width * _FLOAT))
        old = e.load(maximum, own, width)
        b.store(old, most)
        lows = b.load(e.at(low, own), typ=ints, align=4)
        highs = b.load(e.at(high, own), typ=ints, align=4)
        column = b.add(lines, own)
        with loop(e, n) as turn:
            place = b.mul(turn.index, stride)
            logit = e.load(column, place, width)
            if masked:
                position = e.splat(b.trunc(b.add(first, turn.index), I32), width)
                after = b.icmp_signed(">", position, highs)
                hidden = b.or_(after, b.icmp_signed("<", position, lows))
                logit = b.select(hidden, e.const(float("-inf"), width), logit)
                e.store(logit, column, place)
            b.store(e.greater(logit, b.load(most)), most)
        new = b.load(most)
        factor = e.exp(b.fsub(old, new), width)
        b.store(b.fmul(e.load(total, own, width), factor), added)
        with loop(e, n) as turn:
            place = b.mul(turn.index, stride)
            weight = e.exp(b.fsub(e.load(column, place, width), new), width)
            e.store(weight, column, place)
            b.store(b.fadd(b.load(added), weight), added)
        e.store(new, maximum, own)
        e.store(b.load(added), total, own)
        e.store(factor, scale, own)

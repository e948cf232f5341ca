"""Writes the machine-independent code (LLVM IR) of a matrix product with few rows.

This file owns the text of two functions for one depth K, and nothing else: it compiles nothing and
touches no tensor. ``y[M, N] = x[M, K] @ w[N, K]^T + bias`` is cut so that every weight is read from
memory once, in the layout in which models keep it:

 1. ``run`` packs x so that one vector holds the same column of ``lanes`` rows of x, then hands
    ``task`` to every thread of a team.
 2. Each thread claims blocks of ``rows`` weight rows until none is left, so a thread that was held
    up holds up nobody. It claims one block ahead and prefetches it while it computes.
 3. A block keeps ``rows`` accumulators in registers. Each column costs one vector of x and, per
    weight row, one multiply-add with the weight broadcast from memory.

Each output is a chain of fused multiply-adds in the order of K, panel after panel so that rounding
stays small, whatever the count of rows, of threads and of lanes: a row's result is the same bits in
every batch. Weights of 16 bits are widened block by block into a thread's own scratch and then take
the same way; but where the CPU multiplies and adds pairs of bfloat16, a column is such a pair (of
weights and of x), and all else is the same.

(The register tile follows BLIS, Van Zee and van de Geijn 2015, without its packing of weights.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kernels.ir_vectors import (
    F32,
    I32,
    I64,
    BFloat16,
    Values,
    broadcast,
    integer,
    loop,
    order_of,
    transpose,
)

RUN = "run"  # name of the function to call; ``RUN_ARGUMENTS`` are 64-bit integers
RUN_ARGUMENTS = ("team", "scratch", "x", "x_stride", "w", "bias", "bias_step", "y", "n", "m")
UNROLL = 4  # columns per turn of the innermost loop
PANEL = 256  # most columns per accumulation; a multiple of UNROLL

_BYTES = ir.IntType(8).as_pointer()
_LINE = 64  # bytes of a cache line
# The context that ``run`` shares with its team: 64-bit slots.
_SLOTS = ("next", "scratch", "w", "bias", "bias_step", "y", "n", "m", "full", "tail")
_WEIGHT_TYPES = {"float32": F32, "bfloat16": ir.IntType(16), "float16": ir.HalfType()}
WEIGHT_DTYPES = frozenset(_WEIGHT_TYPES)


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel: its depth K, the weights' dtype, and the register tile of the machine.

    ``lanes`` ascend; the last is the machine's vector of float32, the others serve what is left
    of M. ``rows`` weight rows and one vector of x must fit its registers, and the last of
    ``lanes`` and ``rows`` must be powers of two, neither larger than 16. ``pairs``: multiply
    bfloat16 in pairs, by AVX512-BF16; needs an even depth, and x in bfloat16 too.
    """

    depth: int
    dtype: str
    rows: int
    lanes: tuple[int, ...]
    pairs: bool = False

    @property
    def columns(self) -> int:
        """What a row of weights or of x is counted in: numbers, or pairs of them."""
        return self.depth // 2 if self.pairs else self.depth


def scratch_floats(tile: Tile, m: int) -> int:
    """Length of the scratch that ``run`` needs for ``m`` rows of x, 64-byte aligned."""
    return tile.columns * -(-m // tile.lanes[-1]) * tile.lanes[-1]


def module_ir(tile: Tile) -> str:
    """The module as text, with the function ``run`` over ``RUN_ARGUMENTS``."""
    return str(_Writer(tile).module)


class _Writer:
    """Builds one module. Never reused."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile
        self.column = I32 if tile.pairs else F32  # how 4 bytes of x or of widened weights are read
        self.module = ir.Module("tile")
        self.context = ir.ArrayType(I64, len(_SLOTS))
        self._task = self._write_task()
        self._write_run()

    # -- the team's part -------------------------------------------------------------------

    def _write_task(self) -> ir.Function:
        tile = self.tile
        kind = ir.FunctionType(ir.VoidType(), [self.context.as_pointer()])
        task = ir.Function(self.module, kind, "task")
        task.linkage = "internal"
        b = ir.IRBuilder(task.append_basic_block("entry"))
        slot = {name: self._slot(b, task.args[0], name) for name in _SLOTS}
        value = {name: b.load(slot[name]) for name in _SLOTS[1:]}
        as_stored = I32 if tile.pairs else _WEIGHT_TYPES[tile.dtype]
        weights = b.inttoptr(value["w"], as_stored.as_pointer())
        wide = None
        if as_stored != self.column:
            wide = b.alloca(F32, tile.rows * tile.columns)
            wide.align = _LINE
        last = b.sub(value["n"], integer(tile.rows))

        def claim() -> Any:
            return b.mul(
                b.atomic_rmw("add", slot["next"], integer(1), "monotonic"), integer(tile.rows)
            )

        def rows_at(first: Any) -> tuple[Any, Any]:
            """The last block ends with N: it may overlap the one before, with equal results."""
            first = b.select(b.icmp_signed("<", first, last), first, last)
            return first, b.gep(weights, [b.mul(first, integer(tile.columns))])

        first, entry = claim(), b.block
        head, work, done = (b.append_basic_block(name) for name in ("head", "work", "done"))
        b.branch(head)
        b.position_at_end(head)
        mine = b.phi(I64)
        mine.add_incoming(first, entry)
        b.cbranch(b.icmp_signed("<", mine, value["n"]), work, done)
        b.position_at_end(done)
        b.ret_void()
        b.position_at_end(work)
        ahead = claim()
        at, block = rows_at(mine)
        _, ahead_block = rows_at(ahead)
        if wide is not None:
            block = self._widen(b, block, wide)
        packed = b.inttoptr(value["scratch"], self.column.as_pointer())

        def one_tile(group: Any, lanes: int) -> None:
            row = b.mul(group, integer(tile.lanes[-1]))
            x = b.gep(packed, [b.mul(row, integer(tile.columns))])
            sums = self._multiply(b, x, block, ahead_block, self._bias(b, value, at), lanes)
            self._store(b, value, sums, row, at, lanes)

        self._each_group(b, value["full"], value["tail"], one_tile)
        mine.add_incoming(ahead, b.block)
        b.branch(head)
        return task

    def _bias(self, b: ir.IRBuilder, value: dict[str, Any], at: Any) -> Values:
        bias = b.inttoptr(value["bias"], F32.as_pointer())
        return [
            b.load(b.gep(bias, [b.mul(value["bias_step"], b.add(at, integer(r)))]))
            for r in range(self.tile.rows)
        ]

    def _multiply(
        self, b: ir.IRBuilder, x: Any, block: Any, ahead: Any, bias: Values, lanes: int
    ) -> Values:
        """One sum per weight row and lane, over the whole depth."""
        every = self.tile.columns
        sums = [broadcast(b, value, lanes) for value in bias]
        width = -(-every // -(-every // PANEL))  # panels of equal width, if they can be
        width = -(-width // UNROLL) * UNROLL
        whole = every - every % width
        if whole:
            with loop(b, integer(whole), width, sums) as (k, carried, close):
                panel = self._panel(b, x, block, ahead, k, width, lanes)
                sums = close([b.fadd(*pair) for pair in zip(carried, panel, strict=True)])
        if whole < every:
            panel = self._panel(b, x, block, ahead, integer(whole), every - whole, lanes)
            sums = [b.fadd(*pair) for pair in zip(sums, panel, strict=True)]
        return sums

    def _panel(
        self, b: ir.IRBuilder, x: Any, block: Any, ahead: Any, start: Any, columns: int, lanes: int
    ) -> Values:
        """The part of ``columns`` columns from ``start`` on, one accumulator per weight row."""
        vector = ir.VectorType(self.column, lanes)

        def column(k: Any, sums: Values) -> Values:
            at = b.bitcast(b.gep(x, [b.mul(k, integer(lanes))]), vector.as_pointer())
            x_L = b.load(at, align=4 * lanes)
            out = []
            for r, total in enumerate(sums):
                at = b.gep(block, [b.add(k, integer(r * self.tile.columns))])
                weight = broadcast(b, b.load(at, align=4), lanes)
                out.append(self._multiply_add(b, x_L, weight, total))
            return out

        sums: Values = [ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)] * self.tile.rows
        whole = columns - columns % UNROLL
        if whole:
            with loop(b, integer(whole), UNROLL, sums) as (i, carried, close):
                k = b.add(start, i)
                self._prefetch(b, ahead, k)
                for u in range(UNROLL):
                    carried = column(b.add(k, integer(u)), carried)
                sums = close(carried)
        for i in range(whole, columns):
            sums = column(b.add(start, integer(i)), sums)
        return sums

    def _multiply_add(self, b: ir.IRBuilder, x_L: Any, weight_L: Any, total_L: Any) -> Any:
        kind, lanes = total_L.type, total_L.type.count
        if not self.tile.pairs:
            fma = self._intrinsic(f"llvm.fma.v{lanes}f32", kind, [kind] * 3)
            return b.call(fma, [weight_L, x_L, total_L])
        both = ir.VectorType(BFloat16(), 2 * lanes)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        dot = self._intrinsic(name, kind, [kind, both, both])
        return b.call(dot, [total_L, b.bitcast(x_L, both), b.bitcast(weight_L, both)])

    def _prefetch(self, b: ir.IRBuilder, ahead: Any, k: Any) -> None:
        """Ask for the share of the next block that this step of the loop is responsible for.

        A cache line of float32 is 16 columns, four steps: each of them asks for the line of
        another quarter of the rows.
        """
        steps = _LINE // 4 // UNROLL
        share = max(1, self.tile.rows // steps)
        prefetch = self._intrinsic("llvm.prefetch.p0i8", ir.VoidType(), [_BYTES, I32, I32, I32])
        quarter = b.urem(b.udiv(k, integer(UNROLL)), integer(steps))
        row = b.mul(quarter, integer(share * self.tile.columns))
        for r in range(share):
            at = b.gep(ahead, [b.add(b.add(row, k), integer(r * self.tile.columns))])
            b.call(prefetch, [b.bitcast(at, _BYTES), *(integer(i, I32) for i in (0, 2, 1))])

    def _store(
        self, b: ir.IRBuilder, value: dict[str, Any], sums: Values, row: Any, at: Any, lanes: int
    ) -> None:
        """Turn the accumulators from one per weight row into one per row of x, and store those."""
        y = b.inttoptr(value["y"], F32.as_pointer())
        width = min(lanes, len(sums))  # weight rows that lie side by side after the turn
        filler = [ir.Constant(sums[0].type, ir.Undefined)] * (lanes - width)
        squares = [
            transpose(b, sums[r : r + width] + filler)[:lanes] for r in range(0, len(sums), width)
        ]
        for lane in range(lanes):
            m = b.add(row, integer(lane))
            with b.if_then(b.icmp_signed("<", m, value["m"])):
                line = b.gep(y, [b.add(b.mul(m, value["n"]), at)])
                for i, square in enumerate(squares):
                    part = b.shuffle_vector(square[lane], square[lane], order_of([*range(width)]))
                    to = b.bitcast(b.gep(line, [integer(i * width)]), part.type.as_pointer())
                    b.store(part, to, align=4)

    def _widen(self, b: ir.IRBuilder, block: Any, wide: Any) -> Any:
        """Copy a block of 16-bit weights to float32; both are contiguous."""
        total, step = self.tile.rows * self.tile.columns, self.tile.rows

        def some(i: Any) -> None:
            kind = ir.VectorType(block.type.pointee, step)
            narrow = b.load(b.bitcast(b.gep(block, [i]), kind.as_pointer()), align=2)
            floats = ir.VectorType(F32, step)
            if self.tile.dtype == "bfloat16":
                words = ir.VectorType(I32, step)
                shifted = b.shl(b.zext(narrow, words), ir.Constant(words, [16] * step))
                values = b.bitcast(shifted, floats)
            else:
                values = b.fpext(narrow, floats)
            b.store(values, b.bitcast(b.gep(wide, [i]), floats.as_pointer()), align=4 * step)

        with loop(b, integer(total), step, []) as (i, _, close):
            some(i)
            close([])
        return wide

    # -- the caller's part -----------------------------------------------------------------

    def _write_run(self) -> None:
        full_lanes = self.tile.lanes[-1]
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(RUN_ARGUMENTS))
        run = ir.Function(self.module, kind, RUN)
        b = ir.IRBuilder(run.append_basic_block("entry"))
        value = dict(zip(RUN_ARGUMENTS, run.args, strict=True))
        m = value["m"]
        full, rest = b.udiv(m, integer(full_lanes)), b.urem(m, integer(full_lanes))
        tail: Any = integer(0)
        for lanes in reversed(self.tile.lanes):
            tail = b.select(b.icmp_signed("<=", rest, integer(lanes)), integer(lanes), tail)
        tail = b.select(b.icmp_signed("==", rest, integer(0)), integer(0), tail)
        is_full = b.icmp_signed("==", tail, integer(full_lanes))
        value["full"] = b.add(full, b.zext(is_full, I64))
        value["tail"] = b.select(is_full, integer(0), tail)
        value["next"] = integer(0)
        context = b.alloca(self.context)
        for name in _SLOTS:
            b.store(value[name], self._slot(b, context, name))

        def pack(group: Any, lanes: int) -> None:
            self._pack(b, value, b.mul(group, integer(full_lanes)), lanes)

        self._each_group(b, value["full"], value["tail"], pack)
        alone = b.icmp_signed("==", value["team"], integer(0))
        with b.if_else(alone) as (by_itself, by_team):
            with by_itself:
                b.call(self._task, [context])
            with by_team:  # GOMP_parallel(task, data, threads: 0 is the caller's own count, flags)
                kind = ir.FunctionType(
                    ir.VoidType(), [self._task.type, context.type, I32, I32]
                ).as_pointer()
                team = b.inttoptr(value["team"], kind)
                b.call(team, [self._task, context, integer(0, I32), integer(0, I32)])
        b.ret_void()

    def _pack(self, b: ir.IRBuilder, value: dict[str, Any], row: Any, lanes: int) -> None:
        """Copy ``lanes`` rows of x so that a column of them is contiguous.

        Lanes past the last row repeat it: what they compute is not stored.
        """
        every = self.tile.columns
        x = b.inttoptr(value["x"], self.column.as_pointer())
        to = b.inttoptr(value["scratch"], self.column.as_pointer())
        to = b.gep(to, [b.mul(row, integer(every))])
        last = b.sub(value["m"], integer(1))
        vector = ir.VectorType(self.column, lanes)
        lines = []
        for lane in range(lanes):
            m = b.add(row, integer(lane))
            m = b.select(b.icmp_signed("<", m, last), m, last)
            lines.append(b.gep(x, [b.mul(m, value["x_stride"])]))
        whole = every - every % lanes
        if whole:
            with loop(b, integer(whole), lanes, []) as (k, _, close):
                square = [
                    b.load(b.bitcast(b.gep(line, [k]), vector.as_pointer()), align=4)
                    for line in lines
                ]
                for i, column in enumerate(transpose(b, square)):
                    place = b.gep(to, [b.mul(b.add(k, integer(i)), integer(lanes))])
                    b.store(column, b.bitcast(place, vector.as_pointer()), align=4 * lanes)
                close([])
        for k in range(whole, every):
            for lane, line in enumerate(lines):
                b.store(b.load(b.gep(line, [integer(k)])), b.gep(to, [integer(k * lanes + lane)]))

    # -- both ------------------------------------------------------------------------------

    def _each_group(
        self, b: ir.IRBuilder, full: Any, tail: Any, body: Callable[[Any, int], None]
    ) -> None:
        """``body(group, lanes)`` for every full vector of rows of x, then for what is left."""
        with (
            b.if_then(b.icmp_signed(">", full, integer(0))),
            loop(b, full, 1, []) as (group, _, close),
        ):
            body(group, self.tile.lanes[-1])
            close([])
        for lanes in self.tile.lanes[:-1]:
            with b.if_then(b.icmp_signed("==", tail, integer(lanes))):
                body(full, lanes)

    def _slot(self, b: ir.IRBuilder, context: Any, name: str) -> Any:
        return b.gep(context, [integer(0), integer(_SLOTS.index(name))])

    def _intrinsic(self, name: str, returns: Any, takes: Values) -> Any:
        if name in self.module.globals:
            return self.module.globals[name]
        return ir.Function(self.module, ir.FunctionType(returns, takes), name)

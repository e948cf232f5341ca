"""Writes the machine-independent code (LLVM IR) of a root-mean-square norm over rows.

This file owns the text of two functions for one row length, and nothing else: it compiles nothing
and touches no tensor. ``y = round(x / sqrt(mean(x^2) + eps) * factor)``: two passes over a row that
the first cache still holds, all arithmetic in float32. A row's sum has 64 parts that are joined in
a fixed order, so its result is the same bits whatever the rows beside it, the threads and the
machine's vectors; NaN and infinity stay in their row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from kernels.ir_vectors import F32, I32, I64, Values, broadcast, integer, loop, order_of

RUN = "run"  # name of the function to call; ``RUN_ARGUMENTS`` are 64-bit integers
RUN_ARGUMENTS = ("team", "x", "x_stride", "factor", "y", "eps", "rows")
_SLOTS = ("next", "x", "x_stride", "factor", "y", "eps", "rows")  # the team's context

_LANES = 16  # of the code's vectors: the compiler splits them where the machine's are shorter
_SUMS = 4  # vectors of partial sums: more than an addition takes cycles
_CLAIM = 16  # rows that a thread takes at a time
_I16 = ir.IntType(16)
_STORED = {"float32": F32, "bfloat16": _I16, "float16": ir.HalfType()}
DTYPES = frozenset(_STORED)


@dataclass(frozen=True, slots=True)
class Norm:
    """One kernel: length of a row, dtype of x and y, and where it rounds.

    ``between``: the normalised number is rounded to the dtype before the factor multiplies it.
    """

    depth: int
    dtype: str
    between: bool


def norm_ir(norm: Norm) -> str:
    """The module as text, with the function ``run`` over ``RUN_ARGUMENTS``.

    ``team``: address of ``GOMP_parallel``, or 0 for the caller alone. ``x_stride`` counts numbers;
    rows of y are adjacent. ``factor`` is float32. ``eps`` is a float32's bits.
    """
    return str(_Writer(norm).module)


class _Writer:
    """Builds one module. Never reused."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm
        self.stored = _STORED[norm.dtype]
        self.module = ir.Module("norm")
        self.context = ir.ArrayType(I64, len(_SLOTS))
        self._task = self._write_task()
        self._write_run()

    def _write_run(self) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(RUN_ARGUMENTS))
        run = ir.Function(self.module, kind, RUN)
        b = ir.IRBuilder(run.append_basic_block("entry"))
        value = dict(zip(RUN_ARGUMENTS, run.args, strict=True), next=integer(0))
        context = b.alloca(self.context)
        for name in _SLOTS:
            b.store(value[name], self._slot(b, context, name))
        alone = b.icmp_signed("==", value["team"], integer(0))
        with b.if_else(alone) as (by_itself, by_team):
            with by_itself:
                b.call(self._task, [context])
            with by_team:  # GOMP_parallel(task, data, threads: 0 is the caller's own count, flags)
                takes = [self._task.type, context.type, I32, I32]
                team = b.inttoptr(value["team"], ir.FunctionType(ir.VoidType(), takes).as_pointer())
                b.call(team, [self._task, context, integer(0, I32), integer(0, I32)])
        b.ret_void()

    def _write_task(self) -> ir.Function:
        """Claim some rows until none is left."""
        kind = ir.FunctionType(ir.VoidType(), [self.context.as_pointer()])
        task = ir.Function(self.module, kind, "task")
        task.linkage = "internal"
        b = ir.IRBuilder(task.append_basic_block("entry"))
        value = {name: b.load(self._slot(b, task.args[0], name)) for name in _SLOTS[1:]}
        value["eps"] = b.bitcast(b.trunc(value["eps"], I32), F32)
        head, work, done = (b.append_basic_block(name) for name in ("head", "work", "done"))
        b.branch(head)
        b.position_at_end(head)
        claimed = b.atomic_rmw("add", self._slot(b, task.args[0], "next"), integer(1), "monotonic")
        first = b.mul(claimed, integer(_CLAIM))
        left = b.sub(value["rows"], first)
        b.cbranch(b.icmp_signed(">", left, integer(0)), work, done)
        b.position_at_end(work)
        count = b.select(b.icmp_signed("<", left, integer(_CLAIM)), left, integer(_CLAIM))
        with loop(b, count, 1, []) as (i, _, close):
            self._row(b, value, b.add(first, i))
            close([])
        b.branch(head)
        b.position_at_end(done)
        b.ret_void()
        return task

    def _row(self, b: ir.IRBuilder, value: dict[str, Any], row: Any) -> None:
        depth = self.norm.depth
        x = b.inttoptr(value["x"], self.stored.as_pointer())
        x = b.gep(x, [b.mul(row, value["x_stride"])])
        y = b.inttoptr(value["y"], self.stored.as_pointer())
        y = b.gep(y, [b.mul(row, integer(depth))])
        factor = b.inttoptr(value["factor"], F32.as_pointer())
        mean = b.fdiv(self._squares(b, x), ir.Constant(F32, depth))
        root = self._call(b, "llvm.sqrt.f32", [b.fadd(mean, value["eps"])])
        scale = b.fdiv(ir.Constant(F32, 1.0), root)

        def some(k: Any, lanes: int) -> None:
            by = scale if lanes == 1 else broadcast(b, scale, lanes)
            h = b.fmul(self._load(b, x, k, lanes), by)
            if self.norm.between:
                h = self._widen(b, self._narrow(b, h, lanes), lanes)
            place = self._place(b, factor, k, F32, lanes)
            h = b.fmul(h, b.load(place, align=4))
            to = self._place(b, y, k, self.stored, lanes)
            b.store(self._narrow(b, h, lanes), to, align=self._bytes)

        whole = depth - depth % _LANES
        if whole:
            with loop(b, integer(whole), _LANES, []) as (k, _, close):
                some(k, _LANES)
                close([])
        for i in range(whole, depth):
            some(integer(i), 1)

    def _squares(self, b: ir.IRBuilder, x: Any) -> Any:
        """The sum of x^2 over a row."""
        depth, turn = self.norm.depth, _LANES * _SUMS
        sums: Values = [ir.Constant(ir.VectorType(F32, _LANES), [0.0] * _LANES)] * _SUMS

        def add(k: Any, lanes: int, total: Any) -> Any:
            wide = self._load(b, x, k, lanes)
            name = f"llvm.fma.{'' if lanes == 1 else f'v{lanes}'}f32"
            return self._call(b, name, [wide, wide, total])

        whole = depth - depth % turn
        if whole:
            with loop(b, integer(whole), turn, sums) as (k, carried, close):
                at = [b.add(k, integer(i * _LANES)) for i in range(_SUMS)]
                sums = close([add(a, _LANES, s) for a, s in zip(at, carried, strict=True)])
        vectors = range(whole, depth - depth % _LANES, _LANES)
        sums = list(sums)
        for i, k in enumerate(vectors):
            sums[i] = add(integer(k), _LANES, sums[i])
        total, lanes = b.fadd(b.fadd(sums[0], sums[1]), b.fadd(sums[2], sums[3])), _LANES
        while lanes > 1:
            lanes //= 2
            halves = (order_of(list(range(i, i + lanes))) for i in (0, lanes))
            low, high = (b.shuffle_vector(total, total, half) for half in halves)
            total = b.fadd(low, high)
        total = b.extract_element(total, integer(0, I32))
        for k in range(depth - depth % _LANES, depth):
            total = add(integer(k), 1, total)
        return total

    # -- numbers as they are stored --------------------------------------------------------

    @property
    def _bytes(self) -> int:
        return 4 if self.stored == F32 else 2

    def _load(self, b: ir.IRBuilder, line: Any, k: Any, lanes: int) -> Any:
        place = self._place(b, line, k, self.stored, lanes)
        return self._widen(b, b.load(place, align=self._bytes), lanes)

    def _widen(self, b: ir.IRBuilder, value: Any, lanes: int) -> Any:
        """As float32."""
        if self.norm.dtype == "float32":
            return value
        if self.norm.dtype == "float16":
            return b.fpext(value, _of(F32, lanes))
        wide = b.zext(value, _of(I32, lanes))
        return b.bitcast(b.shl(wide, _number(16, lanes)), _of(F32, lanes))

    def _narrow(self, b: ir.IRBuilder, value: Any, lanes: int) -> Any:
        """As stored, rounded to nearest, ties to even.

        bfloat16 by hand, as few CPUs can. A NaN stays one: it came from 16 bits, so its lower
        half is zero and carries nothing over.
        """
        if self.norm.dtype == "float32":
            return value
        if self.norm.dtype == "float16":
            return b.fptrunc(value, _of(ir.HalfType(), lanes))
        bits = b.bitcast(value, _of(I32, lanes))
        odd = b.and_(b.lshr(bits, _number(16, lanes)), _number(1, lanes))
        up = b.add(b.add(bits, _number(0x7FFF, lanes)), odd)
        return b.trunc(b.lshr(up, _number(16, lanes)), _of(_I16, lanes))

    def _place(self, b: ir.IRBuilder, line: Any, k: Any, kind: Any, lanes: int) -> Any:
        place = b.gep(line, [k])
        return place if lanes == 1 else b.bitcast(place, _of(kind, lanes).as_pointer())

    def _slot(self, b: ir.IRBuilder, context: Any, name: str) -> Any:
        return b.gep(context, [integer(0), integer(_SLOTS.index(name))])

    def _call(self, b: ir.IRBuilder, name: str, takes: Values) -> Any:
        """An intrinsic of LLVM whose result is of the type that it takes."""
        if name not in self.module.globals:
            kinds = [value.type for value in takes]
            ir.Function(self.module, ir.FunctionType(kinds[0], kinds), name)
        return b.call(self.module.globals[name], takes)


def _of(kind: Any, lanes: int) -> Any:
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def _number(value: int, lanes: int) -> Any:
    """An integer of 32 bits in every lane."""
    return ir.Constant(_of(I32, lanes), value if lanes == 1 else [integer(value, I32)] * lanes)

"""Words over llvmlite's builder: constants, vectors of float32, counted loops.

This file owns nothing but these shapes of LLVM IR; what is computed with them is ``tile_ir``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
Values = list[Any]  # llvmlite has no types


class BFloat16(ir.Type):  # type: ignore[misc]
    """The type that llvmlite does not know."""

    null = "0.0"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


def integer(value: int, kind: Any = I64) -> Any:
    """A constant, of 64 bits if nothing else is said."""
    return ir.Constant(kind, value)


def broadcast(b: ir.IRBuilder, value: Any, lanes: int) -> Any:
    """A vector of ``lanes`` times the same value."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = b.insert_element(undefined, value, integer(0, I32))
    return b.shuffle_vector(one, undefined, order_of([0] * lanes))


def order_of(order: list[int]) -> Any:
    """The constant that tells a shuffle which elements to take."""
    return ir.Constant(ir.VectorType(I32, len(order)), order)


def transpose(b: ir.IRBuilder, square: Values) -> Values:
    """A square of vectors with rows and columns exchanged: log2(n) rounds of two shuffles."""
    n, step = len(square), 1
    while step < n:
        low = [j if not j & step else n + j - step for j in range(n)]
        high = [j + step if not j & step else n + j for j in range(n)]
        turned = list(square)
        for i in (i for i in range(n) if not i & step):
            turned[i] = b.shuffle_vector(square[i], square[i + step], order_of(low))
            turned[i + step] = b.shuffle_vector(square[i], square[i + step], order_of(high))
        square, step = turned, step * 2
    return square


@contextmanager
def loop(
    b: ir.IRBuilder, stop: Any, step: int, start: Values
) -> Iterator[tuple[Any, Values, Callable[[Values], Values]]]:
    """``for i in range(0, stop, step)``, run at least once, carrying values from turn to turn.

    Gives ``i``, the carried values, and a function that ends the body: it takes the values of the
    next turn and answers those after the last.
    """
    before, body = b.block, b.append_basic_block("loop")
    b.branch(body)
    b.position_at_end(body)
    i = b.phi(I64)
    i.add_incoming(integer(0), before)
    carried = []
    for value in start:
        carried.append(b.phi(value.type))
        carried[-1].add_incoming(value, before)

    def close(values: Values) -> Values:
        following = b.add(i, integer(step))
        for place, value in zip([i, *carried], [following, *values], strict=True):
            place.add_incoming(value, b.block)
        after = b.append_basic_block("after")
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)
        return values

    yield i, carried, close

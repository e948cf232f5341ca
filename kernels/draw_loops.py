"""Compiled loops over one row of logits: largest blocks, masses, counts, cuts, the draw.

This file owns the inner loops of sampling on a CPU; ``draw_cpu`` calls them row by row. They
release the GIL, allocate nothing that grows with the vocabulary, and must never look at another
row: a row's result depends on that row alone.

Floats are compared as *ordered* integers: the bits of a float32, the magnitude flipped for
negative ones, sort as the floats do; so maxima and counts run many at a time, and cuts are
values (floors), not ranks: equal logits stay together. A row is looked at in blocks of 256 and
whole blocks are skipped by their largest element.

Shape suffixes: V vocabulary, N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from numpy import float32, float64, int32, int64, uint32, uint64

from kernels.noise import FACTORS, ID_FACTOR, LARGEST

BLOCK = 256
LOWEST = int32(-(1 << 31))  # below every ordered float
MINUS_INFINITY = int32(-2139095041)  # as an ordered integer
INFINITY = int32(0x7F800000)
_FORGOTTEN = float32(-32.0)  # blocks below it add less than 1e-9 to any sum


_I32, _F32 = ir.IntType(32), ir.FloatType()


def _instructions(typed: Callable[..., Any]) -> Any:
    """numba's ``intrinsic``, whose own type knows no call from compiled code."""
    return intrinsic(typed)


def _sort_key(b: Any, x: Any) -> Any:
    """Instructions: the magnitude flipped if ``x`` is negative. Its own inverse."""
    negative = b.and_(b.ashr(x, _I32(31)), _I32(0x7FFFFFFF))
    return b.xor(x, negative)


# These work on 32 bits; numba's own integers would grow to 64 and halve the speed.
@_instructions
def ordered(_context: Any, x: Any) -> Any:
    """A float32 as an int32 that sorts as it does; both zeros are 0."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        bits = b.bitcast(args[0], _I32)
        minus_zero = b.icmp_signed("==", bits, _I32(-(1 << 31)))
        return b.select(minus_zero, _I32(0), _sort_key(b, bits))

    return types.int32(types.float32), emit


@_instructions
def _value(_context: Any, o: Any) -> Any:
    """The float32 of an ordered integer."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.bitcast(_sort_key(b, args[0]), _F32)

    return types.float32(types.int32), emit


@_instructions
def _magnitude(_context: Any, x: Any) -> Any:
    """The bits of a float32 without its sign."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.and_(b.bitcast(args[0], _I32), _I32(0x7FFFFFFF))

    return types.int32(types.float32), emit


@_instructions
def _power_of_two(_context: Any, n: Any) -> Any:
    """2^n as float32, n in -126..127."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        return b.bitcast(b.shl(b.add(args[0], _I32(127)), _I32(23)), _F32)

    return types.float32(types.int32), emit


@_instructions
def _random_bits(_context: Any, token: Any, low: Any, high: Any) -> Any:
    """As ``noise.bits`` plus 2^31, read as unsigned: a small number is a large noise."""

    def emit(_c: Any, b: Any, _s: Any, args: Any) -> Any:
        h = b.xor(b.mul(args[0], _I32(ID_FACTOR)), args[1])
        for then in (args[2], _I32(0)):
            for shift, factor in ((16, FACTORS[0]), (15, FACTORS[1]), (16, 1)):
                h = b.mul(b.xor(h, b.lshr(h, _I32(shift))), _I32(factor))
            h = b.add(h, then)
        return b.xor(h, _I32(1 << 31))

    return types.uint32(types.uint32, types.uint32, types.uint32), emit


@njit(nogil=True)
def value_of(o: Any) -> Any:
    """The float32 of an ordered integer."""
    return _value(int32(o))


@njit(nogil=True)
def maxima(x_V: Any, out_N: Any) -> Any:
    """Each block's largest element, ordered; returns the row's, and its magnitude's bits."""
    top, magnitude = LOWEST, int32(0)
    for n in range(len(out_N)):
        largest = LOWEST
        for j in range(n * BLOCK, min(len(x_V), (n + 1) * BLOCK)):
            x = x_V[uint64(j)]
            largest = max(largest, ordered(x))
            magnitude = max(magnitude, _magnitude(x))
        out_N[n] = largest
        top = max(top, largest)
    return top, magnitude


@njit(nogil=True)
def first_of(x_V: Any, top_N: Any, top: Any) -> Any:
    """The lowest token id whose ordered logit is ``top``."""
    for n in range(len(top_N)):
        if top_N[n] == top:
            for j in range(n * BLOCK, min(len(x_V), (n + 1) * BLOCK)):
                if ordered(x_V[j]) == top:
                    return j
    return -1


@njit(nogil=True)
def count_above(x_V: Any, top_N: Any, o: Any) -> Any:
    """How many elements are larger than the ordered value."""
    total = int64(0)
    for n in range(len(top_N)):
        if top_N[n] > o:
            some = int32(0)
            for j in range(n * BLOCK, min(len(x_V), (n + 1) * BLOCK)):
                some += int32(1) if ordered(x_V[uint64(j)]) > o else int32(0)
            total += some
    return total


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _block_mass(x_V: Any, begin: Any, end: Any, top: Any, per_t: Any, floor: Any) -> Any:
    """Sum of exp((x - top) * per_t) over the elements at or above the floor; error 1e-6 of it.

    exp is 2^n, made from its bits, times 2^f by its series, f in [-0.5, 0.5].
    """
    total = float32(0.0)
    for j in range(begin, end):
        x = x_V[uint64(j)]
        y = max((x - top) * per_t, float32(-87.0)) * float32(1.4426950408889634)
        n = int32(y - float32(0.5))
        f = y - float32(n)
        p = float32(1.5403530393381609e-4)
        p = p * f + float32(1.3333558146428443e-3)
        p = p * f + float32(9.618129107628477e-3)
        p = p * f + float32(5.550410866482158e-2)
        p = p * f + float32(0.2402265069591007)
        p = p * f + float32(0.6931471805599453)
        p = p * f + float32(1.0)
        e = p * _power_of_two(n)
        total += e if ordered(x) >= floor else float32(0.0)
    return total


@njit(nogil=True)
def mass(x_V: Any, top_N: Any, top: Any, per_t: Any, floor: Any) -> Any:
    """Sum of exp((x - top) * per_t), top the row's largest, over elements at or above the floor."""
    largest = value_of(top)
    total = float64(0.0)
    for n in range(len(top_N)):
        if top_N[n] >= floor and (value_of(top_N[n]) - largest) * per_t > _FORGOTTEN:
            end = min(len(x_V), (n + 1) * BLOCK)
            total += float64(_block_mass(x_V, n * BLOCK, end, largest, per_t, floor))
    return total


@njit(nogil=True)
def _noise(shifted: Any) -> Any:
    """As ``noise.gumbel`` of one element."""
    uniform = float32((float64(shifted) + 0.5) * 2.0**-32)
    uniform = min(uniform, float32(1.0 - 2.0**-24))
    return -math.log(-math.log1p(-float64(uniform)))


@njit(nogil=True)
def noise_of(token: Any, key: Any) -> Any:
    """The noise of one token, uint32, as ``noise.gumbel`` gives it for a key."""
    return _noise(_random_bits(token, uint32(key), uint32(key >> uint64(32))))


@njit(nogil=True)
def _bound(need: Any) -> Any:
    """Only shifted bits below this can give a noise of ``need`` (and a little more can)."""
    if need < -2.5:
        return int64(1) << int64(32)
    return int64(-math.expm1(-math.exp(-(need - 1e-3))) * 4294967296.0) + int64(2)


@njit(nogil=True)
def _any_below(begin: Any, end: Any, low: Any, high: Any, bound: Any) -> Any:
    """Whether some token in the range has shifted bits below the bound."""
    least = uint32(0xFFFFFFFF)
    for token in range(begin, end):
        least = min(least, _random_bits(uint32(token), low, high))
    return int64(least) < bound


@njit(nogil=True)
def draw(x_V: Any, top_N: Any, top: Any, per_t: Any, floor: Any, key: Any) -> Any:
    """The token at or above the floor with the largest scaled logit plus noise.

    A block, then an element, is passed over when not even its possible noise could win, so few
    logarithms are taken however flat the row is.
    """
    low, high = uint32(key), uint32(key >> uint64(32))
    largest = value_of(top)
    token = first_of(x_V, top_N, top)
    best = _noise(_random_bits(uint32(token), low, high))
    for n in range(len(top_N)):
        need = best - float64((value_of(top_N[n]) - largest) * per_t)
        if top_N[n] < floor or need > LARGEST:
            continue
        begin, end = n * BLOCK, min(len(x_V), (n + 1) * BLOCK)
        bound = _bound(need)
        if not _any_below(begin, end, low, high, bound):
            continue
        for j in range(begin, end):
            shifted = _random_bits(uint32(j), low, high)
            if int64(shifted) < bound and ordered(x_V[j]) >= floor:
                score = float64((x_V[j] - largest) * per_t) + _noise(shifted)
                if score > best or (score == best and j < token):
                    token, best = j, score
    return token

"""Where a row of logits is cut by min_p, top_k and top_p, compiled for a CPU.

This file owns the floor: the smallest logit that survives, as an ordered integer. A cut is a
value, so equal logits stay together and the result does not depend on a sort. Semantics and
order are those of vLLM and transformers: min_p over the whole row, then top_k, then top_p of the
mass that the two left. It must never look at another row.

 1. The largest logits are found through the largest blocks and sorted; a narrow cut lies within.
 2. Otherwise the floor is found by halving the range of ordered integers, each time with one
    counting or summing pass, until what is left can be sorted. (Measured on SmolLM2's logits: 0.1
    to 0.25 ms for a nucleus of 30 to 2,500 tokens; a second, larger look took longer.)

Shape suffixes: V vocabulary, N blocks, K candidates.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit
from numpy import float32, float64, int32, int64, uint64

from kernels.draw_loops import BLOCK, LOWEST, count_above, mass, ordered, value_of

AHEAD = 64  # block maxima whose least bounds the first look: at least so many candidates
ROOM = 4096  # candidates that a look may find


@njit(nogil=True)
def least_of_largest(top_N: Any, n: Any) -> Any:
    """The n-th largest block maximum, or less than everything if there are not so many blocks."""
    if n >= len(top_N):
        return LOWEST
    low, high = int64(LOWEST), int64(0x7FFFFFFF)
    while low < high:
        middle = (low + high + 1) >> 1
        count = int64(0)
        for top in top_N:
            count += 1 if top >= middle else 0
        if count >= n:
            low = middle
        else:
            high = middle - 1
    return int32(low)


@njit(nogil=True)
def sort_down(numbers: Any, n: Any) -> None:
    """Sort the first ``n`` integers, largest first, in place (Shell's sort, Ciura's gaps).

    numpy's sort would take four seconds to compile.
    """
    for gap in (1750, 701, 301, 132, 57, 23, 10, 4, 1):
        for i in range(gap, n):
            one, j = numbers[i], i
            while j >= gap and numbers[j - gap] < one:
                numbers[j] = numbers[j - gap]
                j -= gap
            numbers[j] = one


@njit(nogil=True)
def candidates(x_V: Any, top_N: Any, least: Any, most: Any, out_K: Any) -> Any:
    """The logits from ``least`` to ``most``, largest first, equal ones by id; their number.

    One int64 each: the ordered logit, then the id counted backwards. -1 if there are more than
    ``out_K`` has room for.
    """
    n_found = 0
    for n in range(len(top_N)):
        if top_N[n] >= least:
            for j in range(n * BLOCK, min(len(x_V), (n + 1) * BLOCK)):
                o = ordered(x_V[uint64(j)])
                if least <= o <= most:
                    if n_found == len(out_K):
                        return -1
                    out_K[n_found] = (int64(o) << 32) + (int64(0xFFFFFFFF) - j)
                    n_found += 1
    sort_down(out_K, n_found)
    return n_found


@njit(nogil=True)
def floor_of(
    x_V: Any, top_N: Any, top: Any, per_t: Any, k: Any, p: Any, min_p: Any, room_K: Any
) -> Any:
    """Smallest surviving logit, ordered. ``k`` 0, ``p`` 1 and ``min_p`` 0 cut nothing.

    ``top`` is the row's largest, ordered; ``room_K`` is int64 memory to work in.
    """
    floor = LOWEST
    if min_p >= 1.0:
        return top
    if min_p > 0.0:
        floor = ordered(value_of(top) + float32(math.log(min_p) / per_t))
    by_count = 0 < k < len(x_V)
    if not by_count:
        k = 0
        if p >= 1.0:
            return floor
    if p <= 0.0:
        return top
    least = least_of_largest(top_N, AHEAD)
    n_found = candidates(x_V, top_N, least, top, room_K)
    if n_found >= 0:
        settled, found = _floor_within(
            x_V, top_N, top, per_t, k, p, floor, room_K, n_found, least == LOWEST
        )
        if settled:
            return found
    if by_count:
        floor = max(floor, _floor_by_count(x_V, top_N, top, k))
    if p >= 1.0:
        return floor
    goal = p * mass(x_V, top_N, top, per_t, floor)
    return max(floor, _floor_by_mass(x_V, top_N, top, per_t, floor, goal, room_K))


@njit(nogil=True)
def _floor_within(
    x_V: Any,
    top_N: Any,
    top: Any,
    per_t: Any,
    k: Any,
    p: Any,
    floor: Any,
    room_K: Any,
    n_found: Any,
    whole: Any,
) -> Any:
    """Whether the candidates settle the cut, and the floor. ``whole``: they are all there are."""
    if k > 0:
        if n_found >= k:
            floor = max(floor, int32(room_K[k - 1] >> 32))
        elif not whole:
            return False, floor
    if p >= 1.0:
        return True, floor
    goal = p * mass(x_V, top_N, top, per_t, floor)
    reached, last, n_walked = _walk(top, per_t, float64(0.0), goal, floor, top, room_K, n_found)
    if reached:
        return True, last
    return whole or n_walked < n_found, floor


@njit(nogil=True)
def _walk(
    top: Any, per_t: Any, before: Any, goal: Any, floor: Any, last: Any, room_K: Any, n_found: Any
) -> Any:
    """Down the sorted candidates from mass ``before`` until the goal is reached or the floor.

    Returns whether it was, the last value that stays, and how many candidates were passed. A
    value stays while the mass of what is larger has not reached the goal.
    """
    largest = value_of(top)
    i = 0
    while i < n_found and int32(room_K[i] >> 32) >= floor:
        if before >= goal:
            return True, last, i
        last, n_equal = int32(room_K[i] >> 32), 0
        while i < n_found and int32(room_K[i] >> 32) == last:
            n_equal += 1
            i += 1
        before += n_equal * math.exp(float64((value_of(last) - largest) * per_t))
    return before >= goal, last, i


@njit(nogil=True)
def _floor_by_count(x_V: Any, top_N: Any, top: Any, k: Any) -> Any:
    """The least integer that fewer than ``k`` logits exceed: at most the k-th largest."""
    low, high = int64(LOWEST), int64(top)
    while low < high:
        middle = (low + high) >> 1
        if count_above(x_V, top_N, int32(middle)) < k:
            high = middle
        else:
            low = middle + 1
    return int32(low)


@njit(nogil=True)
def _floor_by_mass(
    x_V: Any, top_N: Any, top: Any, per_t: Any, floor: Any, goal: Any, room_K: Any
) -> Any:
    """The least value such that what exceeds it has less mass than the goal.

    Halved until the logits between the bounds can be sorted.
    """
    low, high = int64(floor), int64(top)
    middle = int64(ordered(value_of(top) - float32(10.0) / per_t))  # a likely lower bound
    halvings = 0
    while low < high:
        if halvings > 3 and halvings & 1 == 0:
            n_found = candidates(x_V, top_N, int32(low), int32(high), room_K)
            if n_found >= 0:
                above = float64(0.0)
                if high < top:
                    above = mass(x_V, top_N, top, per_t, int32(high + 1))
                return _walk(top, per_t, above, goal, int32(low), int32(high), room_K, n_found)[1]
        if halvings > 0 or not low <= middle < high:
            middle = (low + high) >> 1
        halvings += 1
        if mass(x_V, top_N, top, per_t, int32(middle + 1)) < goal:
            high = middle
        else:
            low = middle + 1
    return int32(low)

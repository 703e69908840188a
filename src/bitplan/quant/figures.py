"""Figures of an activation in one loop, compiled by numba: the sum of magnitudes, the lowest value, an order statistic.

The order statistic is exact without sorting: values are counted by the leading bits of their magnitudes, which have
the order of the magnitudes, and only those that share the bits of the one that is looked for are put in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from bitplan.adapters.numba import compile_for
from bitplan.quant.lsq import flat

_LANES = 16
_SHIFT = 19  # of 31 bits of magnitude so many are not counted by: 8 of the exponent and 4 of the mantissa are


def sum_and_lowest(v: Tensor) -> tuple[float, float]:
    """Σ|v| in fp64 and min v of a dense fp32 tensor; the sum is not finite where a value is not."""
    total, lowest = _sum_and_lowest(_values(v))
    return float(total), float(lowest)


def order_statistic(v: Tensor, rank: int) -> float:
    """The magnitude of a dense fp32 tensor that is the so-manieth smallest, from 1; all values are finite."""
    bits = _values(v).view(np.int32)
    below = np.cumsum(_counts(bits))
    key = int(np.searchsorted(below, rank))
    among = _with_key(bits, key, int(below[key] - (below[key - 1] if key else 0)))
    place = rank - 1 - int(below[key - 1] if key else 0)
    return float(np.partition(among, place)[place : place + 1].view(np.float32)[0])


def _values(v: Tensor) -> Any:
    return flat(v.detach()).numpy()


@compile_for("UniTuple(f8, 2)(f4[::1])")
def _sum_and_lowest(v: Any) -> tuple[float, float]:
    totals, lowest = np.zeros(_LANES, np.float64), np.full(_LANES, np.inf, np.float32)
    rows = v.size // _LANES
    by_rows = v[: rows * _LANES].reshape(rows, _LANES)
    for row in range(rows):
        x = by_rows[row]
        for lane in range(_LANES):
            totals[lane] += abs(x[lane])
            lowest[lane] = x[lane] if x[lane] < lowest[lane] else lowest[lane]
    total, least = totals.sum(), lowest.min()
    for i in range(rows * _LANES, v.size):
        total += abs(v[i])
        least = min(least, v[i])
    return total, least


@compile_for("i8[::1](i4[::1])")
def _counts(bits: Any) -> Any:
    counts = np.zeros((4, 1 << (31 - _SHIFT)), np.int64)  # four, since equal values in a row would wait for each other
    for i in range(bits.size):
        counts[i & 3, (bits[i] & 0x7FFFFFFF) >> _SHIFT] += 1
    return counts.sum(axis=0)


@compile_for("i4[::1](i4[::1], i8, i8)")
def _with_key(bits: Any, key: int, count: int) -> Any:
    found = np.empty(count, np.int32)
    at = 0
    for i in range(bits.size):
        magnitude = bits[i] & 0x7FFFFFFF
        if magnitude >> _SHIFT == key:
            found[at] = magnitude
            at += 1
    return found

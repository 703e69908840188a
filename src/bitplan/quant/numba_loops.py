"""The quantizer as one loop per direction, compiled by numba: about what a ReLU costs.

The compiled code is cached on disk; no C++ compiler is needed. Larger tensors are shared among as many
threads as torch may use. Results are those of torch's operations bit for bit, except the sum of `gradients_`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.adapters.numba import carray, compile_for, inline, intrinsic, types

_ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds half to even, exact below 2²²
_ZERO = np.float32(0)
_LANES = 64
_SPILL = 256  # rows summed in fp32 before the partial sums move to fp64
_PIECE = 1 << 18  # the fewest elements worth a thread of their own


def quantize(v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> Tensor:
    """Return round(clip(v/s, −Qn, Qp))·s of a dense fp32 tensor, in its layout; values below `below` pass unchanged."""
    out = torch.empty_like(v)
    _share(_forward, (v, out), v.numel(), step, low, high, below)
    return out


def encode(v: Tensor, step: float, low: int, high: int, zero_point: int) -> tuple[Tensor, bool]:
    """Return the integer values of a dense fp32 tensor plus a zero point, uint8 in its layout; and if one was NaN."""
    out = torch.empty_like(v, dtype=torch.uint8)
    return out, any(_share(_encode, (v, out), v.numel(), step, low, high, zero_point))


def step_slopes(v: Tensor, step: float, low: int, high: int) -> Tensor:
    """Return ∂v̂/∂|s| of every element of a dense fp32 tensor, in its memory layout."""
    out = torch.empty_like(v)
    _share(_slopes, (v, out), v.numel(), step, low, high)
    return out


def gradients_(grad: Tensor, v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> float:
    """Turn a gradient, laid out as v is, into the one for v; return that for the scale, summed in the same loop."""
    return float(np.float32(sum(_share(_backward, (v, grad), v.numel(), step, low, high, below))))


def _share(loop: Callable[..., Any], tensors: tuple[Tensor, Tensor], size: int, *how: float) -> list[Any]:
    """Run a loop over two tensors: all of it here, or a large tensor's on as many threads as torch may use."""
    one, other = tensors
    first, second = one.data_ptr(), other.data_ptr()
    pieces = 1 if size < 2 * _PIECE else min(torch.get_num_threads(), size // _PIECE)
    if pieces == 1:
        return [loop(first, second, size, *how)]
    width, (each, other_each) = -(-size // pieces // _LANES) * _LANES, (t.element_size() for t in tensors)

    def part(start: int) -> Any:
        return loop(first + each * start, second + other_each * start, min(width, size - start), *how)

    return list(_pool(pieces).map(part, range(0, size, width)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="bitplan-lsq")


def _pointer_to(kind: Any) -> Any:
    """Return a function that makes a pointer of an address: making arrays takes as long as reading them."""

    @intrinsic
    def pointer(_: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.uintp), build

    return pointer


_floats, _bytes = _pointer_to(types.float32), _pointer_to(types.uint8)


@inline
def _clipped(ratio: Any, low: Any, high: Any) -> Any:
    bounded = low if ratio < low else ratio  # so written, NaN stays NaN
    return high if bounded > high else bounded


@compile_for("void(uintp, uintp, intp, f4, f4, f4, f4)")
def _forward(source: Any, target: Any, size: Any, s: Any, low: Any, high: Any, below: Any) -> None:
    v, out = carray(_floats(source), size), carray(_floats(target), size)
    for i in range(size):
        rounded = ((_clipped(v[i] / s, low, high) + _ROUND) - _ROUND) * s
        out[i] = v[i] if v[i] < below else rounded


@compile_for("b1(uintp, uintp, intp, f4, f4, f4, f4)")
def _encode(source: Any, target: Any, size: Any, s: Any, low: Any, high: Any, zero_point: Any) -> bool:
    v, out = carray(_floats(source), size), carray(_bytes(target), size)
    shifted = _ROUND + zero_point  # even, so that halves go to even codes; the lowest byte of the sum is the code
    has_nan = False
    for i in range(size):
        has_nan |= v[i] != v[i]  # a count would widen every lane
        code = np.float32(min(max(v[i] / s, low), high) + shifted)
        out[i] = np.uint8(code.view(np.uint32))
    return has_nan


@inline
def _step_slope(ratio: Any, outside: Any, low: Any, high: Any) -> Any:
    code = (_clipped(ratio, low, high) + _ROUND) - _ROUND
    return code - (_ZERO if outside else ratio)


@compile_for("void(uintp, uintp, intp, f4, f4, f4)")
def _slopes(source: Any, target: Any, size: Any, s: Any, low: Any, high: Any) -> None:
    v, out = carray(_floats(source), size), carray(_floats(target), size)
    for i in range(size):
        ratio = v[i] / s
        out[i] = _step_slope(ratio, not ((ratio > low) & (ratio < high)), low, high)


@compile_for("f8(uintp, uintp, intp, f4, f4, f4, f4)")
def _backward(source: Any, given: Any, size: Any, s: Any, low: Any, high: Any, below: Any) -> float:
    v, grad = carray(_floats(source), size), carray(_floats(given), size)
    total = 0.0
    lanes = np.zeros(_LANES, np.float32)
    rows = size // _LANES
    v_rows = v[: rows * _LANES].reshape(rows, _LANES)
    grad_rows = grad[: rows * _LANES].reshape(rows, _LANES)
    for row in range(rows):
        x, g = v_rows[row], grad_rows[row]
        for lane in range(_LANES):
            ratio, incoming = x[lane] / s, g[lane]
            outside, is_mask = not ((ratio > low) & (ratio < high)), x[lane] < below
            g[lane] = _ZERO if outside and not is_mask else incoming
            lanes[lane] += incoming * (_ZERO if is_mask else _step_slope(ratio, outside, low, high))
        if row % _SPILL == _SPILL - 1:
            for lane in range(_LANES):
                total += lanes[lane]
                lanes[lane] = 0
    for lane in range(_LANES):
        total += lanes[lane]
    for i in range(rows * _LANES, size):
        ratio, incoming = v[i] / s, grad[i]
        outside, is_mask = not ((ratio > low) & (ratio < high)), v[i] < below
        grad[i] = _ZERO if outside and not is_mask else incoming
        total += incoming * (_ZERO if is_mask else _step_slope(ratio, outside, low, high))
    return total


# Statistics of an activation for calibration: the sum of magnitudes, the lowest value, an order statistic.

_STATISTICS_LANES = 16
_SHIFT = 19  # of 31 bits of magnitude so many are not counted by: 8 of the exponent and 4 of the mantissa are


def sum_and_lowest(v: Tensor) -> tuple[float, float]:
    """Return Σ|v| in fp64 and min v of a dense fp32 tensor; the sum is not finite if a value is not."""
    total, lowest = _sum_and_lowest(_values(v))
    return float(total), float(lowest)


def order_statistic(v: Tensor, rank: int) -> float:
    """Return the `rank`-th smallest magnitude (from 1) of a dense fp32 tensor whose values are finite."""
    bits = _values(v).view(np.int32)
    below = np.cumsum(_counts(bits))
    key = int(np.searchsorted(below, rank))
    among = _with_key(bits, key, int(below[key] - (below[key - 1] if key else 0)))
    place = rank - 1 - int(below[key - 1] if key else 0)
    return float(np.partition(among, place)[place : place + 1].view(np.float32)[0])


def _values(v: Tensor) -> Any:
    """Return the elements of a dense tensor in memory order, without a copy."""
    return (v if v.is_contiguous() else v.permute(0, 2, 3, 1)).detach().view(-1).numpy()


@compile_for("UniTuple(f8, 2)(f4[::1])")
def _sum_and_lowest(v: Any) -> tuple[float, float]:
    totals, lowest = np.zeros(_STATISTICS_LANES, np.float64), np.full(_STATISTICS_LANES, np.inf, np.float32)
    rows = v.size // _STATISTICS_LANES
    by_rows = v[: rows * _STATISTICS_LANES].reshape(rows, _STATISTICS_LANES)
    for row in range(rows):
        x = by_rows[row]
        for lane in range(_STATISTICS_LANES):
            totals[lane] += abs(x[lane])
            lowest[lane] = x[lane] if x[lane] < lowest[lane] else lowest[lane]
    total, least = totals.sum(), lowest.min()
    for i in range(rows * _STATISTICS_LANES, v.size):
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

"""The quantizer as one loop per direction, compiled by numba: about what a ReLU costs.

The compiled code is cached on disk; no C++ compiler is needed. Larger tensors are shared among as many
threads as torch may use. Results are those of `quant/lsq.py` bit for bit, but for the sum of `gradients_and_sum_`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bitplan.adapters.numba import carray, compile_for, inline, intrinsic, types
from bitplan.quant.lsq import CHUNK, added_up, flat

# --- The quantizer as one loop per direction, compiled by numba: about what a ReLU costs.

_ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds half to even, exact below 2²²
_ZERO = np.float32(0)
_LANES = 64
_SPILL = 256  # rows summed in fp32 before the partial sums move to fp64
_PIECE = 1 << 18  # the fewest elements worth a thread of their own
_KEPT = threading.local()


def quantize(v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> Tensor:
    """round(clip(v/s, −Qn, Qp))·s of a dense fp32 tensor, in its memory layout; what is `below` passes as it is."""
    out = torch.empty_like(v)
    _share(_forward, (v, out), v.numel(), step, low, high, below)
    return out


def encode(v: Tensor, step: float, low: int, high: int, zero_point: int) -> tuple[Tensor, bool]:
    """The codes of a dense fp32 tensor plus a zero point, uint8 in its memory layout; and whether a value was NaN."""
    out = torch.empty_like(v, dtype=torch.uint8)
    return out, any(_share(_encode, (v, out), v.numel(), step, low, high, zero_point))


def step_slopes(v: Tensor, step: float, low: int, high: int) -> Tensor:
    """∂v̂/∂|s| of every element of a dense fp32 tensor, in its memory layout."""
    out = torch.empty_like(v)
    _share(_slopes_alone, (v, out), v.numel(), step, low, high)
    return out


def gradients_(grad: Tensor, v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> Tensor:
    """Turn a gradient, laid out as v is, into that for v; give the step's, summed over pieces by torch.

    So no bit of the sum depends on the loop.
    """
    size, threads = v.numel(), torch.get_num_threads()
    scratch, parts = _scratch(threads), []
    source, given = v.data_ptr(), grad.data_ptr()

    def work(row: _Scratch, start: int) -> None:
        _slopes(source + 4 * start, given + 4 * start, row.address, min(CHUNK, size - start), step, low, high, below)

    run = map if threads == 1 else _pool(threads).map
    for first in range(0, size, CHUNK * threads):
        starts = range(first, min(first + CHUNK * threads, size), CHUNK)
        list(run(work, scratch, starts))
        for row, start in zip(scratch, starts, strict=False):
            came, slopes, left = row.came, row.slopes, size - start
            parts.append(torch.dot(came, slopes) if left >= CHUNK else torch.dot(came[:left], slopes[:left]))
    return added_up(parts)


def gradients_and_sum_(grad: Tensor, v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> float:
    """Turn a gradient, laid out as v is, into that for v; give the step's, summed in the same loop."""
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


class _Scratch(NamedTuple):
    """Where a thread writes of a chunk the gradient as it came, and behind it the slopes."""

    address: int
    came: Tensor
    slopes: Tensor


def _scratch(threads: int) -> list[_Scratch]:
    """A row for each thread; kept with its parts, since new memory and new tensors take longer than the work."""
    kept: list[_Scratch] | None = getattr(_KEPT, "scratch", None)
    if kept is None or len(kept) != threads:
        made = torch.empty(threads, 2, CHUNK, dtype=torch.float32, device="cpu")
        kept = _KEPT.scratch = [_Scratch(row.data_ptr(), *row) for row in made]
    return kept


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="bitplan-lsq")


def _pointer_to(kind: Any) -> Any:
    """What makes a pointer of an address; loops are given addresses, since arrays take as long to make as to read."""

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
        made = ((_clipped(v[i] / s, low, high) + _ROUND) - _ROUND) * s
        out[i] = v[i] if v[i] < below else made


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
def _slopes_alone(source: Any, target: Any, size: Any, s: Any, low: Any, high: Any) -> None:
    v, out = carray(_floats(source), size), carray(_floats(target), size)
    for i in range(size):
        ratio = v[i] / s
        out[i] = _step_slope(ratio, not ((ratio > low) & (ratio < high)), low, high)


@compile_for("void(uintp, uintp, uintp, intp, f4, f4, f4, f4)")
def _slopes(source: Any, given: Any, scratch: Any, size: Any, s: Any, low: Any, high: Any, below: Any) -> None:
    v, grad = carray(_floats(source), size), carray(_floats(given), size)
    came, slopes = carray(_floats(scratch), size), carray(_floats(scratch + 4 * CHUNK), size)
    for i in range(size):
        ratio, incoming = v[i] / s, grad[i]
        outside, is_mask = not ((ratio > low) & (ratio < high)), v[i] < below
        came[i] = incoming
        slopes[i] = _ZERO if is_mask else _step_slope(ratio, outside, low, high)
        grad[i] = _ZERO if outside and not is_mask else incoming


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


# --- Figures of an activation in one loop, compiled by numba: the sum of magnitudes, the lowest value, an order
# statistic.

_STATISTICS_LANES = 16
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

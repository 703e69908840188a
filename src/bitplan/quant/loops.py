"""The quantizer as one loop per direction, compiled by numba: about what a ReLU costs.

The compiled code is cached on disk; no C++ compiler is needed. Larger tensors are shared among as many
threads as torch may use. Results are those of `quant/lsq.py` bit for bit, but for the sum of `gradients_and_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from bitplan.quant.lsq import added_up, flat, laid_out_like

_ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds half to even, exact below 2²²
_ZERO = np.float32(0)
_LANES = 64
_SPILL = 256  # rows summed in fp32 before the partial sums move to fp64
_PIECE = 1 << 18  # the fewest elements worth a thread of their own
_COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy", "cache": True}


def quantize(v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf) -> Tensor:
    """round(clip(v/s, −Qn, Qp))·s of a dense fp32 tensor, in its memory layout; what is `below` passes as it is."""
    out = torch.empty_like(v)
    source, target = _array(v), _array(out)
    _share(lambda piece: _forward(source[piece], target[piece], step, low, high, below), source.size)
    return out


def encode(v: Tensor, step: float, low: int, high: int, zero_point: int) -> tuple[Tensor, bool]:
    """The codes of a dense fp32 tensor plus a zero point, uint8 in its memory layout; and whether a value was NaN."""
    out = torch.empty_like(v, dtype=torch.uint8)
    source, target = _array(v), _array(out)
    seen = _share(lambda piece: _encode(source[piece], target[piece], step, low, high, zero_point), source.size)
    return out, any(seen)


def gradients(
    grad: Tensor, v: Tensor, step: float, low: int, high: int, *, piece: int, below: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """Gradients for v and for the step, which is summed over pieces by torch, so that no bit depends on the loop."""
    out = torch.empty_like(v)
    incoming = flat(laid_out_like(grad, v).detach())
    source, given, target = _array(v), incoming.numpy(), _array(out)
    threads = torch.get_num_threads()
    slopes = torch.empty(threads, min(piece, source.size))
    rows, parts = slopes.numpy(), []

    def work(row: int, start: int) -> None:
        there = slice(start, start + piece)
        _slopes(source[there], given[there], target[there], rows[row], step, low, high, below)

    run = map if threads == 1 else _pool(threads).map
    for first in range(0, source.size, piece * threads):
        starts = range(first, min(first + piece * threads, source.size), piece)
        for row, start in enumerate(_all_of(run, work, starts)):
            there = incoming[start : start + piece]
            parts.append(torch.dot(there, slopes[row, : len(there)]))
    return out, added_up(parts)


def gradients_and_sum(
    grad: Tensor, v: Tensor, step: float, low: int, high: int, *, below: float = -math.inf
) -> tuple[Tensor, Tensor]:
    """Gradients for v and, summed in the same loop, for the step."""
    out = torch.empty_like(v)
    source, incoming, target = _array(v), _array(laid_out_like(grad, v)), _array(out)
    sums = _share(
        lambda piece: _backward(source[piece], incoming[piece], target[piece], step, low, high, below), source.size
    )
    return out, torch.tensor(sum(sums), dtype=torch.float32)


def _all_of(run: Callable[..., Any], work: Callable[[int, int], None], starts: range) -> range:
    """Do the work for all of these, and then give them."""
    list(run(work, range(len(starts)), starts))
    return starts


def _array(v: Tensor) -> Any:
    return flat(v.detach()).numpy()


def _share(work: Callable[[slice], Any], size: int) -> list[Any]:
    """Do the work in slices: all of it here, or a large tensor's on as many threads as torch may use."""
    pieces = 1 if size < 2 * _PIECE else min(torch.get_num_threads(), size // _PIECE)
    if pieces == 1:
        return [work(slice(0, size))]
    width = -(-size // pieces // _LANES) * _LANES
    slices = [slice(start, min(start + width, size)) for start in range(0, size, width)]
    return list(_pool(pieces).map(work, slices))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="bitplan-lsq")


@numba.njit(inline="always", **_COMPILED)  # type: ignore[untyped-decorator]
def _clipped(ratio: Any, low: Any, high: Any) -> Any:
    bounded = low if ratio < low else ratio  # so written, NaN stays NaN
    return high if bounded > high else bounded


@numba.njit("void(f4[::1], f4[::1], f4, f4, f4, f4)", **_COMPILED)
def _forward(v: Any, out: Any, s: Any, low: Any, high: Any, below: Any) -> None:
    for i in range(v.size):
        made = ((_clipped(v[i] / s, low, high) + _ROUND) - _ROUND) * s
        out[i] = v[i] if v[i] < below else made


@numba.njit("b1(f4[::1], u1[::1], f4, f4, f4, f4)", **_COMPILED)
def _encode(v: Any, out: Any, s: Any, low: Any, high: Any, zero_point: Any) -> bool:
    others = 0  # of the values that are not equal to themselves
    for i in range(v.size):
        others += v[i] != v[i]
        code = min(max(v[i] / s, low), high)
        out[i] = np.uint8(np.int32(((code + _ROUND) - _ROUND) + zero_point))
    return others > 0


@numba.njit(inline="always", **_COMPILED)  # type: ignore[untyped-decorator]
def _step_slope(ratio: Any, outside: Any, low: Any, high: Any) -> Any:
    code = (_clipped(ratio, low, high) + _ROUND) - _ROUND
    return code - (_ZERO if outside else ratio)


@numba.njit("void(f4[::1], f4[::1], f4[::1], f4[::1], f4, f4, f4, f4)", **_COMPILED)
def _slopes(v: Any, grad: Any, out: Any, slopes: Any, s: Any, low: Any, high: Any, below: Any) -> None:
    for i in range(v.size):
        ratio = v[i] / s
        outside, is_mask = not ((ratio > low) & (ratio < high)), v[i] < below
        out[i] = _ZERO if outside and not is_mask else grad[i]
        slopes[i] = _ZERO if is_mask else _step_slope(ratio, outside, low, high)


@numba.njit("f8(f4[::1], f4[::1], f4[::1], f4, f4, f4, f4)", **_COMPILED)
def _backward(v: Any, grad: Any, out: Any, s: Any, low: Any, high: Any, below: Any) -> float:
    total = 0.0
    lanes = np.zeros(_LANES, np.float32)
    rows = v.size // _LANES
    v_rows = v[: rows * _LANES].reshape(rows, _LANES)
    grad_rows = grad[: rows * _LANES].reshape(rows, _LANES)
    out_rows = out[: rows * _LANES].reshape(rows, _LANES)
    for row in range(rows):
        x, g, o = v_rows[row], grad_rows[row], out_rows[row]
        for lane in range(_LANES):
            ratio = x[lane] / s
            outside, is_mask = not ((ratio > low) & (ratio < high)), x[lane] < below
            o[lane] = _ZERO if outside and not is_mask else g[lane]
            lanes[lane] += g[lane] * (_ZERO if is_mask else _step_slope(ratio, outside, low, high))
        if row % _SPILL == _SPILL - 1:
            for lane in range(_LANES):
                total += lanes[lane]
                lanes[lane] = 0
    for lane in range(_LANES):
        total += lanes[lane]
    for i in range(rows * _LANES, v.size):
        ratio = v[i] / s
        outside, is_mask = not ((ratio > low) & (ratio < high)), v[i] < below
        out[i] = _ZERO if outside and not is_mask else grad[i]
        total += grad[i] * (_ZERO if is_mask else _step_slope(ratio, outside, low, high))
    return total

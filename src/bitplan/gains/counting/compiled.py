"""The inner loops of EAGL, compiled by numba, which only this file imports; `plain.py` is its twin.

Every loop takes `body`, fp32 weights in lines of 128, the last lines of a run of weights filled up with
zeros, and one step per `per` lines. Codes are round-half-even(clip(W/s, low, high)): adding 1.5·2²³ to a
clipped fp32 quotient rounds half to even and leaves the code in the lowest bits, and a NaN is the only sum
whose exponent is all ones.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import njit, types

LINE = 128
LANES = 64
_LINES_PER_SPILL = 7  # two weights per lane and line: 14 fit a counter of four bits
_SPILLS_PER_FLUSH = 18  # 18 · 14 = 252 fit a counter of eight bits
_MAGIC = 12582912.0  # 1.5 · 2²³
_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F

log = logging.getLogger(__name__)
_compiling = threading.Lock()

_I64, _F32, _F64 = types.int64, types.float32, types.float64
_LINES = types.Array(_F32, 2, "C", readonly=True)
_STEPS = types.Array(_F32, 1, "C", readonly=True)
_SERIES = types.Array(_F64, 1, "C", readonly=True)


def _lazily(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile for one signature at the first call, from numba's cache where one can be written."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        built: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if not built:
                with _compiling:
                    if not built:
                        built.append(_build(function, signature))
            return built[0](*arguments)

        return call

    return decorate


def _build(function: Callable[..., Any], signature: tuple[Any, ...]) -> Callable[..., Any]:
    compiler: Any = njit
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(Callable[..., Any], compiler(signature, cache=True, **options)(function))
    except (RuntimeError, OSError) as error:  # nowhere to write: a read-only install and home
        log.info("compiled code of %s is not cached: %s", function.__name__, error)
        return cast(Callable[..., Any], compiler(signature, **options)(function))


@_lazily(_LINES, _STEPS, _I64, _F32, _F32, types.uint64[:, ::1], types.uint32[::1], types.int64[::1])
def count_nibbles(
    body: Any, steps: Any, per: int, low: float, high: float, scratch: Any, seen: Any, counts: Any
) -> bool:
    """Add the codes of at most 4 bits to 16 counts and tell whether there was a NaN.

    64 lanes of 64 bits hold sixteen 4-bit counters each, spilled into bytes and then into `counts`;
    `scratch` (3, 64) and `seen` (64,) are zero before and after.
    """
    nibbles, even, odd = scratch[0], scratch[1], scratch[2]
    turn, step = 0, steps[0]
    magic = np.float32(_MAGIC) - low
    one, four, mask, byte = np.uint64(1), np.uint64(4), np.uint64(_LOW_NIBBLES), np.uint64(255)
    for first in range(0, body.shape[0], _LINES_PER_SPILL * _SPILLS_PER_FLUSH):
        last = min(body.shape[0], first + _LINES_PER_SPILL * _SPILLS_PER_FLUSH)
        for begin in range(first, last, _LINES_PER_SPILL):
            for row in range(begin, min(last, begin + _LINES_PER_SPILL)):
                line = body[row]
                if row == turn:
                    step = steps[row // per]
                    turn += per
                for k in range(LANES):
                    x = line[k] / step
                    y = line[k + LANES] / step
                    x = low if x < low else x
                    y = low if y < low else y
                    x = high if x > high else x
                    y = high if y > high else y
                    a = np.float32(x + magic).view(np.uint32)
                    b = np.float32(y + magic).view(np.uint32)
                    seen[k] |= a | b
                    nibbles[k] += (one << (np.uint64(a & 15) * four)) + (one << (np.uint64(b & 15) * four))
            for k in range(LANES):
                even[k] += nibbles[k] & mask
                odd[k] += (nibbles[k] >> four) & mask
                nibbles[k] = 0
        for k in range(LANES):
            for c in range(8):
                counts[2 * c] += (even[k] >> np.uint64(8 * c)) & byte
                counts[2 * c + 1] += (odd[k] >> np.uint64(8 * c)) & byte
            even[k] = 0
            odd[k] = 0
    bits = np.uint32(0)
    for k in range(LANES):
        bits |= seen[k]
        seen[k] = 0
    return bool((bits >> np.uint32(23)) & np.uint32(255) == np.uint32(255))


@_lazily(_LINES, _STEPS, _I64, _F32, _F32, types.int64[::1])
def count_codes(body: Any, steps: Any, per: int, low: float, high: float, counts: Any) -> bool:
    """Add the codes of up to 16 bits to as many counts and tell whether there was a NaN."""
    magic = np.float32(_MAGIC) - low
    mask = np.uint32(counts.size - 1)
    seen = np.uint32(0)
    for row in range(body.shape[0]):
        line = body[row]
        step = steps[row // per]
        for k in range(LINE):
            x = line[k] / step
            x = low if x < low else x
            x = high if x > high else x
            code = np.float32(x + magic).view(np.uint32)
            seen |= code
            counts[code & mask] += 1
    return bool((seen >> np.uint32(23)) & np.uint32(255) == np.uint32(255))


@_lazily(types.Array(types.uint64, 1, "C", readonly=True), types.uint32[::1])
def count_patterns(words: Any, table: Any) -> None:
    """Count 16-bit patterns, four to a word."""
    mask, one = np.uint64(65535), np.uint32(1)
    for i in range(words.size):
        word = words[i]
        table[word & mask] += one
        table[(word >> np.uint64(16)) & mask] += one
        table[(word >> np.uint64(32)) & mask] += one
        table[word >> np.uint64(48)] += one


@_lazily(types.Array(types.uint32, 1, "C", readonly=True), _I64, types.uint32[::1])
def count_prefixes(words: Any, shift: int, table: Any) -> None:
    """Count what is left of 32-bit patterns when their lowest `shift` bits are cut off."""
    down = np.uint32(shift)
    for i in range(words.size):
        table[words[i] >> down] += np.uint32(1)


@_lazily(_LINES, _I64, types.float64[::1], types.float32[::1])
def measure(body: Any, per: int, sums: Any, tops: Any) -> None:
    """Write the sum and the maximum of |W| of every run of `per` lines; a NaN makes the sum NaN."""
    total, top = np.zeros(LINE, np.float64), np.zeros(LINE, np.float32)
    for run in range(sums.size):
        total[:] = 0
        top[:] = 0
        for row in range(run * per, min(body.shape[0], (run + 1) * per)):
            line = body[row]
            for k in range(LINE):
                x = abs(line[k])
                total[k] += x
                top[k] = x if x > top[k] else top[k]
        for k in range(LINE):
            sums[run] += total[k]
            tops[run] = max(tops[run], top[k])


@_lazily(_SERIES, _SERIES, _SERIES, _F64, _F64, types.float64[:, ::1])
def fit(values: Any, counts: Any, inverses: Any, low: float, high: float, sums: Any) -> None:
    """Add Σ n·w·q and Σ n·q² for the inverse of every trial step, q the code of w, which occurs n times."""
    magic = 6755399441055744.0  # 1.5 · 2⁵²
    cross, square = sums[0], sums[1]
    for i in range(values.size):
        value, count = values[i], counts[i]
        for k in range(inverses.size):
            q = value * inverses[k]
            q = low if q < low else q
            q = high if q > high else q
            q = (q + magic) - magic
            cross[k] += count * value * q
            square[k] += count * q * q


@_lazily(_LINES, _I64, _STEPS, _F32, _F32, types.float32[::1])
def fit_runs(body: Any, per: int, fractions: Any, low: float, high: float, steps: Any) -> None:
    """Write every run's least-squares step: the best of max|W|/high · `fractions`, refitted to its codes.

    For given codes q the best step is Σwq/Σq², and it takes (Σwq)²/Σq² off the squared error.
    """
    magic = np.float32(_MAGIC)
    cross, square = np.zeros(fractions.size, np.float32), np.zeros(fractions.size, np.float32)
    inverse = high / fractions
    for run in range(steps.size):
        top = np.float32(0)
        lines = body[run * per : (run + 1) * per]
        for row in range(lines.shape[0]):
            for k in range(LINE):
                top = max(top, abs(lines[row, k]))
        if top == 0:
            continue
        cross[:] = 0
        square[:] = 0
        for row in range(lines.shape[0]):
            for k in range(LINE):
                value = lines[row, k] / top
                for t in range(inverse.size):
                    q = value * inverse[t]
                    q = low if q < low else q
                    q = high if q > high else q
                    q = (q + magic) - magic
                    cross[t] += value * q
                    square[t] += q * q
        best, most = np.float32(0), np.float32(-1)
        for t in range(inverse.size):
            if square[t] > 0 and cross[t] * cross[t] / square[t] > most:
                most = cross[t] * cross[t] / square[t]
                best = cross[t] / square[t]
        steps[run] = best * top

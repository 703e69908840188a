"""The inner loops of EAGL, compiled by numba; `plain.py` is its twin.

Every loop takes `body`, fp32 weights in lines of 128, the last lines of a run of weights filled up with
zeros, and one step per `per` lines. Codes are round-half-even(clip(W/s, low, high)): adding 1.5·2²³ to a
clipped fp32 quotient rounds half to even and leaves the code in the lowest bits, and a NaN is the only sum
whose exponent is all ones.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from bitplan.adapters.numba import cgutils, compile_for, inline, intrinsic, types

LINE = 128
LANES = 16  # words of 32 bits that hold the 4-bit codes of a line
_LINES_AT_ONCE = 16
_PLANE = LANES * _LINES_AT_ONCE // 4  # words
_AHEAD = 16  # lines
_CACHE_LINE = 64  # bytes; where it is more, some are asked for twice
_MAGIC = 12582912.0  # 1.5 · 2²³

_compiling = threading.Lock()

_I64, _F32, _F64 = types.int64, types.float32, types.float64
_LINES = types.Array(_F32, 2, "C", readonly=True)
_STEPS = types.Array(_F32, 1, "C", readonly=True)
_SERIES = types.Array(_F64, 1, "C", readonly=True)


def _lazily(*signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that compiles a function for one signature at its first call."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        built: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            if not built:
                with _compiling:
                    if not built:
                        built.append(compile_for(signature)(function))
            return built[0](*arguments)

        return call

    return decorate


def _popcount(context: Any, word: Any) -> Any:
    """How many bits of a word are 1."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint32(types.uint32), build


_ones: Any = intrinsic(_popcount)


def _prefetch(context: Any, line: Any) -> Any:
    """Ask for the memory of the line that lies `_AHEAD` lines behind this one; what is not there is not asked for."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer, word = cgutils.voidptr_t, ir.IntType(32)
        shape = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), shape)
        here = builder.ptrtoint(array.data, cgutils.intp_t)
        for place in range(4 * LINE * _AHEAD, 4 * LINE * (_AHEAD + 1), _CACHE_LINE):
            there = builder.inttoptr(builder.add(here, cgutils.intp_t(place)), pointer)
            builder.call(fetch, [there, word(0), word(3), word(1)])  # to be read, and kept, data
        return context.get_dummy_value()

    return types.void(line), build


_ask_for_what_comes: Any = intrinsic(_prefetch)


@_lazily(_LINES, _STEPS, _I64, _F32, _F32, types.uint32[:, ::1], types.uint32[::1], types.int64[::1])
def count_nibbles(
    body: Any, steps: Any, per: int, low: float, high: float, scratch: Any, seen: Any, counts: Any
) -> bool:
    """Add the codes of at most 4 bits to 16 counts and tell whether there was a NaN.

    Eight codes are packed into a word of 32 bits, and words are spread over four planes, one for each bit of the
    codes: the ones in what planes have in common are counted, 32 codes at a time. `scratch` is (8, 64), `seen`
    (16,) zeros; in one array, with `seen` behind it, numba would not know that they do not overlap. Memory is asked for
    some lines before it is read: a processor sees too little ahead over the work of a line to do so in time.
    """
    words, planes = scratch[:4], scratch[4:]
    turn, step, rows = 0, steps[0], body.shape[0]
    for first in range(0, rows, _LINES_AT_ONCE):
        for row in range(first, min(rows, first + _LINES_AT_ONCE)):
            if row == turn:
                step = steps[row // per]
                turn += per
            _ask_for_what_comes(body[row])
            _pack(body[row], step, low, high, words, row - first, seen)
        for place in range(rows - first, _LINES_AT_ONCE):  # lines that are not there
            for k in range(LANES):
                words[place // 4, place % 4 * LANES + k] = 0
            counts[0] -= LINE
        _spread(words, planes)
        _count_planes(planes, counts)
    bits = np.uint32(0)
    for k in range(LANES):
        bits |= seen[k]
    return bool((bits >> np.uint32(23)) & np.uint32(255) == np.uint32(255))


@inline
def _pack(line: Any, step: float, low: float, high: float, words: Any, place: int, seen: Any) -> None:
    """Write the codes of a line of 128 weights into 16 words, a quarter of a row of `words`."""
    magic = np.float32(_MAGIC) - low
    row, left = place // 4, place % 4 * LANES
    for k in range(LANES):
        word, bits = np.uint32(0), seen[k]
        for j in range(8):
            x = line[k + LANES * j] / step
            x = low if x < low else x
            x = high if x > high else x
            code = np.float32(x + magic).view(np.uint32)
            bits |= code
            word |= (code & np.uint32(15)) << np.uint32(4 * j)
        words[row, left + k] = word
        seen[k] = bits


@inline
def _spread(words: Any, planes: Any) -> None:
    """Write bit i of every code into plane i, in an order that is the same for all planes."""
    mask = np.uint32(0x11111111)
    for bit in range(4):
        down = np.uint32(bit)
        for k in range(_PLANE):
            plane = (words[0, k] >> down) & mask
            plane |= ((words[1, k] >> down) & mask) << np.uint32(1)
            plane |= ((words[2, k] >> down) & mask) << np.uint32(2)
            plane |= ((words[3, k] >> down) & mask) << np.uint32(3)
            planes[bit, k] = plane


@inline
def _count_planes(planes: Any, counts: Any) -> None:
    """Add how often each of the 16 codes occurs; those that share their upper two bits in one pass."""
    all_ones = np.uint32(0xFFFFFFFF)
    for upper in range(4):
        flip2 = np.uint32(0) if upper & 1 else all_ones
        flip3 = np.uint32(0) if upper & 2 else all_ones
        zero = one = two = three = np.uint32(0)
        for k in range(_PLANE):
            bit0, bit1 = planes[0, k], planes[1, k]
            here = (planes[2, k] ^ flip2) & (planes[3, k] ^ flip3)
            zero = np.uint32(zero + _ones(here & ~bit0 & ~bit1))
            one = np.uint32(one + _ones(here & bit0 & ~bit1))
            two = np.uint32(two + _ones(here & ~bit0 & bit1))
            three = np.uint32(three + _ones(here & bit0 & bit1))
        counts[4 * upper] += zero
        counts[4 * upper + 1] += one
        counts[4 * upper + 2] += two
        counts[4 * upper + 3] += three


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

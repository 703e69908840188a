"""The inner loops of EAGL in numpy, where numba is missing: the results of `compiled.py`, some 15× slower."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Counts = NDArray[np.int64]
Table = NDArray[np.uint32]

LINE = 128
_LINES_AT_ONCE = 2048


def count_nibbles(
    body: Floats, steps: Floats, per: int, low: float, high: float, scratch: Table, seen: Table, counts: Counts
) -> bool:
    """Add the codes of at most 4 bits to 16 counts and tell whether there was a NaN."""
    return count_codes(body, steps, per, low, high, counts)


def count_codes(body: Floats, steps: Floats, per: int, low: float, high: float, counts: Counts) -> bool:
    """Add the codes of up to 16 bits to as many counts and tell whether there was a NaN."""
    missing = False
    for first in range(0, len(body), _LINES_AT_ONCE):
        part = body[first : first + _LINES_AT_ONCE]
        rows = np.arange(first, first + len(part)) // per
        with np.errstate(all="ignore"):
            quotient = part / steps[rows][:, None]
        if np.isnan(quotient).any():
            missing = True
            continue
        codes = np.rint(np.clip(quotient, np.float32(low), np.float32(high))).astype(np.int64) - int(low)
        counts += np.bincount(codes.ravel(), minlength=counts.size)
    return missing


def count_patterns(words: NDArray[np.uint64], table: Table) -> None:
    """Count 16-bit patterns, four to a word."""
    table += np.bincount(words.view(np.uint16), minlength=table.size).astype(np.uint32)


def count_prefixes(words: Table, shift: int, table: Table) -> None:
    """Count what is left of 32-bit patterns when their lowest `shift` bits are cut off."""
    table += np.bincount(words >> np.uint32(shift), minlength=table.size).astype(np.uint32)


def measure(body: Floats, per: int, sums: Doubles, tops: Floats) -> None:
    """Write the sum and the maximum of |W| of every run of `per` lines; a NaN makes the sum NaN."""
    for run in range(sums.size):
        sizes = np.abs(body[run * per : (run + 1) * per])
        sums[run] = sizes.sum(dtype=np.float64)
        tops[run] = sizes.max(initial=0)


def fit(values: Doubles, counts: Doubles, inverses: Doubles, low: float, high: float, sums: Doubles) -> None:
    """Add Σ n·w·q and Σ n·q² for the inverse of every trial step, q the code of w, which occurs n times."""
    for k, inverse in enumerate(inverses):
        with np.errstate(all="ignore"):
            codes = np.rint(np.clip(values * inverse, low, high))
        sums[0, k] += np.sum(counts * values * codes)
        sums[1, k] += np.sum(counts * codes * codes)


def fit_runs(body: Floats, per: int, fractions: Floats, low: float, high: float, steps: Floats) -> None:
    """Write every run's least-squares step: the best of max|W|/high · `fractions`, refitted to its codes."""
    inverse = np.float32(high) / fractions
    for run in range(steps.size):
        values = body[run * per : (run + 1) * per].ravel()
        top = np.abs(values).max(initial=0)
        if top == 0:
            continue
        values = values / top
        codes = np.rint(np.clip(values[:, None] * inverse, np.float32(low), np.float32(high)))
        cross, square = values @ codes, (codes * codes).sum(0)
        gained = np.divide(cross * cross, square, out=np.full_like(cross, -1), where=square > 0)
        best = int(np.argmax(gained))
        if square[best] > 0:
            steps[run] = cross[best] / square[best] * top

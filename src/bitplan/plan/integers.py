"""Gains as whole numbers, so that sums, ties and optimality are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError

_ROOM = 2**61  # totals stay below this, so that sums of 64-bit integers never overflow


@dataclass(frozen=True)
class Scaled:
    """Whole numbers (G, C), the gain that one of them stands for, and the most that rounding can cost a selection."""

    values: NDArray[np.int64]
    unit: float
    rounding: float


def to_integers(rows: Sequence[tuple[float, ...]], levels: int | None = None) -> Scaled:
    """Scale gains (G rows of C values) to integers.

    Floating-point numbers are whole multiples of a power of two, so scaling by it is exact where the totals fit into 61
    bits; otherwise the finest power that fits is used. `levels` instead rounds to 1 … levels by pure scaling (a shift
    would add a constant per chosen layer and change the optimum); what is not positive is not lifted to 1.
    """
    if levels is not None and levels < 1:
        raise InputError(f"levels must be at least 1, not {levels}")
    largest = [Fraction(max(map(abs, row))) for row in rows]  # of each row
    scale = _levels_scale(max(largest), levels) if levels else _finest_scale(rows, sum(largest, Fraction(0)))
    integers: list[list[int]] = []
    lost = Fraction(0)
    for row in rows:
        scaled = [Fraction(value) * scale for value in row]
        rounded = [_rounded(value, lift=levels is not None) for value in scaled]
        worst = max(abs(exact - near) for exact, near in zip(scaled, rounded, strict=True))
        lost += 2 * worst / scale  # the best choice may be rounded down by it and another one up
        integers.append(rounded)
    return Scaled(np.array(integers, dtype=np.int64), float(1 / scale), float(lost))


def _rounded(value: Fraction, *, lift: bool) -> int:
    """The nearest integer; with `lift` at least 1 for what is positive."""
    nearest = round(value)
    return max(nearest, 1) if lift and value > 0 else nearest


def _levels_scale(largest: Fraction, levels: int) -> Fraction:
    return Fraction(levels) / largest if largest else Fraction(1)


def _finest_scale(rows: Sequence[tuple[float, ...]], total: Fraction) -> Fraction:
    exact = max(Fraction(value).denominator for row in rows for value in row)
    if total * exact < _ROOM:
        return Fraction(exact)
    # total < 2 ** (bits of numerator − bits of denominator + 1)
    bits = total.numerator.bit_length() - total.denominator.bit_length() + 1
    return Fraction(2) ** (_ROOM.bit_length() - 1 - bits)

"""The problem that every selector solves, in whole numbers, so that sums, ties and optimality are exact."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision

Integers = NDArray[np.int64]

_ROOM = 2**61  # totals stay below this, so that sums of 64-bit integers never overflow


@dataclass(frozen=True)
class Problem:
    """One choice per group: the greatest total value within every capacity, in whole numbers.

    values (G, C) · costs (K, G, C) · capacities (K): G groups in execution order, C choices ascending, K budgets.
    A value of 1 stands for a gain of `unit`; rounding to whole values can have cost a selection `rounding`.
    """

    groups: tuple[str, ...]
    choices: tuple[Precision, ...]
    values: Integers
    costs: Integers
    capacities: Integers
    unit: float = 1.0
    rounding: float = 0.0

    @property
    def percents(self) -> Integers:
        """One percent of what all groups cost at the highest choice, rounded up, by each budget's measure (K)."""
        whole: Integers = self.costs[:, :, -1].sum(axis=1)
        return -(-whole // 100)

    def within(self, capacities: Integers) -> Problem:
        """The same problem under other capacities."""
        return dataclasses.replace(self, capacities=capacities)


@dataclass(frozen=True)
class Selection:
    """The chosen index for every group; no other selection has a value greater by more than `gap` (None: unknown).

    `more` is what one more percent of each budget would add, if the selector knows: exactly where it lists all
    selections, otherwise by the prices of its bound.
    """

    picks: tuple[int, ...]
    gap: int | None
    more: tuple[float, ...] | None = None


Selector = Callable[[Problem], Selection]


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
    if levels is not None:
        return _to_levels(rows, levels)
    gains = np.array(rows, dtype=np.float64)
    power = _finest_power(gains)
    whole = np.rint(np.ldexp(gains, power))
    worst = np.abs(gains - np.ldexp(whole, -power)).max(axis=1)  # exact, as is scaling: only exponents change
    lost = 2 * math.fsum(worst.tolist())  # the best choice may be rounded down by it and another one up
    return Scaled(whole.astype(np.int64), math.ldexp(1.0, -power), lost)


def _to_levels(rows: Sequence[tuple[float, ...]], levels: int) -> Scaled:
    largest = max(Fraction(max(map(abs, row))) for row in rows)
    scale = Fraction(levels) / largest if largest else Fraction(1)
    integers: list[list[int]] = []
    lost = Fraction(0)
    for row in rows:
        scaled = [Fraction(value) * scale for value in row]
        rounded = [max(round(value), 1) if value > 0 else round(value) for value in scaled]
        lost += 2 * max(abs(exact - near) for exact, near in zip(scaled, rounded, strict=True)) / scale
        integers.append(rounded)
    return Scaled(np.array(integers, dtype=np.int64), float(1 / scale), float(lost))


def _finest_power(gains: NDArray[np.float64]) -> int:
    """The power of two by which all gains become whole, or else the greatest at which their total fits."""
    total = sum((Fraction(most) for most in np.abs(gains).max(axis=1).tolist()), Fraction(0))
    fractions, exponents = np.frexp(gains)
    mantissas = np.ldexp(fractions, 53).astype(np.int64)
    lowest_bits = np.log2((mantissas & -mantissas).astype(np.float64), where=mantissas != 0, out=np.zeros_like(gains))
    points = np.where(mantissas != 0, 53 - lowest_bits.astype(np.int64) - exponents, 0)  # binary digits after the point
    exact = max(0, int(points.max()))
    if total * 2**exact < _ROOM:
        return exact
    # total < 2 ** (bits of numerator − bits of denominator + 1)
    bits = total.numerator.bit_length() - total.denominator.bit_length() + 1
    return _ROOM.bit_length() - 1 - bits

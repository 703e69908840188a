"""How much value is possible at most, in whole numbers: the Lagrangian bound for any prices of the budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.problem import Integers, Problem

_BITS = 31  # of a price; costs are split into halves of as many, so that products fit into 64 bits
_MOST = 2**60  # dearer choices count as this dear, which only makes the bound higher
_ROOM = 61  # bits of the values' total, shifted


@dataclass(frozen=True)
class Bound:
    """No selection x within the budgets is worth more than `most` − the sum of its `regrets` (G, C).

    Values are counted in parts, 2^shift to one, so that rounding prices down to whole parts costs next to nothing. Let
    p be the price of a choice, ⌊price·cost⌋ summed over budgets, and w = value − p. The p of a selection within the
    budgets add up to at most ⌊price·capacity⌋ summed over budgets, so its value is at most that plus the sum of its w;
    regrets say how far each w is below its group's greatest. Every step is exact for any prices ≥ 0. No selection is
    worth less than `least`.
    """

    prices: NDArray[np.float64]
    shift: int
    most: int
    regrets: Integers
    least: int

    @classmethod
    def of(cls, problem: Problem, prices: NDArray[np.float64]) -> Bound:
        """The bound by some prices, in value per unit of cost."""
        total = int(np.abs(problem.values).max(axis=1).astype(object).sum())
        dearest = float((prices * problem.costs.reshape(len(prices), -1).max(axis=1)).sum())
        shift = max(0, min(_ROOM - total.bit_length(), _ROOM - 2 - math.frexp(dearest)[1]))
        paid, allowed = np.zeros_like(problem.values), 0
        for costs, capacity, price in zip(problem.costs, problem.capacities.tolist(), prices.tolist(), strict=True):
            if price > 0:
                dues, due = _dues(costs, capacity, math.ldexp(price, shift))
                paid = np.minimum(paid + dues, _MOST)
                allowed += due
        worth = (problem.values << shift) - paid
        grain = max(0, int(paid.max()).bit_length() - _BITS + 2)  # below it, the cutting of prices makes ties differ
        top, least = worth.max(axis=1), problem.values.min(axis=1)
        return cls(
            prices, shift, allowed + sum(top.tolist()), (top[:, None] - worth) >> grain << grain, sum(least.tolist())
        )

    @property
    def everything(self) -> int:
        """What the regrets of any selection within the budgets can add up to; negative where there is none."""
        greatest: list[int] = self.regrets.max(axis=1).tolist()
        return min(self.slack(self.least), sum(greatest))

    @property
    def ties(self) -> int:
        """How many choices have no regret besides one of each group."""
        return int(np.count_nonzero(self.regrets == 0)) - len(self.regrets)

    def slack(self, value: int) -> int:
        """The most that the regrets of a selection with at least this value can add up to."""
        return self.most - (value << self.shift)

    def value_above(self, regret: int) -> int:
        """The most that a selection with at least this regret can be worth."""
        return (self.most - regret) >> self.shift


def _dues(costs: Integers, capacity: int, price: float) -> tuple[Integers, int]:
    """⌊price·cost⌋ of every choice and of the capacity, for the price cut to 31 bits: mantissa · 2^−point."""
    fraction, exponent = math.frexp(price)
    mantissa, point = int(fraction * 2**_BITS), _BITS - exponent
    high, low = (costs >> _BITS) * mantissa, (costs & (2**_BITS - 1)) * mantissa
    is_dear = costs.astype(float) * price >= _MOST
    if point >= _BITS:
        dues = (high + (low >> _BITS)) >> min(point - _BITS, 63)
    elif point >= 0:
        dues = (high << (_BITS - point)) + (low >> point)
    else:
        dues = costs * mantissa << min(-point, 63)
    due = capacity * mantissa
    return np.where(is_dear, _MOST, dues), due >> point if point >= 0 else due << -point

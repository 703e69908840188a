"""The concave hull of all selections under one budget: its points, and the price of the budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.selection.problem import Integers, Problem


@dataclass(frozen=True)
class Hull:
    """The cheapest selection, and the steps (S) up from it, the steepest first: gain per cost, cost and value of each.

    Every group climbs its own hull. The steepest step of all groups comes first.
    """

    cost: int
    value: int
    slopes: NDArray[np.float64]
    costs: Integers
    values: Integers

    @classmethod
    def of(cls, problem: Problem) -> Hull:
        """Return the hull by the first budget's costs."""
        costs, values = problem.costs[0], problem.values
        every = np.arange(len(values))
        picks = np.lexsort((-values, costs))[:, 0]  # the cheapest choice of each group and, of equal ones, the best
        cost, value = int(costs[every, picks].sum()), int(values[every, picks].sum())
        slopes, step_costs, step_values = [], [], []
        for _ in range(values.shape[1] - 1):
            more = costs - costs[every, picks][:, None]
            rise = values - values[every, picks][:, None]
            slope = np.where((more > 0) & (rise > 0), rise / np.maximum(more, 1), 0.0)
            steepest = slope.max(axis=1)
            furthest = np.where(slope == steepest[:, None], costs, -1).argmax(axis=1)
            rises = steepest > 0
            slopes.append(steepest[rises])
            step_costs.append(more[every, furthest][rises])
            step_values.append(rise[every, furthest][rises])
            picks = np.where(rises, furthest, picks)
        slope = np.concatenate(slopes)
        order = np.argsort(-slope, kind="stable")
        return cls(cost, value, slope[order], np.concatenate(step_costs)[order], np.concatenate(step_values)[order])

    def points(self) -> tuple[Integers, Integers]:
        """Return the costs and values (S + 1) of the selections on the hull, by ascending cost."""
        costs: Integers = self.cost + np.concatenate(([0], np.cumsum(self.costs)))
        values: Integers = self.value + np.concatenate(([0], np.cumsum(self.values)))
        return costs, values

    def price(self, capacity: int) -> float:
        """Return the gain per unit of cost where the budget ends; 0 if all steps fit."""
        first_beyond = int(np.searchsorted(self.cost + np.cumsum(self.costs), capacity, side="right"))
        return float(self.slopes[first_beyond]) if first_beyond < len(self.slopes) else 0.0

"""The linear relaxation: what a unit of each budget is worth there.

Any prices ≥ 0 give a valid bound, so floating point is enough here; `bound.py` makes a proof in whole numbers of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.problem import Integers, Problem

Floats = NDArray[np.float64]
_TURNS = 400  # far more than are needed; the prices of any turn are valid
_PATIENCE = 12  # turns without a better bound, for each budget
_CLOSE = 1e-14  # relative: where the bound and the mixture of selections meet


def relaxed_prices(problem: Problem, near: Floats | None = None) -> Floats:
    """The prices (K), in value per unit of cost, at which the Lagrangian bound is least; `near` are close to them."""
    if len(problem.capacities) == 1:
        return np.array([_price_of_one_budget(problem)])
    prices = _prices_from(problem, np.zeros(len(problem.capacities))) if near is None else near
    return _prices_from(problem, prices)


def _prices_from(problem: Problem, prices: Floats) -> Floats:
    """The best prices, counted from the best selection at some others: so gains may span many powers of ten."""
    scales = np.maximum(problem.capacities.astype(float), 1.0)
    paid = problem.values - np.tensordot(prices, problem.costs, axes=1)
    origin = paid.argmax(axis=1)[:, None]
    worth = problem.values - np.take_along_axis(problem.values, origin, axis=1)  # (G, C)
    costs = problem.costs - np.take_along_axis(problem.costs, origin[None], axis=2)  # (K, G, C)
    left = problem.capacities - np.take_along_axis(problem.costs, origin[None], axis=2).sum(axis=(1, 2))
    largest = max(float(np.abs(worth).max()), 1.0)
    dues = np.ascontiguousarray(costs.transpose(0, 2, 1) / scales[:, None, None])
    mixture = _Mixture(np.ascontiguousarray(worth.T / largest), dues, left / scales)
    found: Floats = mixture.prices() * largest / scales
    return found


def hull(problem: Problem) -> tuple[Integers, Integers]:
    """The costs and values of the selections on the concave hull of all, with one budget, by ascending cost.

    Every group goes up its own hull, and the steepest step of all comes first.
    """
    costs, values = problem.costs[0], problem.values
    lowest = _cheapest(values, costs)
    steps = _hull_steps(values, costs, lowest)
    order = np.argsort(-steps.slopes, kind="stable")
    every = np.arange(len(values))
    spent = costs[every, lowest].sum() + np.concatenate(([0], np.cumsum(steps.costs[order])))
    worth = values[every, lowest].sum() + np.concatenate(([0], np.cumsum(steps.values[order])))
    return spent, worth


def _price_of_one_budget(problem: Problem) -> float:
    """The slope of the hull where the budget ends."""
    costs, values = problem.costs[0], problem.values
    lowest = _cheapest(values, costs)
    steps = _hull_steps(values, costs, lowest)
    order = np.argsort(-steps.slopes, kind="stable")
    spent = costs[np.arange(len(values)), lowest].sum() + np.cumsum(steps.costs[order])
    broken = np.searchsorted(spent, int(problem.capacities[0]), side="right")
    return float(steps.slopes[order][broken]) if broken < len(order) else 0.0


@dataclass(frozen=True)
class _Steps:
    """The rising steps of all groups' concave hulls: how steep they are, what they cost, and what they add."""

    slopes: Floats
    costs: Integers
    values: Integers


def _cheapest(values: Integers, costs: Integers) -> NDArray[np.intp]:
    """Of each group the cheapest choice and, of those, the best."""
    return np.lexsort((-values, costs))[:, 0]


def _hull_steps(values: Integers, costs: Integers, now: NDArray[np.intp]) -> _Steps:
    """Go up from the cheapest choices, each time to the one that is steepest, the furthest of those."""
    every = np.arange(len(values))
    found = []
    for _ in range(values.shape[1] - 1):
        more = costs - costs[every, now][:, None]
        rise = values - values[every, now][:, None]
        slope = np.where((more > 0) & (rise > 0), rise / np.maximum(more, 1), 0.0)
        steepest = slope.max(axis=1)
        then = np.where(slope == steepest[:, None], costs, -1).argmax(axis=1)
        rising = steepest > 0
        found.append((steepest[rising], more[every, then][rising], rise[every, then][rising]))
        now = np.where(rising, then, now)
    return _Steps(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


@dataclass(frozen=True)
class _Mixture:
    """Column generation (Dantzig & Wolfe 1960): mix whole selections, one column each, so that all budgets are met.

    worth (C, G) · dues (K, C, G) · capacities (K). The prices of the mixture ask for the selection that is best where
    costs are paid for, which becomes the next column, until none improves.
    """

    worth: Floats
    dues: Floats
    capacities: Floats

    def prices(self) -> Floats:
        """The prices of the best mixture."""
        budgets = len(self.capacities)
        nothing = -4.0 * float(np.abs(self.worth).max(axis=0).sum()) - 1.0  # worth so little that it is never mixed in
        basis, gains = np.eye(budgets + 1), np.append(np.zeros(budgets), nothing)
        basis[:budgets, -1] = np.minimum(self.dues.min(axis=1).sum(axis=1), self.capacities)
        limits = np.append(self.capacities, 1.0)
        best, prices, stalled = 1e300, np.zeros(budgets), 0
        for _ in range(_TURNS):
            duals = np.linalg.solve(basis.T, gains)
            left_over = basis[-1] == 0  # columns that leave some of a budget over
            now = np.where((basis[:, left_over] != 0).any(axis=1), 0.0, duals)[:budgets]
            if (now < 0).any():  # leaving more over improves the mixture
                column, gain = np.eye(budgets + 1)[int(np.argmin(now))], 0.0
            else:
                column, gain, most = self._best_at(now)
                bound = most + float(now @ self.capacities)
                stalled = 0 if bound < best - _CLOSE * abs(best) else stalled + 1
                if bound < best:
                    best, prices = bound, now
                if stalled > _PATIENCE * budgets or most - duals[-1] <= _CLOSE * (abs(most) + abs(bound)):
                    break
            leaving = _leaving(basis, limits, column)
            if leaving is None:
                break
            basis[:, leaving], gains[leaving] = column, gain
        return prices

    def _best_at(self, prices: Floats) -> tuple[Floats, float, float]:
        """The best selection at some prices: its column, what it is worth, and what is left when all is paid."""
        every = np.arange(self.worth.shape[1])
        paid = self.worth - np.tensordot(prices, self.dues, axes=1)
        picks = paid.argmax(axis=0)
        costs = self.dues[:, picks, every].sum(axis=1)
        return np.append(costs, 1.0), float(self.worth[picks, every].sum()), float(paid[picks, every].sum())


def _leaving(basis: Floats, limits: Floats, column: Floats) -> int | None:
    """The column of the basis that a new one replaces, by the ratio test; None where there is none."""
    shares, change = np.linalg.solve(basis, np.column_stack((limits, column))).T
    falls = change > 1e-12
    if not falls.any():
        return None
    ratios = np.where(falls, np.maximum(shares, 0.0) / np.where(falls, change, 1.0), np.inf)
    return int(np.argmin(ratios))

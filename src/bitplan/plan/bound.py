"""How much value is still possible: a Lagrangian bound with the multipliers of the linear relaxation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.problem import Problem
from bitplan.plan.states import States

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """Upper bounds for partial selections; valid for any multipliers ≥ 0, tight for those of the relaxation.

    `rest[g]` bounds the first g groups: the sum of their greatest value − multipliers · cost. `regrets` (G, C) say how
    far each choice is below the greatest.
    """

    multipliers: Floats
    regrets: Floats
    rest: Floats
    capacities: Floats

    @classmethod
    def of(cls, problem: Problem) -> Bound:
        """Solve the linear relaxation for its multipliers."""
        multipliers = _multipliers(problem)
        reduced = problem.values - np.tensordot(multipliers, problem.costs.astype(float), axes=1)
        rest = np.concatenate(([0.0], np.cumsum(reduced.max(axis=1))))
        regrets = reduced.max(axis=1, keepdims=True) - reduced
        return cls(multipliers, regrets, rest, problem.capacities.astype(float))

    def viable(self, group: int, known: int) -> NDArray[np.intp]:
        """The choices of a group that a selection worth `known` or more can contain."""
        most = self.rest[-1] + self.multipliers @ self.capacities
        slack = most - known + 1e-9 * (abs(most) + abs(self.rest[-1])) + 1.0
        return np.flatnonzero(self.regrets[group] <= slack)

    def above(self, states: States, groups_left: int) -> Floats:
        """The most that each state can still come to, rounded up by more than floating point can be off."""
        room = self.capacities[:, None] - states.costs
        bound = states.values + self.rest[groups_left] + self.multipliers @ room
        safe: Floats = bound + 1e-9 * (np.abs(states.values) + np.abs(self.rest[groups_left]) + np.abs(bound)) + 1.0
        return safe


def _multipliers(problem: Problem) -> Floats:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    groups, choices = problem.values.shape
    worth = problem.values.astype(float).ravel()
    largest = max(float(np.abs(worth).max()), 1.0)
    scales = np.maximum(problem.capacities.astype(float), 1.0)
    one_each = csr_array(
        (np.ones(groups * choices), (np.repeat(np.arange(groups), choices), np.arange(groups * choices)))
    )
    relaxed = linprog(
        -worth / largest,
        A_ub=problem.costs.reshape(len(scales), -1) / scales[:, None],
        b_ub=problem.capacities / scales,
        A_eq=one_each,
        b_eq=np.ones(groups),
        method="highs",
    )
    if relaxed.status != 0:  # any multipliers are valid; these only bound less tightly
        return np.zeros(len(scales))
    prices: Floats = np.maximum(-relaxed.ineqlin.marginals, 0.0) * largest / scales
    return prices

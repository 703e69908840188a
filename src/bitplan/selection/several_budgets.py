"""Linear and mixed-integer programs, solved by HiGHS: prices of several budgets, and what lists are too long for.

HiGHS computes in floating point, so its selections are checked in whole numbers, and a gap that it leaves is kept.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from bitplan.core.errors import BudgetError
from bitplan.selection.problem import Integers, Problem

SECONDS = 20.0  # for one mixed-integer program; then its best selection and the gap are taken
_ROUNDS = 4  # of tightening budgets that rounding exceeded
_LARGEST = 10_000.0  # values in the program are at most this; HiGHS stops within _TOLERANCE of the best
_TOLERANCE = 1e-6
_INFEASIBLE = 2  # status of scipy's linprog and milp

Floats = NDArray[np.float64]


def prices_of(problem: Problem) -> Floats:
    """Return the gain per unit of each budget (K) in the linear relaxation."""
    program = _Program(problem)
    result = linprog(
        program.losses, A_ub=program.shares, b_ub=program.rooms(problem.capacities), A_eq=program.one_each,
        b_eq=np.ones(len(problem.values)), bounds=(0, None), method="highs",
    )  # fmt: skip
    if result.status == _INFEASIBLE:
        raise _impossible()
    if result.status != 0:
        return np.zeros(len(problem.capacities))  # these are valid prices too, if weak
    prices: Floats = np.maximum(-result.ineqlin.marginals, 0.0) * program.unit / program.scales
    return prices


def solve_mixed_integer(
    problem: Problem, allowed: NDArray[np.bool_], best: tuple[int, ...] | None, most: int
) -> tuple[tuple[int, ...], int]:
    """Return the best selection among the allowed choices (G, C), and a value that no selection exceeds.

    `best` is the best selection known, and no selection is worth more than `most`. A budget that a selection exceeds by
    rounding is tightened by the excess, then by the tolerance of HiGHS too, and the program is solved again. The bound
    is that of the first program.
    """
    program = _Program(problem)
    limits = problem.capacities.copy()
    for turn in range(_ROUNDS):
        result = milp(
            program.losses,
            integrality=np.ones(allowed.size),
            bounds=Bounds(0, allowed.ravel().astype(float)),
            constraints=[
                LinearConstraint(program.one_each, 1, 1),
                LinearConstraint(program.shares, -np.inf, program.rooms(limits)),
            ],
            options={"mip_rel_gap": 0.0, "time_limit": SECONDS},
        )
        if turn == 0 and result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound):
            most = min(most, program.value_of(result.mip_dual_bound))
        if result.x is None:
            if result.status == _INFEASIBLE and best is None and turn == 0:
                raise _impossible()
            break
        picks = tuple(result.x.reshape(allowed.shape).argmax(axis=1).tolist())
        excess = _spent(problem, picks) - problem.capacities
        if (excess <= 0).all():
            best = picks if best is None else max(best, picks, key=lambda one: _rank(problem, one))
            break
        limits = limits - np.where(excess > 0, excess + min(turn, 1) * program.tolerances, 0)
    cheapest = tuple(program.shares.sum(axis=0).reshape(allowed.shape).argmin(axis=1).tolist())
    if best is None and (_spent(problem, cheapest) <= problem.capacities).all():
        best = cheapest
    if best is None:
        raise BudgetError(
            f"no selection within all budgets was found in {SECONDS:.0f} s: raise one of them, or add a lower precision"
        )
    return best, max(most, _rank(problem, best)[0])


class _Program:
    """The relaxation of a problem: x (G · C) is 1 for what is chosen; values and costs count from each group's least.

    losses (G · C) · shares (K, G · C) of what the budgets leave · one_each (G, G · C). A loss of −1 is a
    value of `unit`.
    """

    def __init__(self, problem: Problem) -> None:
        groups, choices = problem.values.shape
        lowest = problem.values.min(axis=1, keepdims=True)
        cheapest = problem.costs.min(axis=2, keepdims=True)
        above = (problem.values - lowest).ravel()
        self.base = int(lowest.sum())
        self.unit = max(float(above.max()) / _LARGEST, 1.0)
        self.losses = -above / self.unit
        self.least = cheapest.sum(axis=(1, 2))
        self.scales = np.maximum((problem.capacities - self.least).astype(float), 1.0)
        self.shares = (problem.costs - cheapest).reshape(len(self.scales), -1) / self.scales[:, None]
        self.tolerances = np.ceil(_TOLERANCE * self.scales).astype(np.int64)
        index = np.arange(groups * choices)
        self.one_each = csr_array((np.ones(len(index)), (index // choices, index)))

    def rooms(self, limits: Integers) -> Floats:
        """Return what the budgets leave above the cheapest choices, in the scale of `shares`."""
        rooms: Floats = (limits - self.least) / self.scales
        return rooms

    def value_of(self, loss: float) -> int:
        """Return the whole value that no selection exceeds if none has a lower loss, as far as HiGHS can tell."""
        return math.floor((_TOLERANCE - loss) * self.unit) + self.base


def _spent(problem: Problem, picks: tuple[int, ...]) -> Integers:
    spent: Integers = problem.costs[:, np.arange(len(picks)), list(picks)].sum(axis=1)
    return spent


def _rank(problem: Problem, picks: tuple[int, ...]) -> tuple[int, ...]:
    """Return what selections are compared by: the value, then lower costs, then the precision of earlier groups."""
    value = int(problem.values[np.arange(len(picks)), list(picks)].sum())
    return value, *(-_spent(problem, picks)).tolist(), *picks


def _impossible() -> BudgetError:
    return BudgetError("the budgets cannot all be met at once: raise one of them, or add a lower precision")

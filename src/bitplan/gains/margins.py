"""How sure a selection is of each group: what it chooses within every budget, and how far the next best is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.costs.base import price_for
from bitplan.selection.base import spent_by
from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.selection.exact import exact
from bitplan.selection.problem import Problem, to_integers

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Weighed:
    """What is chosen, (K, G) for K budgets and G groups, and how sure that is of each group.

    `margins` (G) is the number of standard errors by which the best selection beats the best one with another choice
    for that group, at the budget where that is least; infinite where a budget leaves no other choice.
    """

    picks: NDArray[np.int64]
    margins: Floats

    @property
    def moving(self) -> NDArray[np.bool_]:
        """(G): which groups are chosen differently by some budgets."""
        moves: NDArray[np.bool_] = (self.picks != self.picks[:1]).any(axis=0)
        return moves


@dataclass(frozen=True)
class Scales:
    """What will be asked for, one at a time: each a budget, or several that must hold at once."""

    aims: tuple[BudgetConstraint, ...]

    @classmethod
    def of(cls, graph: Graph, choices: tuple[Precision, ...], budgets: Sequence[Budget], cost: str) -> Scales:
        """Price what the budgets name, and refuse those that cannot be met."""
        priced = price_for(budgets, [cost], graph, choices)
        return cls(tuple(BudgetConstraint.of(graph, choices, priced, [budget]) for budget in budgets))

    def weigh(self, values: Floats, errors: Floats) -> Weighed:
        """Choose by gains (G, C) with standard errors (G, C)."""
        scaled = to_integers([tuple(row) for row in values.tolist()])
        problems = [
            Problem(aim.groups, aim.choices, scaled.values, aim.costs, aim.capacities, scaled.unit, scaled.rounding)
            for aim in self.aims
        ]
        found = [_weigh(problem, errors) for problem in problems]
        return Weighed(np.array([picks for picks, _ in found]), np.min([margins for _, margins in found], axis=0))


def _weigh(problem: Problem, errors: Floats) -> tuple[list[int], list[float]]:
    best = exact(problem).picks
    margins = []
    for group in range(len(problem.groups)):
        others = [
            _standard_errors(problem, errors, best, picks)
            for choice in range(len(problem.choices))
            if choice != best[group] and (picks := _forced(problem, group, choice)) is not None
        ]
        margins.append(min(others, default=math.inf))
    return list(best), margins


def _forced(problem: Problem, group: int, choice: int) -> tuple[int, ...] | None:
    """The best selection with one group at a given choice, or None where the budget does not allow it."""
    rest = [other for other in range(len(problem.groups)) if other != group]
    left = problem.capacities - problem.costs[:, group, choice]
    if not rest:
        return (choice,) if (left >= 0).all() else None
    if (problem.costs[:, rest].min(axis=2).sum(axis=1) > left).any():
        return None
    smaller = replace(
        problem,
        groups=tuple(problem.groups[other] for other in rest),
        values=problem.values[rest],
        costs=problem.costs[:, rest],
        capacities=left,
    )
    picks = list(exact(smaller).picks)
    picks.insert(group, choice)
    assert all(spent_by(problem, picks) <= problem.capacities), "the rest was chosen within what is left"
    return tuple(picks)


def _standard_errors(problem: Problem, errors: Floats, best: Sequence[int], other: Sequence[int]) -> float:
    """By how many standard errors of their difference the best selection beats another one."""
    every = np.arange(len(best))
    changed = np.array(best) != np.array(other)
    lost = int((problem.values[every, list(best)] - problem.values[every, list(other)]).sum()) * problem.unit
    spread = np.hypot(errors[every, list(best)], errors[every, list(other)])[changed]
    error = float(np.sqrt((spread**2).sum()))
    return lost / error if error else math.inf if lost else 0.0

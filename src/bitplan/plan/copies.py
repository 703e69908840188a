"""Budgets whose costs are in proportion, such as the same bits counted twice: only the tightest of them limits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from bitplan.plan.problem import Problem, Selection


@dataclass(frozen=True)
class Distinct:
    """A problem without the budgets that others imply, and which of the former budgets each of its own is."""

    problem: Problem
    budgets: tuple[int, ...]
    of: int

    @classmethod
    def of_problem(cls, problem: Problem) -> Distinct:
        """Keep one of all budgets in proportion: selections that cost the same by it cost the same by all of them."""
        kept: list[int] = []
        for budget in range(len(problem.capacities)):
            for place, other in enumerate(kept):
                ratio = _ratio(problem, budget, other)
                if ratio is not None:
                    if int(problem.capacities[budget]) < ratio * int(problem.capacities[other]):
                        kept[place] = budget
                    break
            else:
                kept.append(budget)
        if len(kept) == len(problem.capacities):
            return cls(problem, tuple(kept), len(kept))
        fewer = dataclasses.replace(problem, costs=problem.costs[kept], capacities=problem.capacities[kept])
        return cls(fewer, tuple(kept), len(problem.capacities))

    def whole(self, selection: Selection) -> Selection:
        """The selection for the whole problem: more of a budget that another one implies adds nothing."""
        more = [0.0] * self.of
        for budget, added in zip(self.budgets, selection.more or (), strict=True):
            more[budget] = added
        return Selection(selection.picks, selection.gap, tuple(more))


def _ratio(problem: Problem, one: int, other: int) -> Fraction | None:
    """How many times the other's costs one budget's are, if all alike."""
    costs, others = problem.costs[one], problem.costs[other]
    ratio = Fraction(int(costs.max()), int(others.max())) if others.any() else None
    if ratio is None or not np.allclose(costs, others * float(ratio), rtol=1e-12, atol=0):
        return None
    same = costs.astype(object) * ratio.denominator == others.astype(object) * ratio.numerator
    return ratio if same.all() else None

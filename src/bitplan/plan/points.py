"""Selections at many capacities of one budget, beside others that hold: the problem is posed once, no plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitplan.core.budget import BudgetLike
from bitplan.core.errors import BudgetError
from bitplan.core.records import Costs, Gains, Graph
from bitplan.plan.base import Posed, checked, gain_of, more_of, pose, selector_of, spent_by, stored
from bitplan.plan.feasible import check_feasible
from bitplan.plan.frontier import Point
from bitplan.plan.problem import Selector


@dataclass(frozen=True)
class Points:
    """What a selector takes where the capacity of the first budget varies; the numbers are those of its plans."""

    graph: Graph
    gains: Gains
    selector: str
    _solve: Selector
    _posed: Posed

    @classmethod
    def of(
        cls, graph: Graph, gains: Gains, costs: Sequence[Costs], budgets: Sequence[BudgetLike], selector: str
    ) -> Points:
        """Under these budgets, of which the first is any that can be met; a BudgetError where the others cannot be."""
        return cls(graph, gains, *selector_of(selector, gains), pose(graph, gains, costs, budgets))

    def at(self, capacity: int) -> Point | None:
        """The selection within so many units of the first budget; None where there is none."""
        posed, whole = self._posed, self._posed.problem
        capacities = whole.capacities.copy()
        capacities[0] = capacity
        problem = whole.within(capacities)
        try:
            check_feasible(posed.budgets, posed.costs, self.graph, problem)
            selection = self._solve(problem)
        except BudgetError:
            return None
        more = more_of(checked(selection, problem, self.selector), problem, self._solve)
        picks = stored(selection.picks, problem.groups, posed.costs)
        gain = gain_of(self.gains, problem, picks)
        return Point(picks, spent_by(problem, picks)[0], gain, more[0] * problem.unit)

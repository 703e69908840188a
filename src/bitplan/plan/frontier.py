"""select_all: the best selection for every budget, in one pass where that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget, BudgetLike, what_fits
from bitplan.core.errors import InputError
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.units import Account
from bitplan.plan.base import check_provenance, gain_of, make_plan, make_problem, spent_by
from bitplan.plan.exact import searched
from bitplan.plan.feasible import check_feasible, check_selectable
from bitplan.plan.problem import Integers, Problem, Selection
from bitplan.plan.relaxation import hull
from bitplan.plan.states import Complete, list_all


@dataclass(frozen=True)
class Point:
    """A selection on the frontier: a pick per selectable group, what they cost and gain, what 1% more would gain."""

    picks: tuple[int, ...]
    cost: int
    gain: float
    shadow_price: float


@dataclass(frozen=True)
class Frontier:
    """All selections that no other beats, by ascending cost; plans are rebuilt from it on demand.

    costs (P) in units · values (P), the gains up to rounding. Where there are too many, `complete` is False: costs and
    values are then those on the concave hull, and a plan is searched for when asked for, with its own proof.
    """

    graph: Graph
    gains: Gains
    cost: Costs
    costs: Integers
    values: NDArray[np.float64]
    _problem: Problem
    _listed: Complete | None

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def complete(self) -> bool:
        """Whether every selection that no other beats is here."""
        return self._listed is not None

    @cached_property
    def account(self) -> Account:
        """What budgets on this frontier are measured against."""
        return Account.of(self.graph, self.cost)

    def plan(self, budget: BudgetLike) -> Plan:
        """The best plan within a budget on this frontier's cost."""
        written = Budget.parse(budget)
        is_other = written.cost not in (None, self.cost.name)
        if is_other or not written.unit.fits(self.cost.name, self.cost.unit):
            raise InputError(
                f"this frontier is one of {self.cost.name}; it has no point for a budget of {written}: "
                f"{what_fits(self.account)}"
            )
        problem = self._within(written.capacity(self.account))
        check_feasible([written], [self.cost], self.graph, problem)
        selection = self._best(problem)
        prices = [more * problem.unit for more in selection.more or ()]
        return make_plan(self.graph, self.gains, [self.cost], problem, selection, [written], prices, "exact")

    def point(self, capacity: int) -> Point:
        """The best selection within so many units; quicker than a plan where many are wanted."""
        problem = self._within(capacity)
        selection = self._best(problem)
        gain = gain_of(self.gains, problem, selection.picks)
        (more,) = selection.more or (0.0,)
        return Point(selection.picks, spent_by(problem, selection.picks)[0], gain, more * problem.unit)

    def _within(self, capacity: int) -> Problem:
        return self._problem.within(np.array([capacity], dtype=np.int64))

    def _best(self, problem: Problem) -> Selection:
        return searched(problem) if self._listed is None else self._listed.selection(problem)


def select_all(graph: Graph, gains: Gains, cost: Costs, *, levels: int | None = None) -> Frontier:
    """Find the whole frontier of one cost: every budget's best selection at once."""
    check_selectable(graph)
    check_provenance(graph, gains, [cost])
    problem = make_problem(graph, gains, [cost], [2**62], levels)
    listed = list_all(problem, 2**62)
    costs, values = hull(problem) if listed is None else (listed.costs, listed.values)
    return Frontier(graph, gains, cost, costs, np.asarray(values * problem.unit, dtype=np.float64), problem, listed)

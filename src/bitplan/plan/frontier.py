"""select_all: the best selection for every budget, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget, BudgetLike, what_fits
from bitplan.core.errors import BudgetError, InputError
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.units import Account
from bitplan.plan.base import check_provenance, gain_of, make_plan, make_problem, percent_of
from bitplan.plan.feasible import check_feasible, check_selectable
from bitplan.plan.problem import Integers, Problem, Selection
from bitplan.plan.states import States, Step, extend, walk_back


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

    costs (P) in units · values (P), the gains up to rounding.
    """

    graph: Graph
    gains: Gains
    cost: Costs
    costs: Integers
    values: NDArray[np.float64]
    _problem: Problem
    _steps: list[Step]

    def __len__(self) -> int:
        return len(self.costs)

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
        capacity = written.capacity(self.account)
        problem = self._problem.within(np.array([capacity], dtype=np.int64))
        check_feasible([written], [self.cost], self.graph, problem)
        selection, more = self._at(capacity), self._at(capacity + percent_of(problem, 0))
        price = gain_of(self.gains, problem, more.picks) - gain_of(self.gains, problem, selection.picks)
        return make_plan(
            self.graph, self.gains, [self.cost], problem, selection, [written], [price], "exact"
        )  # fmt: skip

    def point(self, capacity: int) -> Point:
        """The best selection within so many units; quicker than a plan where many are wanted."""
        index, wider = self._index(capacity), self._index(capacity + percent_of(self._problem, 0))
        picks = walk_back(self._steps, index)
        gain = gain_of(self.gains, self._problem, picks)
        return Point(picks, int(self.costs[index]), gain, float(self.values[wider] - self.values[index]))

    def _at(self, capacity: int) -> Selection:
        return Selection(walk_back(self._steps, self._index(capacity)), 0)

    def _index(self, capacity: int) -> int:
        index = int(np.searchsorted(self.costs, capacity, side="right")) - 1
        if index < 0:
            raise BudgetError(f"{capacity} units cannot be met: the least is {int(self.costs[0])}")
        return index


def select_all(graph: Graph, gains: Gains, cost: Costs, *, levels: int | None = None) -> Frontier:
    """Find the whole frontier of one cost: every budget's best selection at once."""
    check_selectable(graph)
    check_provenance(graph, gains, [cost])
    problem = make_problem(graph, gains, [cost], [2**62], levels)
    states, steps = States.empty(1), []
    for group in reversed(range(len(problem.groups))):
        states, step = extend(states, problem.costs[:, group], problem.values[group])
        steps.append(step)
    return Frontier(
        graph, gains, cost, states.costs[0], np.asarray(states.values * problem.unit, dtype=np.float64), problem, steps
    )

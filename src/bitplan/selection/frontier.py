"""select_all: the best selection for every budget; and selections at many capacities of one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Account, Budget, BudgetLike, suggest_budgets
from bitplan.core.errors import BudgetError, InputError
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.selection.base import (
    Posed,
    check_feasible,
    check_provenance,
    check_selectable,
    checked,
    gain_of,
    make_plan,
    make_problem,
    more_of,
    pose,
    selector_of,
    spent_by,
    stored,
)
from bitplan.selection.exact import StateList, list_all, search
from bitplan.selection.hull import Hull
from bitplan.selection.problem import Integers, Problem, Selection, Selector


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
    _listed: StateList | None

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
                f"{suggest_budgets(self.account)}"
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
        return search(problem) if self._listed is None else self._listed.selection(problem)


def select_all(graph: Graph, gains: Gains, cost: Costs, *, levels: int | None = None) -> Frontier:
    """Find the whole frontier of one cost: every budget's best selection at once."""
    check_selectable(graph)
    check_provenance(graph, gains, [cost])
    problem = make_problem(graph, gains, [cost], [2**62], levels)
    listed = list_all(problem, 2**62)
    costs, values = Hull.of(problem).points() if listed is None else (listed.costs[0], listed.values)
    return Frontier(graph, gains, cost, costs, np.asarray(values * problem.unit, dtype=np.float64), problem, listed)


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

"""The exact selector: dynamic programming over non-dominated states (Nemhauser & Ullmann 1969), in whole numbers.

A state is the total cost and value of one choice for each of the last groups; groups are added from the last to the
first. With one budget, a state is dropped if another one costs no more and is worth no less. Of equal states the one
with the higher choice for the group just added is kept, so that the earlier layer keeps the higher precision.

If a list of all states would be long, only states that can lead to the best selection are listed. Prices of the
budgets say which. The regret of a choice is how much less it is worth than the best choice of its group after all costs
are paid. No selection within the budgets is worth more than a bound less the sum of its regrets, at any prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import BudgetError
from bitplan.selection.hull import Hull
from bitplan.selection.problem import Integers, Problem, Selection

LISTED = 8_000  # states of a list that answers all budgets of a call
WIDEST = 400_000  # states of a list that a search makes; beyond it HiGHS takes over
STATES = 40_000_000  # states of all steps that are kept: five bytes each
_ALTERNATIVES = 4  # choices beside the best ones that a search begins with
_FEW = 64  # states that are not worth merging
_ROUNDING = 2.0**-52  # of a floating-point number

Floats = NDArray[np.float64]


def exact(problem: Problem) -> Selection:
    """Return the selection of greatest value within the capacities, with a proof that none is worth more.

    Of equal values the lower cost wins, by the first budget first, then the higher precision of the earlier group. If
    lists of states get too long, HiGHS solves the problem. Then it decides between equal values, and the gap says how
    far from the best the selection can be.
    """
    return exact_each([problem])[0]


def exact_each(problems: Sequence[Problem]) -> list[Selection]:
    """Return the best selection of each; problems that differ in the capacity of one budget share a list of states."""
    lists: dict[tuple[int, int], StateList | None] = {}
    selections = []
    for problem in problems:
        shared = id(problem.values), id(problem.costs)
        if len(problem.capacities) == 1 and shared not in lists:
            alike = [other for other in problems if (id(other.values), id(other.costs)) == shared]
            most = max(int(other.capacities[0]) for other in alike)
            lists[shared] = list_all(problem, most + int(problem.percents[0]), LISTED)
        states = lists.get(shared)
        selections.append(search(problem) if states is None else states.selection(problem))
    return selections


@dataclass(frozen=True)
class StateList:
    """States of all groups: costs (K, S) and values (S); with one budget both ascend.

    parents (S) and picks (S) of each step lead back from a state to its choices, the last group's step first. `settled`
    (G) has the choices of the groups that no step is about.
    """

    costs: Integers
    values: Integers
    steps: list[tuple[int, NDArray[np.int32], NDArray[np.int8]]]
    settled: NDArray[np.intp]

    def picks(self, state: int) -> tuple[int, ...]:
        """Return the choices that led to a state."""
        picks = self.settled.tolist()
        for group, parents, choices in reversed(self.steps):
            picks[group] = int(choices[state])
            state = int(parents[state])
        return tuple(picks)

    def best(self) -> int:
        """Return the state of greatest value, of equal ones the cheapest, of equal ones the first listed."""
        return int(np.lexsort((*self.costs[::-1], -self.values))[0])

    def selection(self, problem: Problem) -> Selection:
        """Return the best selection within the budget of a problem, and what one more percent adds."""
        capacity = int(problem.capacities[0])
        state, wider = self._within(capacity), self._within(capacity + int(problem.percents[0]))
        if state < 0:
            raise BudgetError(f"{capacity} units cannot be met: the least is {int(self.costs[0, 0])}")
        return Selection(self.picks(state), 0, (float(self.values[wider] - self.values[state]),))

    def _within(self, capacity: int) -> int:
        return int(np.searchsorted(self.costs[0], capacity, side="right")) - 1


def list_all(problem: Problem, most: int, widest: int = STATES) -> StateList | None:
    """List all non-dominated selections that cost up to `most`; None if there are none, or too many."""
    if int(problem.costs[0].min(axis=1).sum()) > most:
        return None
    every_choice = np.zeros(problem.values.shape)
    return _list_states(problem.within(np.array([most], dtype=np.int64)), every_choice, 0.0, widest)


def search(problem: Problem) -> Selection:
    """Return the best selection by lists of states, longer and longer until no better one can be left out."""
    bound = Bound.of(problem, _prices_of(problem))
    best: tuple[int, ...] | None = None
    most, limit, slack = bound.most(0.0), bound.first_limit(), math.inf
    while (states := _list_states(problem, bound.regrets, limit, WIDEST)) is not None:
        if len(states.values):
            state = states.best()
            best, value = states.picks(state), int(states.values[state])
            slack, most = bound.slack(value), max(value, bound.most(limit))
            if limit >= slack:
                return Selection(best, 0, bound.more)
            limit = min(2 * limit, slack)
        elif limit >= bound.largest:
            raise BudgetError("the budgets cannot all be met at once: raise one of them, or add a lower precision")
        else:
            limit *= 2
    from bitplan.selection.several_budgets import solve_mixed_integer  # scipy.optimize takes a while to load

    picks, most = solve_mixed_integer(problem, bound.regrets <= slack, best, most)
    value = int(problem.values[np.arange(len(picks)), list(picks)].sum())
    return Selection(picks, most - value, bound.more)


@dataclass(frozen=True)
class Bound:
    """The bound on values by the prices of the budgets, and the regrets (G, C) that it is reduced by.

    `reference` is the value of the best selection at these prices, and `leftover` the price of what it leaves of the
    budgets, or less than 0. Regrets are floating-point numbers: `margin` is more than all their rounding adds up to.
    """

    regrets: Floats
    reference: int
    leftover: float
    margin: float
    more: tuple[float, ...]

    @classmethod
    def of(cls, problem: Problem, prices: Floats) -> Bound:
        """Return the bound by some prices ≥ 0, in value per unit of cost (K); it holds for all of them."""
        picks = (problem.values - np.tensordot(prices, problem.costs, axes=1)).argmax(axis=1)[:, None]
        best_values = np.take_along_axis(problem.values, picks, axis=1)  # (G, 1)
        best_costs = np.take_along_axis(problem.costs, picks[None], axis=2)  # (K, G, 1)
        lost, saved = best_values - problem.values, best_costs - problem.costs  # whole numbers
        regrets = lost - np.tensordot(prices, saved, axes=1)
        # At huge prices rounding hides differences of values, and a pick is not the best: its regret is negative.
        missed = float(-np.minimum(regrets.min(axis=1), 0.0).sum())
        left = prices * (problem.capacities - best_costs.sum(axis=(1, 2)))
        sizes = np.abs(lost) + np.tensordot(prices, np.abs(saved), axes=1)
        return cls(
            regrets=np.maximum(regrets, 0.0),
            reference=int(best_values.sum()),
            leftover=float(left.sum()),
            margin=missed + (len(problem.values) + 8) * _ROUNDING * float(sizes.max(axis=1).sum() + np.abs(left).sum()),
            more=tuple((prices * problem.percents).tolist()),
        )

    @property
    def largest(self) -> float:
        """The most that regrets can add up to."""
        return float(self.regrets.max(axis=1).sum()) + self.margin

    def first_limit(self) -> float:
        """Return a limit on regrets that allows few alternatives."""
        positive = np.sort(self.regrets[self.regrets > self.margin])
        return float(positive[min(_ALTERNATIVES, len(positive)) - 1]) if len(positive) else self.margin

    def most(self, regret: float) -> int:
        """Return a value that no selection with at least this regret exceeds."""
        return self.reference + math.floor(self.leftover + self.margin - regret)

    def slack(self, value: int) -> float:
        """Return the most that the regrets of a selection with at least this value can add up to."""
        return (self.reference - value) + self.leftover + self.margin


def _prices_of(problem: Problem) -> Floats:
    """Return the prices of the budgets (K) in the linear relaxation, where the bound is least."""
    if len(problem.capacities) == 1:
        return np.array([Hull.of(problem).price(int(problem.capacities[0]))])
    from bitplan.selection.several_budgets import prices_of  # scipy.optimize takes a while to load

    return prices_of(problem)


def _list_states(problem: Problem, regrets: Floats, limit: float, widest: int) -> StateList | None:
    """List the states within the capacities whose regrets add up to at most the limit; None if there are too many."""
    is_allowed = regrets <= limit
    settled = is_allowed.argmax(axis=1)
    is_open = is_allowed.sum(axis=1) > 1
    fixed, groups = np.flatnonzero(~is_open), np.flatnonzero(is_open)
    costs = problem.costs[:, fixed, settled[fixed]].sum(axis=1)[:, None]  # (K, S)
    values = problem.values[fixed, settled[fixed]].sum()[None]
    sums = np.zeros(1)  # of regrets (S)
    cheapest = np.where(is_allowed[groups], problem.costs[:, groups], 2**62).min(axis=2)
    rooms = problem.capacities[:, None] - (np.cumsum(cheapest, axis=1) - cheapest)  # (K, G)
    steps, kept_states, merge_above = [], 0, _FEW
    if (costs[:, 0] > problem.capacities).any():
        return StateList(costs[:, :0], values[:0], [], settled)
    for place in reversed(range(len(groups))):
        group, size = int(groups[place]), len(values)
        choices = np.flatnonzero(is_allowed[group])[::-1]  # the highest first, so that of equal states it is kept
        sums = (regrets[group, choices, None] + sums).ravel()
        kept = np.flatnonzero(sums <= limit)
        turns, parents = np.divmod(kept, size)
        costs = problem.costs[:, group, choices[turns]] + costs[:, parents]
        values = problem.values[group, choices[turns]] + values[parents]
        fitting = np.flatnonzero((costs <= rooms[:, place, None]).all(axis=0))
        if len(costs) == 1:
            fitting = fitting[_find_rising(costs[0, fitting], values[fitting])]
        elif len(fitting) > merge_above:
            listed = len(fitting)
            fitting = fitting[_find_distinct(costs[:, fitting], values[fitting])]
            merge_above = max(_FEW, len(fitting) * (2 if len(fitting) < 0.7 * listed else 32))
        costs, values, sums = costs[:, fitting], values[fitting], sums[kept[fitting]]
        turns, parents = turns[fitting], parents[fitting]
        steps.append((group, parents.astype(np.int32), choices[turns].astype(np.int8)))
        kept_states += len(values)
        if len(values) > widest or kept_states + len(values) * place > STATES:  # lists hardly ever get shorter
            return None
    return StateList(costs, values, steps, settled)


def _find_rising(costs: Integers, values: Integers) -> NDArray[np.intp]:
    """Return the states worth more than all cheaper ones, by ascending cost; of equal states the first."""
    order = np.argsort(costs, kind="stable")
    costs, values = costs[order], values[order]
    best = np.maximum.accumulate(values)
    rising = np.flatnonzero(np.append(True, values[1:] > best[:-1])[: len(values)])
    is_last = np.append(costs[rising[1:]] != costs[rising[:-1]], True)[: len(rising)]  # of equal costs the best
    states: NDArray[np.intp] = order[rising[is_last]]
    return states


def _find_distinct(costs: Integers, values: Integers) -> NDArray[np.intp]:
    """Return one state for each costs (K): the best, of equal ones the first.

    With several budgets hardly any state dominates another one of different costs, so that they are not compared.
    """
    order = np.lexsort((-values, *costs[::-1]))
    is_new = (costs[:, order[1:]] != costs[:, order[:-1]]).any(axis=0)
    states: NDArray[np.intp] = order[np.append(True, is_new)]
    return states

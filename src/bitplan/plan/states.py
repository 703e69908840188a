"""Lists of non-dominated states (Nemhauser & Ullmann 1969), for one choice per group.

A state is the total cost and value of the choices for the last groups; groups are added from the last to the first. One
state dominates another when it costs no more and is worth no less. Of equal states the one with the higher choice for
the group just added is kept, so that the earlier layer keeps the higher precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import BudgetError
from bitplan.plan.problem import Integers, Problem, Selection
from bitplan.plan.sums import list_sums

_TOTAL = 40_000_000  # states of all steps: five bytes each
_FEW = 512  # states of which all are compared, with several costs
_BLOCK = 512  # states that are compared with each other at once

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Step:
    """How the states of one group came about: which state they extend, and by which choice."""

    parents: NDArray[np.int32]
    picks: NDArray[np.int8]


class Trail(Protocol):
    """Leads back from states to choices."""

    def picks(self, state: int) -> tuple[int, ...]:
        """The choices that led to a state."""
        ...


@dataclass(frozen=True)
class Complete:
    """Every selection that no other dominates, with one budget: costs (S) ascending and values (S) ascending."""

    costs: Integers
    values: Integers
    trail: Trail

    def selection(self, problem: Problem) -> Selection:
        """The best within the capacity of a problem of these costs and values, and what one more percent adds."""
        capacity = int(problem.capacities[0])
        state, wider = self.within(capacity), self.within(capacity + int(problem.percents[0]))
        if state < 0:
            raise BudgetError(f"{capacity} units cannot be met: the least is {int(self.costs[0])}")
        return Selection(self.trail.picks(state), 0, (float(self.values[wider] - self.values[state]),))

    def within(self, capacity: int) -> int:
        """Which is the best within a capacity; −1 if none is."""
        return int(np.searchsorted(self.costs, capacity, side="right")) - 1


@dataclass(frozen=True)
class _StepTrail:
    """The way back through a list of states: the step of the last group first."""

    steps: list[Step]

    def picks(self, state: int) -> tuple[int, ...]:
        """The choices that led to a state."""
        picks: list[int] = []
        for step in reversed(self.steps):
            picks.append(int(step.picks[state]))
            state = int(step.parents[state])
        return tuple(picks)


def list_all(problem: Problem, most: int, width: int = _TOTAL) -> Complete | None:
    """List the selections that cost up to `most`; None where there are none, more than `width`, or too many to keep."""
    summed = list_sums(problem, most, width)
    if summed is not None:
        return Complete(*summed)
    costs, values = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    steps: list[Step] = []
    room = _TOTAL
    lowest = problem.costs[0].min(axis=1)
    left = most - np.concatenate(([0], np.cumsum(lowest)))  # what the groups from this one on may cost
    if left[-1] < 0:
        return None
    for group in reversed(range(len(problem.groups))):
        costs, values, step = _add(costs, values, problem.costs[0, group], problem.values[group], int(left[group]))
        steps.append(step)
        room -= len(costs)
        if len(costs) > width or len(costs) * group > room:  # lists hardly ever get shorter
            return None
    return Complete(costs, values, _StepTrail(steps))


def _add(
    costs: Integers, values: Integers, group_costs: Integers, group_values: Integers, most: int
) -> tuple[Integers, Integers, Step]:
    """Add a group with costs (C) and values (C), the highest choice first, so that of equal states it is kept."""
    size, choices = len(costs), len(group_costs)
    all_costs = (group_costs[::-1, None] + costs).ravel()
    order = np.argsort(all_costs, kind="stable")
    all_costs = all_costs[order]
    if all_costs[-1] > most:
        order = order[: np.searchsorted(all_costs, most, side="right")]
        all_costs = all_costs[: len(order)]
    all_values = (group_values[::-1, None] + values).ravel()[order]
    kept = _rising(all_costs, all_values)
    turn, parents = np.divmod(order[kept], size)
    step = Step(parents.astype(np.int32), (choices - 1 - turn).astype(np.int8))
    return all_costs[kept], all_values[kept], step


def front(costs: Integers, values: Integers) -> Indices:
    """Which states with costs (K, S) and values (S) are not dominated, by ascending cost; of equal ones the first.

    With several costs and many states, only those with equal costs are compared: that loses none.
    """
    if not len(values):
        return np.zeros(0, dtype=np.intp)
    if len(costs) == 1:
        order = np.argsort(costs[0], kind="stable")
        rising: Indices = order[_rising(costs[0][order], values[order])]
        return rising
    order = np.lexsort((-values, *costs[::-1]))  # by the first cost, then the others; stable, as the one above
    if len(order) <= _FEW:
        return _front_of_sorted(costs, values, order)
    is_new = (costs[:, order[1:]] != costs[:, order[:-1]]).any(axis=0)
    distinct: Indices = order[np.append(True, is_new)]
    return distinct


def _rising(costs: Integers, values: Integers) -> Indices:
    """Of states by ascending cost, those worth more than all before; of equal cost only the best."""
    best = np.maximum.accumulate(values)
    rises = np.flatnonzero(np.concatenate(([True], values[1:] > best[:-1])))
    risen = costs[rises]
    is_last = np.append(risen[1:] != risen[:-1], True)
    return rises if is_last.all() else rises[is_last]


def _front_of_sorted(costs: Integers, values: Integers, order: Indices) -> Indices:
    """The front for several costs, block by block, of states sorted by cost, the best value first.

    A state can only be dominated by one before it. With two costs the states before it are summed up by a staircase
    (the best value for any second cost); with more, only the block itself is looked through, which keeps more states
    than needed but loses none.
    """
    kept: list[Indices] = []
    by_stairs = len(costs) == 2
    stair_costs = np.array([np.iinfo(np.int64).min])  # a first stair below all costs and values
    stair_values = np.array([np.iinfo(np.int64).min])
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        if by_stairs:
            stair = np.searchsorted(stair_costs, costs[1][block], side="right") - 1
            block = block[stair_values[stair] < values[block]]
        block = block[~_dominated_within(costs[:, block], values[block])]
        kept.append(block)
        if by_stairs:
            seen_costs = np.concatenate((stair_costs, costs[1][block]))
            seen_values = np.concatenate((stair_values, values[block]))
            stair_costs, stair_values = _staircase(seen_costs, seen_values)
    return np.concatenate(kept)


def _dominated_within(costs: Integers, values: Integers) -> NDArray[np.bool_]:
    """Which states of a sorted block an earlier one of the same block dominates."""
    dominates = values[:, None] >= values[None, :]  # (S, S): the row the column
    for cost in costs:
        dominates &= cost[:, None] <= cost[None, :]
    by_earlier = np.triu(dominates, 1)
    return np.asarray(by_earlier.any(axis=0))


def _staircase(costs: Integers, values: Integers) -> tuple[Integers, Integers]:
    """Costs, ascending, each with the best value of all that cost no more, where that rises."""
    order = np.lexsort((-values, costs))
    steps = order[_rising(costs[order], values[order])]
    return costs[steps], values[steps]

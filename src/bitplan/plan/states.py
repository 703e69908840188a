"""Lists of non-dominated states (Nemhauser & Ullmann 1969), for one choice per group and any number of costs.

A state is the total cost and value of the choices for the last groups; groups are added from the last to the first. One
state dominates another when it costs no more and is worth no less. Of equal states the one with the higher choice for
the group just added is kept, so that the earlier layer keeps the higher precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_BLOCK = 512  # states that are compared with each other at once


@dataclass(frozen=True)
class Step:
    """How the states of one group came about: which state they extend, and by which choice."""

    parents: NDArray[np.int32]
    picks: NDArray[np.int8]


@dataclass(frozen=True)
class States:
    """costs (K, S), ascending in the first · values (S)."""

    costs: Integers
    values: Integers

    @classmethod
    def empty(cls, budgets: int) -> States:
        """The one state of no groups."""
        return cls(np.zeros((budgets, 1), dtype=np.int64), np.zeros(1, dtype=np.int64))

    def take(self, chosen: NDArray[np.intp]) -> States:
        """Some of the states, in the given order."""
        return States(self.costs[:, chosen], self.values[chosen])


def extend(
    states: States, costs: Integers, values: Integers, hopeful: Callable[[States], NDArray[np.bool_]] | None = None
) -> tuple[States, Step]:
    """Add a group with costs (K, C) and values (C); drop what is not hopeful, then what is dominated."""
    size, choices = len(states.values), len(values)
    high_first = np.arange(choices)[::-1]  # of equal states the first is kept
    all_costs = states.costs[:, None, :] + costs[:, high_first, None]  # (K, C, S)
    all_values = states.values[None, :] + values[high_first, None]  # (C, S)
    grown = States(all_costs.reshape(len(costs), -1), all_values.reshape(-1))  # (K, C · S), (C · S)
    kept = np.arange(len(grown.values)) if hopeful is None else np.flatnonzero(hopeful(grown))
    if choices > 1:  # one choice shifts all states alike
        kept = kept[_front(grown.costs[:, kept], grown.values[kept])]
    turn, parent = np.divmod(kept, size)
    step = Step(parent.astype(np.int32), high_first[turn].astype(np.int8))
    return grown.take(kept), step


def walk_back(steps: list[Step], state: int) -> tuple[int, ...]:
    """The choices that led to a state; `steps` in the order in which groups were added."""
    picks: list[int] = []
    for step in reversed(steps):
        picks.append(int(step.picks[state]))
        state = int(step.parents[state])
    return tuple(picks)


def _front(costs: Integers, values: Integers) -> NDArray[np.intp]:
    """Indices of the non-dominated states, by ascending cost; of equal states the first."""
    if not len(values):
        return np.zeros(0, dtype=np.intp)
    if len(costs) > 1:
        order = np.lexsort((-values, *costs[::-1]))  # by the first cost, then the others; stable, as the one below
        return _front_of_sorted(costs, values, order)
    order = np.argsort(costs[0], kind="stable")
    return order[_rising(costs[0][order], values[order])]


def _rising(costs: Integers, values: Integers) -> NDArray[np.intp]:
    """Of states by ascending cost, those worth more than all before; of equal cost only the best."""
    best = np.maximum.accumulate(values)
    is_rise = np.concatenate(([True], values[1:] > best[:-1]))
    rises = np.flatnonzero(is_rise)
    is_last_of_cost = np.concatenate((costs[rises[1:]] != costs[rises[:-1]], [True]))
    return rises[is_last_of_cost]


def _front_of_sorted(costs: Integers, values: Integers, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """The front for several costs, block by block, of states sorted by cost, the best value first.

    A state can only be dominated by one before it. With two costs the states before it are summed up by a staircase
    (the best value for any second cost); with more, only the block itself is looked through, which keeps more states
    than needed but loses none.
    """
    kept: list[NDArray[np.intp]] = []
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

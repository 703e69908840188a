"""The partial selections of half a core: what they cost, what they are worth, and how much regret they have.

Groups are added from the last to the first, choices from the highest to the lowest. Of partial selections with equal
costs and value the first listed keeps the higher precision in the earlier group, and only the first is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.bound import Bound
from bitplan.plan.problem import Integers, Problem
from bitplan.plan.states import Step, front

_WIDER = 4  # a list that grows to so many times its width is cut
_TOTAL = 4_000_000  # partial selections of all steps
_THIN = 64  # the least that is worth looking for what is dominated, with several budgets


@dataclass(frozen=True)
class Half:
    """costs (K, S) · values (S) · regrets (S); with one budget by ascending cost, and a dearer one is worth more.

    parents (S) and picks (S) of the steps lead back from them, the last group's step first.
    """

    costs: Integers
    values: Integers
    regrets: Integers
    steps: list[Step]

    def take(self, chosen: NDArray[np.intp]) -> Half:
        """Some of them, in the given order."""
        last = self.steps[-1]
        steps = [*self.steps[:-1], Step(last.parents[chosen], last.picks[chosen])]
        return Half(self.costs[:, chosen], self.values[chosen], self.regrets[chosen], steps)


@dataclass(frozen=True)
class _Choices:
    """Viable choices of a group, the highest first: costs (K, C) · values (C) · regrets (C) · picks (C)."""

    costs: Integers
    values: Integers
    regrets: Integers
    picks: NDArray[np.int8]


def list_half(
    problem: Problem, bound: Bound, groups: NDArray[np.intp], limit: int, width: int, ranked: int | None = None
) -> tuple[Half, int]:
    """List what regrets up to the limit allow, and say up to which none was left out, should the list have been cut.

    Of costs beyond the first `ranked`, less is not better: they only have to fit.
    """
    budgets = len(problem.capacities)
    nothing = np.zeros(1, dtype=np.int64)
    half, thin = Half(np.zeros((budgets, 1), dtype=np.int64), nothing, nothing, []), 0 if budgets == 1 else _THIN
    searched, total = limit, _TOTAL
    for left, group in zip(range(len(groups), 0, -1), groups[::-1].tolist(), strict=True):
        viable = np.flatnonzero(bound.regrets[group] <= limit)[::-1]
        costs, values = problem.costs[:, group, viable], problem.values[group, viable]
        choices = _Choices(costs, values, bound.regrets[group, viable], viable.astype(np.int8))
        half, seen = _grow(half, choices, limit, thin, ranked)
        size = len(half.values)
        if budgets > 1 and seen > thin:
            thin = max(_THIN, size * (2 if size < 0.7 * seen else 32))
        most = min(width * _WIDER, total // left)
        total -= min(most, size)
        if size > most:
            kept, dropped = _least(half.regrets, most)
            half, limit, searched = half.take(kept), min(limit, dropped), min(searched, dropped - 1)
    return half, searched


def _grow(half: Half, choices: _Choices, limit: int, thin: int, ranked: int | None) -> tuple[Half, int]:
    """Add a group before all others, and drop what is dominated of more than `thin`; also how many there were."""
    budgets, size = len(half.costs), len(half.values)
    regrets = (choices.regrets[:, None] + half.regrets).ravel()
    costs = (choices.costs[:, :, None] + half.costs[:, None, :]).reshape(budgets, -1)
    values = (choices.values[:, None] + half.values).ravel()
    kept = np.flatnonzero(regrets <= limit)
    seen = len(kept)
    if seen > thin:
        is_all = seen == len(values)
        compared = costs if ranked is None else np.concatenate((costs, -costs[ranked:]))  # so these have to be equal
        chosen = front(compared, values) if is_all else front(compared[:, kept], values[kept])
        kept = chosen if is_all else kept[chosen]
    turn, parents = np.divmod(kept, size)
    steps = [*half.steps, Step(parents.astype(np.int32), choices.picks[turn])]
    return Half(costs[:, kept], values[kept], regrets[kept], steps), seen


def _least(regrets: Integers, count: int) -> tuple[NDArray[np.intp], int]:
    """Those of least regret, in their order, of equal ones evenly spread; and the least regret of the others."""
    dropped = int(np.partition(regrets, count)[count])
    sure, equal = np.flatnonzero(regrets < dropped), np.flatnonzero(regrets == dropped)
    spread = (
        equal[np.linspace(0, len(equal) - 1, count - len(sure)).astype(np.intp)] if count > len(sure) else equal[:0]
    )
    return np.sort(np.concatenate((sure, spread))), dropped

"""A selection to begin with: the best where costs are paid for, mended until it meets the budgets, then filled up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.bound import Bound
from bitplan.plan.problem import Integers, Problem

_ROUNDS = 40

Picks = NDArray[np.intp]


def rounded(problem: Problem, bound: Bound) -> Picks | None:
    """A selection within the budgets that is near the bound; None if none was found."""
    picks = bound.regrets.argmin(axis=1)
    for _ in range(_ROUNDS):
        over = _spent(problem, picks) - problem.capacities
        if (over <= 0).all():
            return _filled(problem, bound, picks)
        if not _lower_(problem, bound, picks, over):
            break
    lowest = np.zeros_like(picks)
    return _filled(problem, bound, lowest) if (_spent(problem, lowest) <= problem.capacities).all() else None


def _spent(problem: Problem, picks: Picks) -> Integers:
    spent: Integers = problem.costs[:, np.arange(len(picks)), picks].sum(axis=1)
    return spent


def _lower_(problem: Problem, bound: Bound, picks: Picks, over: Integers) -> bool:
    """Change groups, those of least regret for what they save first, until nothing is over; whether any saves."""
    every = np.arange(len(picks))
    saved = np.maximum(problem.costs[:, every, picks][:, :, None] - problem.costs, 0)  # (K, G, C)
    worth = np.tensordot(np.maximum(over, 0) > 0, saved / np.maximum(problem.capacities, 1)[:, None, None], axes=1)
    regret = np.maximum(bound.regrets - bound.regrets[every, picks][:, None], 1.0)
    score = np.where(worth > 0, regret / np.maximum(worth, 1e-200), np.inf)  # (G, C)
    then = score.argmin(axis=1)
    order = np.argsort(score[every, then], kind="stable")
    order = order[np.isfinite(score[order, then[order]])]
    if not len(order):
        return False
    is_over = (np.cumsum(saved[:, order, then[order]], axis=1) < over[:, None]).any(axis=0)
    changed = order[: int(is_over.sum()) + 1]
    picks[changed] = then[changed]
    return True


def _filled(problem: Problem, bound: Bound, picks: Picks) -> Picks:
    """Raise groups, those of least regret first, while there is room."""
    every = np.arange(len(picks))
    for _ in range(_ROUNDS):
        room = problem.capacities - _spent(problem, picks)
        more = problem.costs - problem.costs[:, every, picks][:, :, None]  # (K, G, C)
        gain = problem.values - problem.values[every, picks][:, None]
        can = (gain > 0) & (more <= room[:, None, None]).all(axis=0)
        regret = np.where(can, bound.regrets - bound.regrets[every, picks][:, None], np.iinfo(np.int64).max)
        then = regret.argmin(axis=1)
        order = np.flatnonzero(can[every, then])
        if not len(order):
            break
        order = order[np.argsort(regret[order, then[order]], kind="stable")]
        fits = (np.cumsum(more[:, order, then[order]], axis=1) <= room[:, None]).all(axis=0)
        changed = order[: max(1, int(np.argmin(fits)) if not fits.all() else len(order))]
        picks[changed] = then[changed]
    return picks

"""The greedy selector of the paper's positional baselines: lower layers in order until the budget is met."""

from __future__ import annotations

import numpy as np

from bitplan.selection.problem import Problem, Selection


def greedy(problem: Problem) -> Selection:
    """Lower the group of least value first, then the next, until the network just meets every budget.

    A group goes down choice by choice before the next one is touched; of equal values the earlier group goes first.
    """
    groups, choices = problem.values.shape
    picks = [choices - 1] * groups
    spent = problem.costs[:, :, -1].sum(axis=1)
    for group in np.argsort(problem.values[:, -1], kind="stable"):
        while (spent > problem.capacities).any() and picks[group] > 0:
            now = picks[group]
            spent = spent - problem.costs[:, group, now] + problem.costs[:, group, now - 1]
            picks[group] = now - 1
    return Selection(tuple(picks), None)

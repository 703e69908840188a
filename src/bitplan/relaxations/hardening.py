"""From what was learned to a table of gains: differences from the lowest choice, and a budget that is used up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bitplan.selection.budget_constraint import BudgetConstraint
from bitplan.selection.exact import exact
from bitplan.selection.problem import Problem, to_integers

Values = NDArray[np.float64]
"""(G, C): what each choice of each group is worth."""

_FIRST, _TIMES = 1e-6, 30  # the first that is added, as a share of what values come to; how often it grows
_FINEST = 1.02  # the ratio of two that count as one


def as_values(told: Tensor) -> Values:
    """What a relaxation says of each choice, less what it says of the lowest."""
    values: Values = told.detach().cpu().double().numpy()
    return values - values[:, :1]


def used_up(values: Values, aim: BudgetConstraint) -> Values:
    """The same, and as much for every choice more as it takes that the best selection leaves nothing of the budgets.

    A penalty pushes groups that are alike past the middle between two choices, all of them: the plan that is nearest
    to where they are would be the lowest, and much would be left. What is added is the same for all groups, so that
    their order stays, as with the offset by which FracBits rounds. Nothing is left where no group can have one choice
    more.
    """
    more = np.arange(values.shape[1], dtype=np.float64)
    if _leaves_nothing(values, aim):
        return values
    low, high = 0.0, _FIRST * (float(np.abs(values).max()) or 1.0)
    for _ in range(_TIMES):
        if _leaves_nothing(values + high * more, aim):
            break
        low, high = high, 4 * high
    while low and high / low > _FINEST:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _leaves_nothing(values + middle * more, aim) else (middle, high)
    return values + high * more


def _leaves_nothing(values: Values, aim: BudgetConstraint) -> bool:
    """Whether no group of the best selection could have one choice more."""
    codes = to_integers([tuple(row) for row in values.tolist()]).values
    picks = exact(Problem(aim.groups, aim.choices, codes, aim.costs, aim.capacities)).picks
    return aim.raised(picks, range(len(picks))) == tuple(picks)

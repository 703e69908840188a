"""The exact selector: the best selection, with proof, for any number of choices and budgets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import BudgetError
from bitplan.plan.bound import Bound
from bitplan.plan.problem import Integers, Problem, Selection
from bitplan.plan.states import States, Step, extend, walk_back

# How many states are kept; what is cut off at one width is counted in the gap, and the next width tried.
PLAIN = 2_000
WIDTHS = (150, 3_000, 15_000, 75_000, 300_000, 1_000_000)


def exact(problem: Problem) -> Selection:
    """Maximize the value within the capacities.

    With one budget and few states, the plain list of non-dominated states is complete. Otherwise states that cannot
    beat the best selection known (by a Lagrangian bound) are dropped, with a limit on their number that is raised until
    nothing was cut off. Should even the last limit cut, the gap says how far from the optimum the answer can be.
    """
    if len(problem.capacities) == 1:
        plain = _list(problem, None, np.iinfo(np.int64).min, PLAIN)
        if plain.cut is None:
            return plain.selection()
    best, known = _lowest(problem)
    bound = Bound.of(problem)
    cut: int | None = None
    for width in WIDTHS:
        search = _list(problem, bound, known, width)
        if len(search.states.values) and search.best_value >= known:
            best, known = search.selection(), search.best_value
        cut = search.cut
        if cut is None:
            break
    if best is None:
        raise BudgetError("the budgets cannot all be met at once: raise one of them, or add a lower precision")
    return Selection(best.picks, 0 if cut is None else max(0, cut - known))


def _lowest(problem: Problem) -> tuple[Selection | None, int]:
    """Every group at its lowest choice, where that is within all budgets, and what it is worth."""
    spent = problem.costs[:, :, 0].sum(axis=1)  # (K)
    if (spent > problem.capacities).any():
        return None, int(np.iinfo(np.int64).min)
    return Selection((0,) * len(problem.groups), None), int(problem.values[:, 0].sum())


@dataclass(frozen=True)
class _Search:
    """The final states, how to walk back from them, and the best that was cut off (None: nothing was)."""

    states: States
    steps: list[Step]
    cut: int | None

    @property
    def best_value(self) -> int:
        return int(self.states.values.max())

    def selection(self) -> Selection:
        """The best state: the greatest value, then the lowest costs."""
        best = np.lexsort((*self.states.costs[::-1], -self.states.values))[0]
        return Selection(walk_back(self.steps, int(best)), 0)


def _list(problem: Problem, bound: Bound | None, known: int, width: int) -> _Search:
    """Build the states of all groups, last to first, keeping at most `width` at a time."""
    states = States.empty(len(problem.capacities))
    steps: list[Step] = []
    least = problem.costs.min(axis=2)  # (K, G)
    # (K, G + 1): what all groups before one cost at the least, so that there is room for them
    least_before = np.concatenate((np.zeros_like(least[:, :1]), np.cumsum(least, axis=1)), axis=1)
    cut: int | None = None
    for group in reversed(range(len(problem.groups))):
        limits = (problem.capacities - least_before[:, group])[:, None]  # (K, 1)

        def hopeful(grown: States, limits: Integers = limits, group: int = group) -> NDArray[np.bool_]:
            fits = np.asarray((grown.costs <= limits).all(axis=0))
            return fits if bound is None else fits & (bound.above(grown, group) >= known)

        choices = np.arange(len(problem.choices)) if bound is None else bound.viable(group, known)
        states, step = extend(states, problem.costs[:, group, choices], problem.values[group, choices], hopeful)
        step = Step(step.parents, choices[step.picks].astype(np.int8))  # its picks count the viable choices only
        if len(states.values) > width:
            if bound is None:
                return _Search(states, steps, cut=0)  # not worth going on: the search with a bound will
            kept, dropped = _best(bound.above(states, group), width)
            states, step = states.take(kept), Step(step.parents[kept], step.picks[kept])
            cut = max(cut or 0, dropped)
        steps.append(step)
    return _Search(states, steps, cut)


def _best(reach: NDArray[np.float64], width: int) -> tuple[NDArray[np.intp], int]:
    """The states that reach furthest, in their order, and how far the best of the others would."""
    ranked = np.argpartition(-reach, width)
    return np.sort(ranked[:width]), int(reach[ranked[width:]].max())

"""The exact selector: the best selection, with proof, for any number of choices and budgets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import BudgetError
from bitplan.plan.bound import Bound
from bitplan.plan.problem import Problem, Selection
from bitplan.plan.states import States, Step, extend, walk_back

# How many states are kept; what is cut off at one width is counted in the gap, and the next width tried.
PLAIN = 4_000
WIDTHS = (4_000, 60_000, 600_000)


def exact(problem: Problem) -> Selection:
    """Maximize the value within the capacities.

    With one budget and few states, the plain list of non-dominated states is complete. Otherwise states that cannot beat
    the best selection known (by a Lagrangian bound) are dropped, with a limit on their number that is raised until
    nothing was cut off. Should even the last limit cut, the gap says how far from the optimum the answer can be.
    """
    if len(problem.capacities) == 1:
        plain = _list(problem, None, np.iinfo(np.int64).min, PLAIN)
        if plain.cut is None:
            return plain.selection(problem, 0)
    bound = Bound.of(problem)
    found: Selection | None = None
    known = int(np.iinfo(np.int64).min)
    for width in WIDTHS:
        search = _list(problem, bound, known, width)
        if len(search.states.values):
            best = search.selection(problem, 0)
            if found is None or search.best_value >= known:
                found, known = best, search.best_value
        if search.cut is None:
            break
    else:
        assert search.cut is not None
        if found is not None:
            return Selection(found.picks, max(0, search.cut - known))
    if found is None:
        raise BudgetError("the budgets cannot all be met at once: raise one of them, or add a lower precision")
    return found


@dataclass(frozen=True)
class _Search:
    """The final states, how to walk back from them, and the best that was cut off (None: nothing was)."""

    states: States
    steps: list[Step]
    cut: int | None

    @property
    def best_value(self) -> int:
        return int(self.states.values.max())

    def selection(self, problem: Problem, gap: int) -> Selection:
        """The best state: the greatest value, then the lowest costs."""
        best = np.lexsort((*self.states.costs[::-1], -self.states.values))[0]
        return Selection(walk_back(self.steps, int(best)), gap)


def _list(problem: Problem, bound: Bound | None, known: int, width: int) -> _Search:
    """Build the states of all groups, last to first, keeping at most `width` at a time."""
    states, steps = States.empty(len(problem.capacities)), []
    least = problem.costs.min(axis=2)
    before = np.concatenate((np.zeros_like(least[:, :1]), np.cumsum(least, axis=1)), axis=1)  # (K, G + 1)
    cut: int | None = None
    for group in reversed(range(len(problem.groups))):
        limits = problem.capacities - before[:, group]
        states, step = extend(states, problem.costs[:, group], problem.values[group], limits)
        kept, dropped = _prune(states, bound, group, known, width)
        if kept is not None:
            states, step = states.take(kept), Step(step.parents[kept], step.picks[kept])
        cut = dropped if cut is None else max(cut, dropped) if dropped is not None else cut
        steps.append(step)
        if not len(states.values) or (bound is None and cut is not None):
            break
    return _Search(states, steps, cut)


def _prune(
    states: States, bound: Bound | None, group: int, known: int, width: int
) -> tuple[NDArray[np.intp] | None, int | None]:
    """Which states to keep (None: all), and the bound of the best one cut off for lack of room."""
    if bound is None:
        return None, (0 if len(states.values) > width else None)
    reach = bound.above(states, group)
    kept = np.flatnonzero(reach >= known)
    if len(kept) <= width:
        return kept, None
    ranked = kept[np.argpartition(-reach[kept], width)]
    return np.sort(ranked[:width]), int(reach[ranked[width:]].max())

"""The exact selector: the best selection, with proof, for any number of choices and budgets."""

from __future__ import annotations

from collections.abc import Sequence

from bitplan.core.errors import BudgetError
from bitplan.plan.bound import Bound
from bitplan.plan.branches import search_branches
from bitplan.plan.copies import Distinct
from bitplan.plan.core import Incumbent, foreseen, search, search_part
from bitplan.plan.problem import Problem, Selection
from bitplan.plan.relaxation import relaxed_prices
from bitplan.plan.rounding import rounded
from bitplan.plan.states import Complete, list_all

PLAIN = 2_000  # states of a list that is complete
WIDTHS = (64, 512, 4_096, 32_768, 262_144, 2_097_152, 16_777_216)  # about how many partial selections are looked at
TIES = 48  # alternatives without regret: more than can all be looked at
PARTS = 40  # tries at what the bound promises, where too many selections have no regret
_WIDE = 1_000_000  # before a search this wide, where it would not go three quarters of the way, branches are tried
_FAR = 4 / 3
_UNSURE = 4_000_000  # a search this wide is only made where it settles the matter
_NOTHING = -(2**62)  # less than any selection is worth


def exact(problem: Problem) -> Selection:
    """Maximize the value within the capacities.

    With one budget and few states, the list of non-dominated states is complete. Otherwise a bound says which groups
    are settled, and the others are searched, wider and wider until nothing that was left out can be as good. Should
    even the widest search leave something out, the gap says how far from the optimum the answer can be.
    """
    return exact_together([problem])[0]


def exact_together(problems: Sequence[Problem]) -> list[Selection]:
    """The best selection of each; problems that differ in the capacity of one budget share a list of states."""
    listed: dict[tuple[int, int], Complete | None] = {}
    found = []
    for whole in problems:
        distinct = Distinct.of_problem(whole)
        problem = distinct.problem
        if len(problem.capacities) > 1:
            found.append(distinct.whole(searched(problem)))
            continue
        alike = id(problem.values), id(problem.costs)
        if alike not in listed:
            most = max(int(other.capacities[0]) for other in (problem, *problems) if _are_alike(other, problem))
            listed[alike] = list_all(problem, most + int(problem.percents[0]), PLAIN)
        complete = listed[alike]
        found.append(distinct.whole(searched(problem) if complete is None else complete.selection(problem)))
    return found


def _are_alike(one: Problem, other: Problem) -> bool:
    return one.values is other.values and one.costs is other.costs


def searched(problem: Problem) -> Selection:
    """The best selection where a list of all states would be too long; its budgets are not in proportion."""
    bound = Bound.of(problem, relaxed_prices(problem))
    best, gap = _widened(problem, bound, _begin(problem, bound))
    if best.picks is None:
        raise BudgetError("the budgets cannot all be met at once: raise one of them, or add a lower precision")
    return Selection(tuple(best.picks.tolist()), gap, tuple((bound.prices * problem.percents).tolist()))


def _widened(problem: Problem, bound: Bound, best: Incumbent) -> tuple[Incumbent, int]:
    """Search wider and wider, and by branches where that goes too slowly: the best, and how far off it may be."""
    most = None
    for width in _widths(problem, bound, best):
        if best.searched >= min(bound.slack(best.value), bound.everything):
            break
        limit = foreseen(bound, width)
        if bound.ties < TIES and width > _WIDE and limit * (1 if width > _UNSURE else _FAR) < bound.slack(best.value):
            if most is None and len(problem.capacities) > 1:
                best, most = search_branches(problem, bound, best)
            if most == best.value or width > _UNSURE:
                break
        best = search(problem, bound, min(bound.slack(best.value), limit), width, best)
    left_out = best.searched + 1
    above = best.value if left_out > bound.everything else bound.value_above(left_out)
    return best, max(0, (above if most is None else min(above, most)) - best.value)


def _widths(problem: Problem, bound: Bound, best: Incumbent) -> tuple[int, ...]:
    """How wide to search: where too many selections have no regret, at once as wide as makes sense."""
    if bound.ties < TIES:
        return WIDTHS
    is_proven = bound.value_above(0) <= best.value  # then only ties are left to be settled
    return (WIDTHS[2] if len(problem.capacities) == 1 else WIDTHS[0],) if is_proven else WIDTHS[-1:]


def _begin(problem: Problem, bound: Bound) -> Incumbent:
    """A selection near the bound; where many have no regret, one that reaches it if some tries find one."""
    picks = rounded(problem, bound)
    if picks is None:
        return Incumbent(None, _NOTHING)
    best = Incumbent(picks, int(problem.values[range(len(picks)), picks].sum()))
    for seed in range(PARTS if bound.ties >= TIES else 0):
        if bound.value_above(0) <= best.value:
            break
        best = search_part(problem, bound, best, seed)
    return best

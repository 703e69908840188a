"""What one bound cannot settle is split into branches, each with a bound of its own, until none can be better.

There are two ways to split. One fixes a group between whose choices the relaxation is torn to each of them. The other
counts the steps that all choices are above the lowest: at most N of them, or more, where the relaxation is between
(Martello & Toth 1997); it is for gains that rise by the step, which no price of a budget can tell.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.bound import Bound
from bitplan.plan.core import Incumbent, foreseen, search
from bitplan.plan.problem import Integers, Problem
from bitplan.plan.relaxation import relaxed_prices

BRANCHES = 200  # that are searched, at most
WIDTHS = (4_096, 32_768)  # about how many partial selections of each are looked at; more only where that settles it
_GROUPS = 100_000  # of all branches that are searched: of large ones there are fewer
_TRIAL = 16  # branches after which a third of what was hoped for must be settled, or it is not worth going on
TIED = 16  # branches that are searched for the first of equals alone, once none can be better
_FRACTION = 1e-6  # less between two counts of steps is none

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Subproblem:
    """The problem of the groups (O) that are open; all others have their picks (G), which are worth `base`."""

    problem: Problem
    groups: Indices
    picks: Indices
    base: int

    def fixed(self, groups: Indices, picks: Indices) -> Subproblem:
        """The part of it in which some of the open groups have these picks."""
        own, open_ = self.problem, np.delete(np.arange(len(self.groups)), groups)
        all_picks = self.picks.copy()
        all_picks[self.groups[groups]] = picks
        room = own.capacities - own.costs[:, groups, picks].sum(axis=1)
        names = tuple(own.groups[group] for group in open_.tolist())
        rest = Problem(names, own.choices, own.values[open_], own.costs[:, open_], room)
        return Subproblem(rest, self.groups[open_], all_picks, self.base + int(own.values[groups, picks].sum()))

    def counted(self, steps: Sequence[int], most: int) -> Subproblem:
        """The part of it in which choices that count so many steps (C) come to at most so many in all."""
        own = self.problem
        row = np.broadcast_to(np.array(steps), own.values.shape)
        costs, capacities = np.concatenate((own.costs, row[None])), np.append(own.capacities, most)
        return dataclasses.replace(self, problem=dataclasses.replace(own, costs=costs, capacities=capacities))


@dataclass(frozen=True)
class Branch:
    """A part of a problem, its bound, and the most that a selection in it can be worth."""

    part: Subproblem
    bound: Bound
    most: int

    def slack(self, value: int) -> int:
        """The most that regrets here can add up to, for a selection of the whole with at least this value."""
        return self.bound.slack(value - self.part.base)

    def above(self, regret: int) -> Branch:
        """Without the selections that have less than this regret; they were looked at."""
        is_over = regret > self.bound.everything
        most = -(2**62) if is_over else self.bound.value_above(regret) + self.part.base
        return dataclasses.replace(self, most=min(self.most, most))


def search_branches(problem: Problem, bound: Bound, best: Incumbent) -> tuple[Incumbent, int]:
    """Split a problem, and search what is most promising first: the best, and what nothing can be worth more than."""
    every = np.arange(len(problem.groups))
    whole = Branch(Subproblem(problem, every, np.zeros_like(every), 0), bound, bound.value_above(best.searched + 1))
    left, hopes, turn, groups, tied = [(-whole.most, 0, whole)], list[int](), count(1), _GROUPS, TIED
    while left and len(hopes) < BRANCHES and groups > 0 and tied > 0:
        hopes.append(-left[0][0] - best.value)
        if hopes[-1] < 0 or (len(hopes) == _TRIAL and 3 * hopes[-1] > 2 * hopes[1]):
            break
        branch = heapq.heappop(left)[2]
        groups, tied = groups - len(branch.part.groups), tied - (not hopes[-1])
        if len(hopes) > 1:  # the whole was searched before
            best, branch = _searched(problem, branch, best)
        for one in _split(branch, best, by_steps=len(hopes) == 1) if branch.most >= best.value else ():
            heapq.heappush(left, (-one.most, next(turn), one))
    return best, max(best.value, -left[0][0]) if left else best.value


def _searched(problem: Problem, branch: Branch, best: Incumbent) -> tuple[Incumbent, Branch]:
    """Search a branch for what is as good as the best: the better of both, and the branch less what was looked at."""
    part = branch.part
    for width in WIDTHS:
        limit, slack = foreseen(branch.bound, width), branch.slack(best.value)
        if branch.most < best.value or (width > WIDTHS[0] and limit < slack):
            break
        known = Incumbent(None, best.value - part.base)
        ranked = None if len(part.problem.capacities) == len(problem.capacities) else len(problem.capacities)
        found = search(part.problem, branch.bound, min(limit, slack), width, known, ranked=ranked)
        if found.picks is not None:
            picks = part.picks.copy()
            picks[part.groups] = found.picks
            best = max(best, Incumbent(picks, found.value + part.base), key=lambda one: _rank(problem, one))
        branch = branch.above(found.searched + 1)
    return best, branch


def _rank(problem: Problem, one: Incumbent) -> tuple[int, ...]:
    """What is compared: the value, then the lower costs, then the higher precision of the earlier groups."""
    if one.picks is None:
        return (one.value,)
    spent = problem.costs[:, np.arange(len(one.picks)), one.picks].sum(axis=1)
    return one.value, *(-spent).tolist(), *one.picks.tolist()


def _split(branch: Branch, best: Incumbent, *, by_steps: bool) -> list[Branch]:
    """Split by a group or by steps, whichever promises less; only what can be as good as the best is kept."""
    part, regrets, slack = branch.part, branch.bound.regrets, branch.slack(best.value)
    assert len(regrets) > 1, "a single group is searched to the end"
    settled = np.flatnonzero((regrets <= slack).sum(axis=1) == 1)
    if len(settled) < len(regrets) - 1:
        part, regrets = part.fixed(settled, regrets[settled].argmin(axis=1)), np.delete(regrets, settled, axis=0)
    ways = [_by_group(part, branch.bound.prices, regrets, slack)]
    if by_steps:
        ways += _by_steps(part, branch.bound.prices, regrets)
    bounded = [[_bounded(one, branch.bound.prices) for one in way] for way in ways]
    split = [[one for one in way if one is not None and one.most >= best.value] for way in bounded]
    least = min(split, key=lambda way: max((one.most for one in way), default=best.value))
    return [dataclasses.replace(one, most=min(one.most, branch.most)) for one in least]


def _bounded(part: Subproblem, prices: NDArray[np.float64]) -> Branch | None:
    """The part with a bound, by prices that may be near some others; None where a budget alone cannot be met."""
    own = part.problem
    if (own.costs.min(axis=2).sum(axis=1) > own.capacities).any():
        return None
    near = np.append(prices, np.zeros(len(own.capacities) - len(prices)))
    bound = Bound.of(own, relaxed_prices(own, near))
    return Branch(part, bound, bound.value_above(0) + part.base)


def _by_group(part: Subproblem, prices: NDArray[np.float64], regrets: Integers, slack: int) -> list[Subproblem]:
    """Fix the group that has most at stake of those between whose choices the relaxation is torn."""
    second = np.partition(regrets, 1, axis=1)[:, 1]
    torn = np.argsort(second, kind="stable")[: len(prices)]
    at_stake = np.tensordot(prices, np.ptp(part.problem.costs[:, torn], axis=2), axes=1)
    group = torn[[int(np.argmax(at_stake))]]
    viable = np.flatnonzero(regrets[group[0]] <= slack)
    return [part.fixed(group, viable[[turn]]) for turn in range(len(viable))]


def _by_steps(part: Subproblem, prices: NDArray[np.float64], regrets: Integers) -> list[list[Subproblem]]:
    """At most as many steps as the relaxation takes, rounded down, or more; nothing where it takes a whole number."""
    own, every = part.problem, np.arange(len(regrets))
    first = regrets.argmin(axis=1)
    groups, picks = np.nonzero((regrets == 0) & (np.arange(regrets.shape[1]) != first[:, None]))
    room = own.capacities - own.costs[:, every, first].sum(axis=1)
    costs = own.costs[:, groups, picks] - own.costs[:, groups, first[groups]]
    dues = prices[:, None] * costs  # of each choice that is as good; they share what is left of the budgets
    shares = np.linalg.lstsq(dues, prices * room, rcond=None)[0]
    taken = float(first.sum() + shares @ (picks - first[groups]))
    steps, highest = int(np.floor(taken)), regrets.shape[1] - 1
    if min(taken - steps, steps + 1 - taken) < _FRACTION:
        return []
    up, down = range(highest + 1), range(highest, -1, -1)
    return [[part.counted(up, steps), part.counted(down, highest * len(regrets) - steps - 1)]]

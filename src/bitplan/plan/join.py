"""Two halves of a core joined: of all pairs that fit into what is left of the budgets, the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.bound import Bound
from bitplan.plan.halves import Half
from bitplan.plan.problem import Integers
from bitplan.plan.states import Step

_BUCKETS = 16  # the first half by ascending regret: the later ones meet fewer of the second
_AT_ONCE = 1 << 20  # pairs that are looked at together
_PAIRS = 1 << 28  # … and at most
_FEW = 1 << 22  # so few that all are looked at
_MOST = 2**62

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Goal:
    """What pairs must come to: a value of at least `known`, where the settled groups are worth `base` besides.

    Both halves have all regrets up to `limit`, which is also as far as many pairs are looked at. Of pairs with equal
    values the first `ranked` costs are compared.
    """

    bound: Bound
    base: int
    known: int
    limit: int
    ranked: int | None = None

    def slack(self, value: int, pairs: int) -> int:
        """The most that regrets, and what budgets leave over at their prices, may add up to."""
        slack = min(self.bound.slack(value + self.base), _MOST)
        return slack if pairs <= _FEW else min(slack, max(self.limit, 0))


@dataclass(frozen=True)
class Joined:
    """The pairs that are worth the most and, of those, cost the least: indices into both halves."""

    value: int
    costs: tuple[int, ...]
    before: Indices
    after: Indices

    @property
    def rank(self) -> tuple[int, ...]:
        """What is compared: the value, then the costs, by the first budget first."""
        return self.value, *(-cost for cost in self.costs)

    def picks(self, first: Half, second: Half) -> list[int]:
        """The choices of the pair that keeps the higher precision in the earliest group where pairs differ."""
        picks: list[int] = []
        before, after = self.before, self.after
        for step in reversed(first.steps):
            pick, kept, before = _highest(step, before)
            after = after[kept]
            picks.append(pick)
        for step in reversed(second.steps):
            pick, _, after = _highest(step, after)
            picks.append(pick)
        return picks


def _highest(step: Step, states: Indices) -> tuple[int, NDArray[np.bool_], Indices]:
    picks = step.picks[states]
    kept = picks == picks.max()
    return int(picks.max()), kept, step.parents[states[kept]].astype(np.intp)


def join(before: Half, after: Half, room: Integers, goal: Goal) -> tuple[Joined | None, int]:
    """The best pairs worth at least what is known, if there are any, and the regret up to which all were looked at."""
    if not len(before.values) or not len(after.values):
        return None, goal.limit
    if len(room) == 1:
        return _best(before, after, _along_one_budget(before, after, int(room[0])), goal.known, goal), goal.limit
    best, known, looked, every = None, goal.known, 0, len(before.values) * len(after.values)
    by_regret = np.argsort(before.regrets, kind="stable")
    window = _Window.of(after, room, goal)
    for bucket in np.array_split(by_regret, min(_BUCKETS, len(by_regret))):
        for pairs in window.pairs(before, bucket, goal.slack(known, every)):
            found = _best(before, after, pairs, known, goal)
            if found is not None:
                best, known = _better(best, found), found.value
            looked += _AT_ONCE
            if looked > _PAIRS:
                return best, min(goal.limit, int(before.regrets[bucket[0]]) - 1)
    return best, goal.limit


def _along_one_budget(before: Half, after: Half, room: int) -> tuple[Indices, Indices]:
    """For each of the first half the best of the second that fits."""
    second = np.searchsorted(after.costs[0], room - before.costs[0], side="right") - 1
    first = np.flatnonzero(second >= 0)
    return first, second[first]


@dataclass(frozen=True)
class _Window:
    """The second half by ascending cost in one budget: what fits there and leaves little over is a stretch of it."""

    after: Half
    room: Integers
    budget: int
    price: float
    order: Indices

    @classmethod
    def of(cls, after: Half, room: Integers, goal: Goal) -> _Window:
        """Take the budget in which the second half differs most, at its price."""
        prices = goal.bound.prices * 2.0**goal.bound.shift
        budget = int(np.argmax(prices * (after.costs.max(axis=1) - after.costs.min(axis=1))))
        return cls(after, room, budget, float(prices[budget]), np.argsort(after.costs[budget], kind="stable"))

    def pairs(self, before: Half, some: Indices, slack: int) -> Iterator[tuple[Indices, Indices]]:
        """Pairs of some of the first half that fit, leave over and regret no more than the slack; many at once."""
        left = slack - int(before.regrets[some[0]])  # these have the least regret
        if left < 0:
            return
        order = self.order[self.after.regrets[self.order] <= left]
        costs = self.after.costs[self.budget, order]
        most = self.room[self.budget] - before.costs[self.budget, some]
        first, last = np.searchsorted(costs, self._least(most, left)), np.searchsorted(costs, most, side="right")
        counts = np.maximum(last - first, 0)
        ends = np.cumsum(counts)
        for start in range(0, int(ends[-1]), _AT_ONCE):
            flat = np.arange(start, min(start + _AT_ONCE, int(ends[-1])))
            one = np.searchsorted(ends, flat, side="right")
            other = order[first[one] + flat - (ends - counts)[one]]
            one = some[one]
            kept = before.regrets[one] + self.after.regrets[other] <= slack
            one, other = one[kept], other[kept]
            for spent, more, room in zip(before.costs, self.after.costs, self.room.tolist(), strict=True):
                fits = spent[one] + more[other] <= room
                one, other = one[fits], other[fits]
            yield one, other

    def _least(self, most: Integers, left: int) -> NDArray[np.float64]:
        """The least that may be spent: leaving over costs its price. Rounded down by more than floats can be off."""
        if not self.price:
            return np.full(len(most), -np.inf)
        over = (left + len(self.room) + 1) / self.price
        least: NDArray[np.float64] = most - over * (1 + 1e-9) - np.abs(most) * 1e-12 - 1.0
        return least


def _best(before: Half, after: Half, pairs: tuple[Indices, Indices], known: int, goal: Goal) -> Joined | None:
    """Of some pairs that fit, those that are worth the most and cost the least, if that is as much as is known."""
    first, second = pairs
    values = before.values[first] + after.values[second]
    if not len(values) or int(values.max()) < known:
        return None
    value = int(values.max())
    kept = values == value
    first, second, costs = first[kept], second[kept], []
    for spent, more in zip(before.costs[: goal.ranked], after.costs[: goal.ranked], strict=True):
        sums = spent[first] + more[second]
        costs.append(int(sums.min()))
        least = sums == sums.min()
        first, second = first[least], second[least]
    return Joined(value, tuple(costs), first, second)


def _better(best: Joined | None, found: Joined) -> Joined:
    """The better of two sets of pairs, or both where they are as good."""
    if best is None or found.rank > best.rank:
        return found
    if found.rank < best.rank:
        return best
    before, after = np.append(best.before, found.before), np.append(best.after, found.after)
    return Joined(best.value, best.costs, before, after)

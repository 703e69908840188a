"""The core of a problem: the groups whose choice is not settled by the bound, searched as two halves that are joined.

Every selection whose regrets add up to at most a limit keeps, in every group, one of the choices with a regret up to
it. The groups that have several of those, in their order, are split in two; the partial selections of each half are
listed (`halves.py`), and those that fit together are looked at in pairs (`join.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitplan.plan.bound import Bound
from bitplan.plan.halves import list_half
from bitplan.plan.join import Goal, join
from bitplan.plan.problem import Problem

_MOST = 2**62  # a limit, so that sums fit into 64 bits
_ALTERNATIVES = 512  # the smallest regrets, by which the number of partial selections is foreseen
_PARTS = (32, 256)  # groups of a core that is too large to be searched as a whole, in turn
_PART_WIDTH = 16_384  # … for each of which so many partial selections are shared out

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Incumbent:
    """The best selection so far, what it is worth, and how far was searched.

    Every selection whose regrets add up to at most `searched` was looked at, or is no better than one that was; −1 says
    that even some without regret were left out.
    """

    picks: Indices | None
    value: int
    searched: int = -1


def search(
    problem: Problem, bound: Bound, limit: int, width: int, best: Incumbent, *, ranked: int | None = None
) -> Incumbent:
    """Look at all selections whose regrets add up to at most the limit, or to less where lists of `width` are cut.

    Only the first `ranked` costs are to be low where values are equal; the others have to fit, and no more.
    """
    core = np.flatnonzero((bound.regrets <= limit).sum(axis=1) > 1)
    return _search(problem, bound, limit, width, best, bound.regrets.argmin(axis=1), core, ranked)


def search_part(problem: Problem, bound: Bound, best: Incumbent, seed: int) -> Incumbent:
    """Look at what changing some groups of the best selection gives, where too many selections have no regret."""
    assert best.picks is not None, "there is a selection to begin with"
    limit = min(bound.slack(best.value), _MOST)
    core = np.flatnonzero((bound.regrets <= limit).sum(axis=1) > 1)
    size = _PARTS[seed % len(_PARTS)]
    some = np.random.default_rng(seed).choice(core, min(size, len(core)), replace=False)
    found = _search(problem, bound, limit, _PART_WIDTH // size, best, best.picks.copy(), np.sort(some))
    return Incumbent(found.picks, found.value, best.searched)


def _search(
    problem: Problem, bound: Bound, limit: int, width: int, best: Incumbent, picks: Indices, core: Indices,
    ranked: int | None = None,
) -> Incumbent:  # fmt: skip
    settled = np.delete(np.arange(len(picks)), core)
    room = problem.capacities - problem.costs[:, settled, picks[settled]].sum(axis=1)
    base = int(problem.values[settled, picks[settled]].sum())
    middle = _middle(bound.regrets[core], limit)
    after, far = list_half(problem, bound, core[middle:], limit, width, ranked)
    before, searched = list_half(problem, bound, core[:middle], max(far, 0), width, ranked)
    pairs, searched = join(before, after, room, Goal(bound, base, best.value - base, min(far, searched), ranked))
    searched = max(searched, best.searched)
    if pairs is None:
        return Incumbent(best.picks, best.value, searched)
    picks[core] = pairs.picks(before, after)
    return Incumbent(picks, pairs.value + base, searched)


def foreseen(bound: Bound, width: int) -> int:
    """The limit on regrets at which each half has about `width` partial selections; with one budget few of them count.

    In a sum over all selections, each weighted by exp(−coldness · regret), the alternatives are independent of each
    other; the entropy is the logarithm of how many selections matter, and their usual regret is the limit.
    """
    groups, choices = bound.regrets.shape
    selections = math.log(width) * (3 if len(bound.prices) == 1 else 1)
    wanted = math.sqrt(2) * selections  # of half the groups the logarithm is √½ of the whole's
    if groups * math.log(choices) <= wanted:
        return min(bound.everything, _MOST)
    regrets = bound.regrets[bound.regrets > 0]
    wanted -= bound.ties * math.log(2)
    if not len(regrets) or wanted <= 0:
        return 0
    if len(regrets) > _ALTERNATIVES:
        regrets = np.partition(regrets, _ALTERNATIVES)[:_ALTERNATIVES]
    largest = float(regrets.max())
    low, high, usual = 1e-3, 1e15, 0.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        usual, entropy = _thermal(regrets / largest, middle)
        low, high = (middle, high) if entropy > wanted else (low, middle)
    return int(usual * largest)


def _thermal(regrets: NDArray[np.float64], coldness: float) -> tuple[float, float]:
    weights = np.exp(-np.minimum(coldness * regrets, 700.0))
    usual = float((regrets * weights / (1 + weights)).sum())
    return usual, coldness * usual + float(np.log1p(weights).sum())


def _middle(regrets: NDArray[np.int64], limit: int) -> int:
    """Where to split the core, so that both halves have about as many partial selections."""
    if not len(regrets):
        return 0
    freedom = np.log(np.exp(-4.0 * np.minimum(regrets / max(limit, 1), 100.0)).sum(axis=1)).cumsum()
    return int(np.searchsorted(freedom, freedom[-1] / 2)) + 1

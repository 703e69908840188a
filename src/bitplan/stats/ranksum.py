"""The exact rank-sum test with midranks, and the least p that a number of seeds can reach."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from bitplan.core.errors import InputError

MOST = 100  # values per side; the count of all splits then still fits into floating point and memory


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the Wilcoxon rank-sum test: exact, tied values share their mean rank (docs/decisions/0009, 7).

    Every split of the pooled values is counted, not sampled. Two-sided is twice the smaller tail, at most 1, as in
    scipy's permutation test.
    """
    _check(first, second)
    ranks = np.rint(2 * rankdata([*first, *second])).astype(np.int64)  # doubled, since midranks are halves
    observed = int(ranks[: len(first)].sum())
    ways = _ways(ranks, len(first))
    below, above = ways[: observed + 1].sum(), ways[observed:].sum()  # both with the observed sum itself
    return float(min(1.0, 2 * min(below, above) / ways.sum()))


def floor(first: int, second: int) -> float:
    """The least p that so many values on each side can reach: when all of one side lie above all of the other."""
    if first < 1 or second < 1:
        raise InputError(f"a test needs at least one value on each side, got {first} and {second}")
    return min(1.0, 2 / math.comb(first + second, first))


def _ways(ranks: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """How many subsets of `size` ranks have each sum: counts (sum,), added up rank by rank."""
    counts = np.zeros((size + 1, int(ranks.sum()) + 1))  # of subsets of the ranks so far: (members, sum)
    counts[0, 0] = 1
    for rank in ranks:
        with_rank = counts[:-1, : counts.shape[1] - rank].copy()  # or a rank would be taken twice
        counts[1:, rank:] += with_rank
    ways: NDArray[np.float64] = counts[size]
    return ways


def _check(first: Sequence[float], second: Sequence[float]) -> None:
    for values in (first, second):
        if not 1 <= len(values) <= MOST:
            raise InputError(f"the exact rank-sum test takes 1 to {MOST} values on each side, got {len(values)}")
        if not all(math.isfinite(value) for value in values):
            raise InputError("the rank-sum test needs finite values")

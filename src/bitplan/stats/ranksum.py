"""The exact rank-sum test with midranks, within strata where there are some, and the least p that so few can reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.stats.ranks import doubled_ranks
from bitplan.stats.splits import counted_tail, inverted_tail

Strata = tuple[Sequence[float], Sequence[float]]
MOST_IN_STRATUM = 200
MOST = 5000  # values per side; one test of so many takes seconds
_COUNTED = 3_000_000  # additions that counting may take, about two milliseconds
_WHOLE = 2**53  # the most that floating point counts exactly


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the Wilcoxon rank-sum test: exact, tied values share their mean rank (docs/decisions/0009, 7).

    Every split of the pooled values counts, none is sampled (`splits.py`). Two-sided is twice the smaller tail, at most
    1, as in scipy's permutation test.
    """
    _check(first, second)
    ranks = doubled_ranks([*first, *second])
    if np.ptp(ranks) == 0:
        return 1.0
    sides = ranks[: len(first)], ranks[len(first) :]
    side = min(sides, key=lambda side: (len(side), side.sum()))  # which of them is asked about makes no difference
    observed, centre = int(side.sum()), len(ranks) + 1
    if observed > len(side) * centre:  # looked at from the other end
        ranks, observed = 2 * centre - ranks, 2 * centre * len(side) - observed
    lower, upper = _tails(np.sort(ranks).tobytes(), len(side), observed)
    return max(floor(len(first), len(second)), min(1.0, 2 * min(lower, upper)))


def stratified(strata: Sequence[Strata]) -> float:
    """The same for two samples that are each cut into strata: ranks are given within a stratum, and their sums added.

    Every split within every stratum counts (van Elteren's test with equal weights, exact). Values are compared with
    those of their own stratum alone, so that what a stratum has in common is no part of it.
    """
    if len(strata) == 1:
        return rank_sum(*strata[0])
    total, observed = np.ones(1), 0
    for first, second in strata:
        _check(first, second)
        if len(first) + len(second) > MOST_IN_STRATUM:
            raise InputError(
                f"a stratum of the exact test takes {MOST_IN_STRATUM} values at most, got {len(first) + len(second)}"
            )
        ranks = doubled_ranks([*first, *second])
        observed += int(ranks[: len(first)].sum())
        total = np.convolve(total, _shares(ranks, len(first)))
    lower, upper = float(total[: observed + 1].sum()), float(total[observed:].sum())
    counts = [(len(first), len(second)) for first, second in strata]
    return max(stratified_floor(counts), min(1.0, 2 * min(lower, upper)))


def stratified_floor(counts: Sequence[tuple[int, int]]) -> float:
    """The least p that strata with so many values on each side can reach."""
    return min(1.0, 2 * math.prod(floor(*one) / 2 if min(one) else 1.0 for one in counts)) if counts else 1.0


def _shares(ranks: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """The share of the splits that have each sum of ranks."""
    counts = np.zeros((size + 1, int(ranks.sum()) + 1))  # of subsets of the ranks so far: (members, sum)
    counts[0, 0] = 1
    for rank in ranks:
        with_rank = counts[:-1, :-rank].copy()  # or a rank would be taken twice
        counts[1:, rank:] += with_rank
    shares: NDArray[np.float64] = counts[size] / counts[size].sum()
    return shares


def floor(first: int, second: int) -> float:
    """The least p that so many values on each side can reach: when all of one side lie above all of the other."""
    if first < 1 or second < 1:
        raise InputError(f"a test needs at least one value on each side, got {first} and {second}")
    return min(1.0, 2 / math.comb(first + second, first))


@lru_cache(maxsize=4096)
def _tails(sorted_ranks: bytes, size: int, observed: int) -> tuple[float, float]:
    """The shares of splits with at most and at least the observed sum, which is at most the mean."""
    ranks = np.frombuffer(sorted_ranks, np.int64)
    few = len(ranks) * size * observed <= _COUNTED and math.comb(len(ranks), size) < _WHOLE
    tail = (counted_tail if few else inverted_tail)(ranks, size, observed)
    return tail.upto, 1 - tail.upto + tail.equal


def _check(first: Sequence[float], second: Sequence[float]) -> None:
    for values in (first, second):
        if not 1 <= len(values) <= MOST:
            raise InputError(f"the exact rank-sum test takes 1 to {MOST} values on each side, got {len(values)}")
        if not all(math.isfinite(value) for value in values):
            raise InputError("the rank-sum test needs finite values")

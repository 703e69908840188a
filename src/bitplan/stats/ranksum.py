"""The rank-sum test with midranks, also within strata, and the least p that a number of values can reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bitplan.core.errors import InputError
from bitplan.core.records import Gains

Strata = tuple[Sequence[float], Sequence[float]]
MOST_IN_STRATUM = 200
MOST_COUNTED = 60  # values on both sides together


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of the Wilcoxon rank-sum test; tied values share their mean rank.

    Up to 60 values, 30 on each side, the test is exact: every split of the pooled values is counted. For more values it
    is scipy's normal approximation with a correction for ties. Two-sided is twice the smaller tail, at most 1.
    """
    _check(first, second)
    ranks = doubled_ranks([*first, *second])
    if np.ptp(ranks) == 0:
        return 1.0
    if len(ranks) > MOST_COUNTED:
        from scipy.stats import mannwhitneyu  # here, since few studies are so large and it takes half a second to load

        return float(mannwhitneyu(first, second, method="asymptotic").pvalue)
    splits, observed = _count_splits(ranks, len(first)), int(ranks[: len(first)].sum())
    tail = min(float(splits[: observed + 1].sum()), float(splits[observed:].sum()))
    return max(least_p(len(first), len(second)), min(1.0, 2 * (tail / math.comb(len(ranks), len(first)))))


def stratified_rank_sum(strata: Sequence[Strata]) -> float:
    """Return the p of two samples that are each cut into strata: ranks are given within a stratum, their sums added.

    Every split within every stratum counts (van Elteren's test with equal weights, exact). Values are compared with
    those of their own stratum only, so that a difference between strata has no influence.
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
        splits = _count_splits(ranks, len(first))
        total = np.convolve(total, splits / splits.sum())
    lower, upper = float(total[: observed + 1].sum()), float(total[observed:].sum())
    counts = [(len(first), len(second)) for first, second in strata]
    return max(least_stratified_p(counts), min(1.0, 2 * min(lower, upper)))


def is_exact(strata: Sequence[Strata]) -> bool:
    """Return True if `stratified` counts every split of these values, and no normal approximation is used."""
    return len(strata) != 1 or sum(map(len, strata[0])) <= MOST_COUNTED


def name_test(exact: Iterable[bool]) -> str:
    """Return the words for one or more rank-sum tests, by whether each is exact."""
    kinds = set(exact)
    if len(kinds) == 2:
        return f"rank-sum test (exact up to {MOST_COUNTED} scores, a normal approximation beyond)"
    return "rank-sum test (normal approximation)" if False in kinds else "exact rank-sum test"


def least_stratified_p(counts: Sequence[tuple[int, int]]) -> float:
    """Return the least p that strata with so many values on each side can reach."""
    return min(1.0, 2 * math.prod(least_p(*one) / 2 if min(one) else 1.0 for one in counts)) if counts else 1.0


def least_p(first: int, second: int) -> float:
    """Return the least p that so many values on each side can reach: if all of one side are above all of the other."""
    if first < 1 or second < 1:
        raise InputError(f"a test needs at least one value on each side, got {first} and {second}")
    return min(1.0, 2 / math.comb(first + second, first))


def doubled_ranks(values: Sequence[float]) -> NDArray[np.int64]:
    """Return twice the rank of each value, a whole number from 2 on; tied values share their mean rank."""
    _, place, times = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(times)  # the rank of the last among those tied
    ranks: NDArray[np.int64] = (2 * last - times + 1)[place].astype(np.int64)
    return ranks


def _count_splits(ranks: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Return how many of the splits that take `size` ranks have each sum; exact below 2^53."""
    counts = np.zeros((size + 1, int(ranks.sum()) + 1))  # of subsets of the ranks so far: (members, sum)
    counts[0, 0] = 1
    for rank in ranks:
        with_rank = counts[:-1, :-rank].copy()  # or a rank would be taken twice
        counts[1:, rank:] += with_rank
    splits: NDArray[np.float64] = counts[size]
    return splits


def _check(first: Sequence[float], second: Sequence[float]) -> None:
    for values in (first, second):
        if not len(values):
            raise InputError("the rank-sum test needs at least one value on each side, got none")
        if not all(math.isfinite(value) for value in values):
            raise InputError("the rank-sum test needs finite values")


def rank_correlation(first: Gains, second: Gains) -> float | None:
    """Return Spearman's correlation of the gains at the highest choice; None if one method ranks nothing."""
    if set(first.rows) != set(second.rows):
        raise InputError(
            f"the gains of {first.method} and of {second.method} are not for the same groups: "
            f"graphs {first.graph} and {second.graph}"
        )
    ranks = np.stack([doubled_ranks([gains.rows[name][-1] for name in first.rows]) for gains in (first, second)])
    if any(np.ptp(one) == 0 for one in ranks):
        return None
    return float(np.clip(np.atleast_2d(np.corrcoef(ranks))[0, 1], -1, 1))

"""Scores over seeds in a few numbers: mean, deviation, and the area under the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError


def mean(values: Sequence[float]) -> float:
    """The mean; of nothing, NaN."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation with n − 1, or None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Area:
    """The mean score over the budgets, by trapezoids, with the interval that resampled seeds give.

    Only seeds with a score at every budget count; with one there is no interval (None).
    """

    value: float
    low: float | None
    high: float | None
    by_seed: tuple[float, ...]


def area(
    scores: Mapping[str, Mapping[Any, float]], *, resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> Area | None:
    """The area under the frontier of scores {budget: {seed: score}}, divided by the width of the budgets.

    None where fewer than two budgets are there, where they do not measure one thing, or where no seed has them all.
    The interval is the bootstrap's percentiles, which with a handful of seeds is rather too narrow.
    """
    if resamples < 1 or not 0 < level < 1:
        raise InputError(f"an interval needs resamples and a level between 0 and 1, got {resamples} and {level}")
    places = _places(list(scores))
    if places is None:
        return None
    seeds_at = [set(by_seed) for by_seed in scores.values()]
    complete = sorted(set.intersection(*seeds_at))
    if not complete:
        return None
    ordered = sorted(scores, key=lambda budget: places[budget])
    across = np.array([float(places[budget]) for budget in ordered])  # (budgets,)
    heights = np.array([[scores[budget][one] for budget in ordered] for one in complete])  # (seeds, budgets)
    areas = (heights[:, 1:] + heights[:, :-1]) @ np.diff(across) / (2 * (across[-1] - across[0]))  # (seeds,)
    low = high = None
    if len(complete) > 1:
        low, high = interval(areas, resamples, level, seed)
    return Area(float(areas.mean()), low, high, tuple(float(value) for value in areas))


def interval(values: NDArray[np.float64], resamples: int, level: float, seed: int) -> tuple[float, float]:
    """Where the mean of the values lies at this level, when they are drawn again with replacement."""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    means = values[draws].mean(axis=1)  # (resamples,)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _places(budgets: Sequence[str]) -> dict[str, Fraction] | None:
    """Where each budget lies on one common axis, or None where there is none."""
    parsed = [Budget.parse(budget) for budget in budgets]
    places = [budget.place() for budget in parsed]
    axes = {budget.axis for budget in parsed}
    if len(budgets) < 2 or len(set(places)) < len(budgets) or len(axes) > 1:
        return None
    return dict(zip(budgets, places, strict=True))

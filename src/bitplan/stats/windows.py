"""Paired differences of losses between methods on the same windows of a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from bitplan.core.errors import InputError
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.stats.compare import belongs, interval

_DRAWS = 10_000


@dataclass(frozen=True)
class Paired:
    """`difference` is the mean of one loss less the other over `windows`, with the ends of its interval.

    Below 0 the first network is better. `ratio` is that of their perplexities.
    """

    difference: float
    low: float
    high: float
    windows: int
    level: float = 0.95

    @property
    def ratio(self) -> float:
        """Return the first network's perplexity over the second's."""
        return math.exp(min(self.difference, 700.0))

    @property
    def significant(self) -> bool:
        """Return True if 0 is outside the interval."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        doubt = "" if self.significant else ", which may be chance"
        return (
            f"loss {self.difference:+.4f} ({self.level:.0%} interval {self.low:+.4f} to {self.high:+.4f}, "
            f"{self.windows} windows), perplexity × {self.ratio:.4f}{doubt}"
        )


def paired(ours: Sequence[float], theirs: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Paired:
    """Compare losses on the same windows, in the same order, by a bootstrap of their differences (percentiles).

    Windows are drawn as if they were independent; neighbouring ones of a text are not quite, so that intervals are
    rather too narrow.
    """
    if len(ours) != len(theirs):
        raise InputError(f"{len(ours)} windows cannot be paired with {len(theirs)}: score both networks on one task")
    if len(ours) < 2:
        raise InputError(f"{len(ours)} windows say nothing about how sure a difference is: score on more")
    differences = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
    if not np.isfinite(differences).all():
        raise InputError("a window's loss is not a finite number: look at the network that gave it")
    low, high = interval(differences, _DRAWS, level, seed)
    return Paired(float(differences.mean()), low, high, len(differences), level)


@dataclass(frozen=True)
class WindowPair:
    """Two methods at one budget; below 0 the first one's losses are lower, which is better."""

    first: str
    second: str
    budget: str
    paired: Paired

    @property
    def verdict(self) -> str:
        """Return the conclusion in words."""
        if not self.paired.significant:
            return "may be chance"
        return f"{self.first if self.paired.difference < 0 else self.second} is better"


def window_pairs(study: Study, results: Iterable[Result], against: str | None = None) -> tuple[WindowPair, ...]:
    """Compare every two methods (`against`: this one and each other) at each budget with losses of the same windows.

    The losses of several seeds are averaged window by window: windows are drawn, not seeds.
    """
    by_place: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for result in results:
        if result.losses and belongs(study, result.trial) and result.trial.role == "choice":
            place = study.title_of(result.trial), ", ".join(result.trial.budgets)
            by_place.setdefault(place, []).append(result.losses)
    pairs = []
    titles = [method.title for method in study.methods]
    for budget in study.budgets:
        for first, second in combinations(titles, 2):
            one, other = (first, second) if against != second else (second, first)
            ours, theirs = by_place.get((one, budget)), by_place.get((other, budget))
            if ours and theirs and against in (None, one) and len({len(run) for run in (*ours, *theirs)}) == 1:
                found = paired(np.mean(ours, axis=0).tolist(), np.mean(theirs, axis=0).tolist())
                pairs.append(WindowPair(one, other, budget, found))
    return tuple(pairs)

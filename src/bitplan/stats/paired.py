"""Two networks on the same windows: the mean difference of their losses, and how sure its sign is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitplan.core.errors import InputError
from bitplan.stats.summary import interval

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
        """The first network's perplexity over the second's."""
        return math.exp(min(self.difference, 700.0))

    @property
    def significant(self) -> bool:
        """Whether 0 is outside the interval."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        told = "" if self.significant else ", which may be chance"
        return (
            f"loss {self.difference:+.4f} ({self.level:.0%} interval {self.low:+.4f} to {self.high:+.4f}, "
            f"{self.windows} windows), perplexity × {self.ratio:.4f}{told}"
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

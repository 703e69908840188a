"""How certain the entropy of a histogram is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bitplan.core.codes import entropies


@dataclass(frozen=True)
class Interval:
    """What a bootstrap says of an entropy: its standard error and where the middle 95 % lie."""

    error: float
    low: float
    high: float


def bootstrap(counts: ArrayLike, samples: int, seed: int | tuple[int, ...] = 0) -> Interval:
    """Draw the histogram again so many times, as a multinomial of its own frequencies."""
    seen = np.asarray(counts, np.int64)  # (codes,)
    total = int(seen.sum())
    if total == 0:
        return Interval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).multinomial(total, seen / total, size=samples)  # (samples, codes)
    values = entropies(drawn.astype(np.float64))  # (samples,)
    error = float(values.std(ddof=1)) if samples > 1 else 0.0
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(error, float(low), float(high))

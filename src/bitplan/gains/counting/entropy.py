"""The entropy of a histogram, and how certain it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Interval:
    """What a bootstrap says of an entropy: its standard error and where the middle 95 % lie."""

    error: float
    low: float
    high: float


def entropy(counts: ArrayLike) -> float:
    """H = −Σ p·log2 p in bits, with 0·log 0 = 0; without the paper's 1e-10 (decision 6)."""
    return float(_entropies(np.asarray(counts, np.float64)[None])[0])


def bootstrap(counts: ArrayLike, samples: int, seed: int | tuple[int, ...] = 0) -> Interval:
    """Draw the histogram again so many times, as a multinomial of its own frequencies."""
    held = np.asarray(counts, np.int64)
    total = int(held.sum())
    if total == 0:
        return Interval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).multinomial(total, held / total, size=samples)
    values = _entropies(drawn.astype(np.float64))
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(float(values.std(ddof=1)) if samples > 1 else 0.0, float(low), float(high))


def _entropies(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    p = counts / totals
    logs = np.log2(p, out=np.zeros_like(p), where=p > 0)
    bits: NDArray[np.float64] = np.abs((p * logs).sum(axis=1))
    return bits

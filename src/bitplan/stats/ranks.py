"""Ranks of values, by numpy alone: scipy.stats, which has them too, takes longer to load than most tables to make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def doubled_ranks(values: Sequence[float]) -> NDArray[np.int64]:
    """Twice the rank of each value, from 2 on; tied values share their mean rank, a half at most, so all are whole."""
    _, place, times = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(times)  # the rank of the last among those tied
    ranks: NDArray[np.int64] = (2 * last - times + 1)[place].astype(np.int64)
    return ranks

"""How alike two methods rank the groups of a network."""

from __future__ import annotations

import numpy as np

from bitplan.core.errors import InputError
from bitplan.core.records import Gains
from bitplan.stats.ranksum import doubled_ranks


def rank_correlation(first: Gains, second: Gains) -> float | None:
    """Spearman's correlation of the gains at the highest choice; None where one method ranks nothing."""
    if set(first.rows) != set(second.rows):
        raise InputError(
            f"the gains of {first.method} and of {second.method} are not for the same groups: "
            f"graphs {first.graph} and {second.graph}"
        )
    ranks = np.stack([doubled_ranks([gains.rows[name][-1] for name in first.rows]) for gains in (first, second)])
    if any(np.ptp(one) == 0 for one in ranks):
        return None
    return float(np.clip(np.atleast_2d(np.corrcoef(ranks))[0, 1], -1, 1))

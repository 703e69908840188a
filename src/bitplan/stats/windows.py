"""Methods of a study on the same windows of a text: paired differences of losses, for tasks that keep them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.stats.compare import belongs
from bitplan.stats.paired import Paired, paired


@dataclass(frozen=True)
class WindowPair:
    """Two methods at one budget; below 0 the first one's losses are lower, which is better."""

    first: str
    second: str
    budget: str
    paired: Paired

    @property
    def verdict(self) -> str:
        """What may be said of it."""
        if not self.paired.significant:
            return "may be chance"
        return f"{self.first if self.paired.difference < 0 else self.second} is better"


def window_pairs(study: Study, results: Iterable[Result], against: str | None = None) -> tuple[WindowPair, ...]:
    """Every two methods (`against`: this one and each other) at each budget where both kept losses of the same windows.

    The losses of several seeds are averaged window by window: windows are what is drawn, not seeds.
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

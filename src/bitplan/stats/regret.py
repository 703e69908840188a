"""Regret: the distance of each method's score from the best plan that a search found, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bitplan.core.ceilings import Ceiling, Finalist
from bitplan.core.records import Plan
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.stats.compare import ALPHA, NO_PLANS, belongs, deviation, holm, mean
from bitplan.stats.ranksum import Strata, is_exact, stratified_rank_sum

LEVEL = 0.95
Scores = dict[tuple[str, int], float]
"""Start and seed → score on the test split."""


@dataclass(frozen=True)
class Regret:
    """The lead of the best plan over a method's at a budget, in points of the score; below 0 it is worse.

    `error` is the standard error of the mean over `pairs`, trainings of both with the same start and seed, and `low` to
    `high` its 95 % interval by Student's t; None with one pair. They hold for these starts: `by_start` has the mean
    from each. `p` is of the rank-sum test within starts, `exact` or by a normal approximation; `corrected` is over all
    methods at all budgets. `same`: the method chose that very plan from every start.
    """

    title: str
    budget: str
    value: float
    error: float | None
    low: float | None
    high: float | None
    p: float
    corrected: float
    pairs: int
    by_start: tuple[float, ...]
    exact: bool = True
    same: bool = False

    @property
    def words(self) -> str:
        """Return the regret with its error."""
        if self.same:
            return "0, the same plan"
        return f"{self.value:.2f}" if self.error is None else f"{self.value:.2f} ± {self.error:.2f}"

    @property
    def text_with_mark(self) -> str:
        """Return the same, marked if it is significant."""
        return self.words + (" ▲" if not self.same and self.corrected <= ALPHA else "")


def regrets(
    study: Study, results: Iterable[Result], ceilings: Sequence[Ceiling], plans: Mapping[str, Plan] = NO_PLANS
) -> tuple[Regret, ...]:
    """Return the regret of every method at each budget with a ceiling, without those that have no pair of trainings."""
    known = [result for result in results if result.trial.budgets and belongs(study, result.trial)]
    found: list[Regret] = []
    for ceiling in ceilings:
        winner = scores_of(ceiling.finalists[0])
        for method in study.methods:
            own = [one for one in known if study.title_of(one.trial) == method.title]
            own = [one for one in own if one.trial.budgets == (ceiling.search.budget,)]
            same = bool(own) and all(_is_plan(plans.get(one.plan), ceiling) for one in own)
            scores = {(one.trial.start, one.trial.seed): one.score for one in own}
            one = _regret(method.title, ceiling, winner, scores)
            if one is not None:
                found.append(replace(one, same=same))
    tested = [one for one in found if not one.same]
    values = holm([one.p for one in tested]) if tested else ()
    by_place = {(one.title, one.budget): value for one, value in zip(tested, values, strict=True)}
    return tuple(replace(one, corrected=by_place.get((one.title, one.budget), 1.0)) for one in found)


def scores_of(finalist: Finalist) -> Scores:
    """Return start and seed → score of a finalist."""
    return {(one.start, one.seed): one.score for one in finalist.scores}


def _regret(title: str, ceiling: Ceiling, winner: Scores, own: Scores) -> Regret | None:
    both = [key for key in winner if key in own]
    if not both:
        return None
    sign = 1 if ceiling.higher_is_better else -1
    apart = {key: sign * (winner[key] - own[key]) for key in both}
    starts = list(dict.fromkeys(start for start, _ in both))
    strata: list[Strata] = []
    for start in starts:
        strata.append(tuple([scores[key] for key in both if key[0] == start] for scores in (winner, own)))  # type: ignore[arg-type]
    values = list(apart.values())
    value, sd = mean(values), deviation(values)
    error = None if sd is None else sd / math.sqrt(len(values))
    reach = 0.0 if error is None else error * _quantile((1 + LEVEL) / 2, len(values) - 1)
    p = stratified_rank_sum(strata)
    by_start = tuple(mean([apart[key] for key in both if key[0] == start]) for start in starts)
    low, high = (None, None) if error is None else (value - reach, value + reach)
    return Regret(title, ceiling.search.budget, value, error, low, high, p, p, len(values), by_start, is_exact(strata))


def _quantile(share: float, degrees: int) -> float:
    """Return a quantile of Student's t."""
    from scipy.stats import t  # here, since most runs have no ceiling and it takes most of a second to load

    return float(t.ppf(share, degrees))


def _is_plan(plan: Plan | None, ceiling: Ceiling) -> bool:
    """Return True if a plan is the best one."""
    best = ceiling.precisions(ceiling.finalists[0].picks)
    return plan is not None and all(plan.precisions[name] == precision for name, precision in best.items())

"""compare: Study + Results → the scores of each method at each budget, and the significant differences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.core.studies import Method, Study
from bitplan.core.trials import Result, Role, Trial
from bitplan.stats.ranksum import Strata, is_exact, least_stratified_p, stratified_rank_sum
from bitplan.stats.spending import MethodSpend, why_unequal

ALPHA = 0.05
CORRECTION = "Holm's correction"
NO_PLANS: Mapping[str, Plan] = {}
Place = tuple[str, str]
"""The title of a method, and a budget ("" for references)."""
Key = tuple[int | None, int]
"""The seed of a start (None: the study has one), and the seed of a training from there."""


@dataclass(frozen=True)
class Cell:
    """The scores of one method at one budget, by start and ascending seed; `budget` is "" for references.

    `starts` has the seed of each score's start, None if the study has one start. `shared_with` names the methods that
    chose the same precisions at this budget, so that their networks are the same.
    """

    title: str
    budget: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float
    sd: float | None
    shared_with: tuple[str, ...] = ()
    role: Role = "choice"
    starts: tuple[int | None, ...] = ()

    @property
    def by_seed(self) -> dict[Key, float]:
        """Return seed of the start, and seed → score."""
        return dict(zip(zip(self.starts, self.seeds, strict=True), self.scores, strict=True))

    def from_start(self, start: int | None) -> tuple[float, ...]:
        """Return the scores from one start."""
        return tuple(score for own, score in zip(self.starts, self.scores, strict=True) if own == start)

    @property
    def name(self) -> str:
        """Return the name for people: the title of a method, `float`, or "all at w4a4", which no method chose."""
        return f"all at {self.title}" if self.role == "reference" else self.title

    @property
    def spread(self) -> str:
        """Return mean ± standard deviation."""
        return f"{self.mean:.2f}" if self.sd is None else f"{self.mean:.2f} ± {self.sd:.2f}"


@dataclass(frozen=True)
class Comparison:
    """Two methods at one budget: the lead of the first in points of the score, and its significance.

    `difference` is positive if the first is better, whichever way the score goes. `p` cannot be below `floor` with this
    many seeds; `corrected` is p corrected over the budgets of this pair, and cannot be below `corrected_floor`.
    `shared`: both chose the same plan, so there is nothing to tell apart. `unequal` says why their spends are not equal
    if the study limits them: p then means nothing, and is not shown. `exact`: p counts every split of the scores; with
    more than 60 of them it is a normal approximation.
    """

    first: str
    second: str
    budget: str
    difference: float
    p: float
    floor: float
    corrected: float
    corrected_floor: float
    seeds: tuple[int, int]
    shared: bool = False
    unequal: str = ""
    exact: bool = True

    def significant(self, alpha: float = ALPHA, *, corrected: bool = False) -> bool:
        """Return True if p, or the p corrected over the budgets, is at most alpha."""
        return (self.corrected if corrected else self.p) <= alpha

    def better(self, alpha: float = ALPHA, *, corrected: bool = False) -> str | None:
        """Return the method that is significantly better, or None if neither is."""
        if self.shared or self.unequal or not self.significant(alpha, corrected=corrected):
            return None
        return self.first if self.difference > 0 else self.second

    def verdict(self, alpha: float = ALPHA) -> str:
        """Return the conclusion from this difference, in a few words."""
        if self.shared:
            return "the same plan"
        if self.unequal:
            return f"unequal: {self.unequal}"
        if self.floor > alpha:
            return f"cannot be significant: p ≥ {self.floor:.2g} with {self.seeds[0]} and {self.seeds[1]} seeds"
        better = self.better(alpha)
        if better is None:
            return "not significant"
        stands = self.better(alpha, corrected=True) is not None
        return f"{better} is better" + ("" if stands else f", not after {CORRECTION}")


def compare(
    study: Study,
    results: Iterable[Result],
    plans: Mapping[str, Plan] = NO_PLANS,
    *,
    against: str | None = None,
    spends: Mapping[str, MethodSpend] | None = None,
) -> tuple[Comparison, ...]:
    """Compare every two methods of a study (`against`: one of them this one) at every budget where both have scores.

    They come in the study's order. With `spends`, the spend of each method by its title, unequal pairs are marked.
    """
    known = list(results)
    by_place = {(cell.title, cell.budget): cell for cell in cells(study, known, plans)}
    upwards = _higher_is_better(study, known)
    comparisons: list[Comparison] = []
    for first, second in combinations((method.title for method in study.methods), 2):
        if against not in (None, first, second):
            continue
        tests = []
        unequal = "" if spends is None else why_unequal(study, spends.get(first), spends.get(second))
        for budget in study.budgets:
            ours, theirs = by_place.get((first, budget)), by_place.get((second, budget))
            if ours is not None and theirs is not None:
                tests.append(replace(compare_cells(ours, theirs, upwards), unequal=unequal))
        comparisons += correct_over_budgets(tests)
    return tuple(comparisons)


def cells(study: Study, results: Iterable[Result], plans: Mapping[str, Plan] = NO_PLANS) -> tuple[Cell, ...]:
    """Return the scores of each method at each budget, references first, without those that have no score yet.

    With `plans` by id (`RunFolder.plans`), different plans with equal precisions count as shared; without, equal ids.
    """
    by_place = _by_place(study, results)
    places = _in_order(study, by_place)
    chosen = {place: _precisions(by_place[place].values(), plans) for place in places}
    made: list[Cell] = []
    for place in places:
        title, budget = place
        at_budget = [other for other, its_budget in places if its_budget == budget and other != title]
        shared_with = tuple(other for other in at_budget if chosen[other, budget] == chosen[place])
        made.append(cell_of(place, by_place[place], shared_with))
    return tuple(made)


def belongs(study: Study, trial: Trial) -> bool:
    """Return True if a trial is one of the study's, not left over from another recipe, budget or seed."""
    if (trial.task, trial.model, trial.choices) != (study.task, study.model, study.choices):
        return False
    if trial.role == "quantizer":  # compared at plans that were given, not at budgets: `stats/compare.py`
        return False
    if trial.role != "choice":
        return _is_reference(study, trial)
    if trial.start_seed not in (study.start.seeds or (None,)):
        return False
    asked_for = trial.seed in study.seeds and ", ".join(trial.budgets) in study.budgets and trial.cost == study.cost
    return asked_for and any(_is_by(one, study, trial) for one in study.methods)


def _is_by(method: Method, study: Study, trial: Trial) -> bool:
    """Return True if a method chose for a trial, which was trained as the study says, or the method itself."""
    same = (method.name, method.options) == (trial.method, trial.options) and method.title == study.title_of(trial)
    return same and trial.recipe in (study.recipe, method.recipe)


def _is_reference(study: Study, trial: Trial) -> bool:
    """Return True for the float network, and for one at either end of the choices, trained as the study says."""
    if trial.role == "float":
        return study.start.float_recipe in (None, trial.recipe)
    if trial.role != "reference" or trial.precision not in (study.choices[0], study.choices[-1]):
        return False
    started = trial.start_seed in (study.start.seeds or (None,))
    return started and trial.recipe == study.reference_recipe(trial.precision) and trial.seed in study.seeds


def areas(study: Study, found: Iterable[Cell], *, seed: int = 0) -> dict[str, Area]:
    """Return method → area under its frontier over all of the study's budgets, without methods that lack a budget."""
    scores: dict[str, dict[str, dict[Key, float]]] = defaultdict(dict)  # title → budget → start and seed → score
    for cell in found:
        if cell.budget:
            scores[cell.title][cell.budget] = cell.by_seed
    by_title: dict[str, Area] = {}
    for title, by_budget in scores.items():
        if by_budget.keys() == set(study.budgets):
            below = area(by_budget, seed=seed)
            if below is not None:
                by_title[title] = below
    return by_title


def metric_of(study: Study, results: Iterable[Result]) -> str:
    """Return the name of a study's scores: the task's, or "score" if the results have none."""
    metrics = {result.metric for result in results if result.metric and belongs(study, result.trial)}
    return metrics.pop() if len(metrics) == 1 else "score"


def warning(comparisons: Sequence[Comparison], alpha: float = ALPHA) -> str | None:
    """Return a warning if seeds are too few for any difference to be significant, alone or after correction."""
    tests = [comparison for comparison in comparisons if not (comparison.shared or comparison.unequal)]
    if not tests:
        return None
    least = min(test.floor for test in tests)
    corrected = min(test.corrected_floor for test in tests)
    seeds = max(max(test.seeds) for test in tests)
    if least > alpha:
        return f"nothing can be significant here: with {seeds} seeds p cannot be below {least:.2g}; run more seeds"
    if corrected > alpha:
        return f"with {seeds} seeds p cannot be below {corrected:.2g} after {CORRECTION} over the budgets"
    return None


def compare_cells(ours: Cell, theirs: Cell, higher_is_better: bool) -> Comparison:
    """Return the comparison of two cells of one budget, before any correction."""
    counts = len(ours.scores), len(theirs.scores)
    strata = strata_of(ours, theirs)
    return Comparison(
        first=ours.title,
        second=theirs.title,
        budget=ours.budget,
        difference=(ours.mean - theirs.mean) * (1 if higher_is_better else -1),
        p=stratified_rank_sum(strata) if strata else 1.0,
        floor=least_stratified_p([(len(first), len(second)) for first, second in strata]),
        corrected=1.0,
        corrected_floor=1.0,
        seeds=counts,
        shared=theirs.title in ours.shared_with,
        exact=is_exact(strata),
    )


def strata_of(ours: Cell, theirs: Cell) -> list[Strata]:
    """Return the scores of two cells from each start that both have scores from; only these are compared."""
    both = [start for start in dict.fromkeys(ours.starts) if start in theirs.starts]
    return [(ours.from_start(start), theirs.from_start(start)) for start in both]


def correct_over_budgets(tests: Sequence[Comparison]) -> list[Comparison]:
    """Return the tests corrected over all of them."""
    if not tests:
        return []
    lowest = holm_floor([test.floor for test in tests])
    values = holm([test.p for test in tests])
    return [replace(test, corrected=value, corrected_floor=lowest) for test, value in zip(tests, values, strict=True)]


def _by_place(study: Study, results: Iterable[Result]) -> dict[Place, dict[Key, Result]]:
    """Return the study's results of each method at each budget, by seed; refuse two trials that claim one seed."""
    by_place: dict[Place, dict[Key, Result]] = defaultdict(dict)
    for result in results:
        trial = result.trial
        if not belongs(study, trial):
            continue
        title, budget = study.title_of(trial), ", ".join(trial.budgets)
        other = by_place[title, budget].setdefault((trial.start_seed, trial.seed), result).trial
        if other is not trial and other.id != trial.id:
            raise InputError(
                f"two trials claim seed {trial.seed} of {title} at {budget or 'no budget'}: {other.id} and {trial.id}; "
                "they start from different checkpoints or options: remove one from the store"
            )
    return by_place


def _in_order(study: Study, by_place: Mapping[Place, Mapping[Key, Result]]) -> list[Place]:
    """Return the places: references by name, the float network last, then methods and budgets in the study's order."""
    methods = [method.title for method in study.methods]
    roles = {title: next(iter(by_seed.values())).trial.role for (title, _), by_seed in by_place.items()}
    references = sorted(roles.keys() - set(methods), key=lambda title: (roles[title] == "float", title))
    titles, budgets = [*references, *methods], ["", *study.budgets]

    def turn(place: Place) -> tuple[bool, int, int]:
        title, budget = place
        return budget != "", titles.index(title), budgets.index(budget)

    return sorted(by_place, key=turn)


def cell_of(place: Place, by_seed: Mapping[Key, Result], shared_with: tuple[str, ...] = ()) -> Cell:
    """Return the scores of one place as a cell."""
    keys = sorted(by_seed, key=lambda key: (key[0] or 0, key[1]))
    scores = tuple(by_seed[key].score for key in keys)
    seeds, starts = tuple(seed for _, seed in keys), tuple(start for start, _ in keys)
    role = by_seed[keys[0]].trial.role
    return Cell(*place, seeds, scores, mean(scores), deviation(scores), shared_with, role, starts)


def _precisions(results: Iterable[Result], plans: Mapping[str, Plan]) -> frozenset[object]:
    """Return the choices of a cell's plans: precisions if the plan is known, else its id."""
    chosen: set[object] = set()
    for start, plan in {(result.trial.start_seed, result.plan) for result in results}:
        chosen.add((start, tuple(plans[plan].precisions.items()) if plan in plans else plan))
    return frozenset(chosen)


def _higher_is_better(study: Study, results: Sequence[Result]) -> bool:
    directions = {result.higher_is_better for result in results if belongs(study, result.trial)}
    if len(directions) > 1:
        raise InputError("some results say that a higher score is better, others that a lower one is: not one task")
    return directions != {False}


# The correction of p-values for several tests.


def holm(values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm's corrected p-values: the chance of any false one below α stays below α."""
    count = len(values)
    least_first = sorted(range(count), key=lambda index: values[index])
    adjusted = [0.0] * count
    highest = 0.0
    for done, index in enumerate(least_first):
        corrected = min(1.0, (count - done) * values[index])
        highest = max(highest, corrected)  # a greater p never has a smaller corrected one
        adjusted[index] = highest
    return tuple(adjusted)


def holm_floor(floors: Sequence[float]) -> float:
    """Return the least p that Holm's correction can leave to any of these tests, each with its own floor."""
    if not floors:
        raise InputError("Holm's correction needs at least one test")
    return min(1.0, len(floors) * min(floors))


# Scores over seeds in a few numbers: mean, deviation, and the area under the frontier.


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN for no values."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation with n − 1, or None for fewer than two values."""
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
    """Return the area under the frontier of scores {budget: {seed: score}}, divided by the width of the budgets.

    Return None with fewer than two budgets, with budgets on different axes, or if no seed has them all. The interval is
    the bootstrap's percentiles, which with a handful of seeds is rather too narrow.
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
    """Return the percentiles of the values' mean at this level, when they are drawn again with replacement."""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    means = values[draws].mean(axis=1)  # (resamples,)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _places(budgets: Sequence[str]) -> dict[str, Fraction] | None:
    """Return the place of each budget on one common axis, or None if there is none."""
    parsed = [Budget.parse(budget) for budget in budgets]
    places = [budget.place() for budget in parsed]
    axes = {budget.axis for budget in parsed}
    if len(budgets) < 2 or len(set(places)) < len(budgets) or len(axes) > 1:
        return None
    return dict(zip(budgets, places, strict=True))


# Quantizers at one plan: their scores, and which differences are significant.


def quantizer_cells(study: Study, results: Iterable[Result]) -> tuple[Cell, ...]:
    """Return the scores of every quantizer at every plan, in the study's order; `budget` is the plan."""
    by_place: dict[Place, dict[Key, Result]] = defaultdict(dict)
    for result in results:
        if _belongs(study, result.trial):
            by_place[study.title_of(result.trial), result.trial.at][None, result.trial.seed] = result
    order = [one.title for one in study.quantizers]
    return tuple(cell_of(place, by_place[place]) for place in sorted(by_place, key=lambda place: order.index(place[0])))


def compare_quantizers(study: Study, results: Iterable[Result], against: str) -> tuple[Comparison, ...]:
    """Compare every two quantizers, one of them `against`, at each plan with scores of both; corrected over plans."""
    known = list(results)
    by_place = {(cell.title, cell.budget): cell for cell in quantizer_cells(study, known)}
    upwards = all(result.higher_is_better for result in known)
    plans = list(dict.fromkeys(at for _, at in by_place))
    comparisons: list[Comparison] = []
    for first, second in combinations((one.title for one in study.quantizers), 2):
        if against not in (first, second):
            continue
        both = [(by_place.get((first, at)), by_place.get((second, at))) for at in plans]
        tests = [
            compare_cells(ours, theirs, upwards) for ours, theirs in both if ours is not None and theirs is not None
        ]
        comparisons += correct_over_budgets(tests)
    return tuple(comparisons)


def _belongs(study: Study, trial: Trial) -> bool:
    """Return True if a trial is one of the study's own quantizers at one of its plans, trained as it says.

    A plan of a file is named by its stem and its id; the file is not read here, so any such name is accepted.
    """
    of_file = " " in trial.at
    named = any(one.name == trial.method and (of_file or trial.at in one.at) for one in study.quantizers)
    return trial.role == "quantizer" and named and trial.recipe == study.recipe and trial.seed in study.seeds

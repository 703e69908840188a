"""compare: Study + Results → what each method reached at each budget, and which differences mean anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.core.studies import Study
from bitplan.core.trials import Result, Role, Trial
from bitplan.stats.ranksum import floor, holm, holm_floor, rank_sum
from bitplan.stats.summary import Area, area, deviation, mean

ALPHA = 0.05
NO_PLANS: Mapping[str, Plan] = {}


@dataclass(frozen=True)
class Cell:
    """The scores of one method at one budget, by ascending seed; `budget` is "" for references.

    `shared_with` names the methods that chose the same precisions at this budget, so that their networks are the same.
    """

    title: str
    budget: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    mean: float
    sd: float | None
    shared_with: tuple[str, ...] = ()
    role: Role = "choice"


@dataclass(frozen=True)
class Comparison:
    """Two methods at one budget: how much better the first is (in points of the score), and how sure that is.

    `difference` is positive where the first is better, whichever way the score goes. `p` cannot be below `floor` with
    this many seeds; `holm` is p corrected over the budgets of this pair, and cannot be below `holm_floor`. `shared`:
    both chose the same plan, so there is nothing to tell apart.
    """

    first: str
    second: str
    budget: str
    difference: float
    p: float
    floor: float
    holm: float
    holm_floor: float
    seeds: tuple[int, int]
    shared: bool = False

    def significant(self, alpha: float = ALPHA, *, corrected: bool = False) -> bool:
        """Tell whether p, or the p corrected over the budgets, is at most alpha."""
        return (self.holm if corrected else self.p) <= alpha

    def better(self, alpha: float = ALPHA, *, corrected: bool = False) -> str | None:
        """The method that is significantly better, or None where neither is."""
        if self.shared or not self.significant(alpha, corrected=corrected):
            return None
        return self.first if self.difference > 0 else self.second

    def verdict(self, alpha: float = ALPHA) -> str:
        """What may be said of this difference, in a few words."""
        if self.shared:
            return "the same plan"
        if self.floor > alpha:
            return f"cannot be significant: p ≥ {self.floor:.2g} with {self.seeds[0]} and {self.seeds[1]} seeds"
        better = self.better(alpha)
        if better is None:
            return "not significant"
        return f"{better} is better" + ("" if self.better(alpha, corrected=True) else ", not after Holm's correction")


def compare(study: Study, results: Iterable[Result], plans: Mapping[str, Plan] = NO_PLANS) -> tuple[Comparison, ...]:
    """Every two methods of a study at every budget where both have scores, in the study's order."""
    found = list(results)
    table = {(cell.title, cell.budget): cell for cell in cells(study, found, plans)}
    upwards = _higher_is_better(study, found)
    compared: list[Comparison] = []
    for first, second in combinations((method.title for method in study.methods), 2):
        pairs = [(table.get((first, budget)), table.get((second, budget))) for budget in study.budgets]
        compared += _pair([(ours, theirs) for ours, theirs in pairs if ours and theirs], upwards)
    return tuple(compared)


def cells(study: Study, results: Iterable[Result], plans: Mapping[str, Plan] = NO_PLANS) -> tuple[Cell, ...]:
    """What each method reached at each budget, references first; what has no score yet is not among them.

    `plans` by id (`RunFolder.plans`) tell equal precisions by plans of different methods; without them only equal ids.
    """
    by_cell: dict[tuple[str, str], dict[int, Result]] = defaultdict(dict)
    for result in results:
        if not belongs(study, result.trial):
            continue
        key = study.title_of(result.trial), ", ".join(result.trial.budgets)
        other = by_cell[key].setdefault(result.trial.seed, result)
        if other is not result and other.trial.id != result.trial.id:
            raise InputError(
                f"two trials claim seed {result.trial.seed} of {key[0]} at {key[1] or 'no budget'}: {other.trial.id} "
                f"and {result.trial.id}; they start from different checkpoints or options: remove one from the store"
            )
    order = {title: place for place, title in enumerate(_titles(study, by_cell))}
    budgets = {budget: place for place, budget in enumerate(("", *study.budgets))}
    keys = sorted(by_cell, key=lambda key: (budgets[key[1]] > 0, order[key[0]], budgets[key[1]]))
    chosen = {key: _precisions(by_cell[key].values(), plans) for key in keys}
    return tuple(_cell(key, by_cell[key], [other for other in keys if _same(key, other, chosen)]) for key in keys)


def belongs(study: Study, trial: Trial) -> bool:
    """Tell whether a trial is one of the study's, not left over from another recipe, budget or seed."""
    if (trial.task, trial.model, trial.choices) != (study.task, study.model, study.choices):
        return False
    if trial.role != "choice":
        return _is_reference(study, trial)
    matching = [one for one in study.methods if (one.name, one.options) == (trial.method, trial.options)]
    return (
        any(one.title == study.title_of(trial) and trial.recipe in (study.recipe, one.recipe) for one in matching)
        and trial.seed in study.seeds
        and ", ".join(trial.budgets) in study.budgets
        and trial.cost == study.cost
    )


def _is_reference(study: Study, trial: Trial) -> bool:
    """The float network, or a uniform one at either end of the choices that was trained as the mixed ones were."""
    if trial.role == "float":
        return study.start.float_recipe in (None, trial.recipe)
    if trial.role != "reference" or trial.precision not in (study.choices[0], study.choices[-1]):
        return False
    return trial.recipe == study.recipe and trial.seed in study.seeds


def areas(study: Study, results: Iterable[Result], *, seed: int = 0) -> dict[str, Area]:
    """Method → the area under its frontier over all of the study's budgets; methods that lack a budget are left out."""
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(dict)
    for cell in cells(study, results):
        if cell.budget:
            scores[cell.title][cell.budget] = dict(zip(cell.seeds, cell.scores, strict=True))
    found = {title: area(rows, seed=seed) for title, rows in scores.items() if set(rows) == set(study.budgets)}
    return {title: one for title, one in found.items() if one is not None}


def metric_of(study: Study, results: Iterable[Result]) -> str:
    """What the scores of a study are called: as its task does, or "score" where results do not say."""
    said = {result.metric for result in results if result.metric and belongs(study, result.trial)}
    return said.pop() if len(said) == 1 else "score"


def warning(comparisons: Sequence[Comparison], alpha: float = ALPHA) -> str | None:
    """Say plainly where seeds are too few for any difference to be significant, alone or after Holm's correction."""
    told = [one for one in comparisons if not one.shared]
    if not told:
        return None
    least, corrected = min(one.floor for one in told), min(one.holm_floor for one in told)
    seeds = max(max(one.seeds) for one in told)
    if least > alpha:
        return f"nothing can be significant here: with {seeds} seeds p cannot be below {least:.2g}; run more seeds"
    if corrected > alpha:
        return f"with {seeds} seeds p cannot be below {corrected:.2g} after Holm's correction over the budgets"
    return None


def _pair(pairs: Sequence[tuple[Cell, Cell]], higher_is_better: bool) -> list[Comparison]:
    made = [
        Comparison(
            first=ours.title,
            second=theirs.title,
            budget=ours.budget,
            difference=(ours.mean - theirs.mean) * (1 if higher_is_better else -1),
            p=rank_sum(ours.scores, theirs.scores),
            floor=floor(len(ours.scores), len(theirs.scores)),
            holm=1.0,
            holm_floor=1.0,
            seeds=(len(ours.scores), len(theirs.scores)),
            shared=theirs.title in ours.shared_with,
        )
        for ours, theirs in pairs
    ]
    if not made:
        return []
    lowest = holm_floor([one.floor for one in made])
    corrected = holm([one.p for one in made])
    return [replace(one, holm=value, holm_floor=lowest) for one, value in zip(made, corrected, strict=True)]


def _cell(key: tuple[str, str], by_seed: Mapping[int, Result], same: Sequence[tuple[str, str]]) -> Cell:
    seeds = tuple(sorted(by_seed))
    scores = tuple(by_seed[seed].score for seed in seeds)
    shared_with = tuple(title for title, _ in same)
    role = by_seed[seeds[0]].trial.role
    return Cell(*key, seeds, scores, mean(scores), deviation(scores), shared_with, role)


def _titles(study: Study, found: Mapping[tuple[str, str], Mapping[int, Result]]) -> list[str]:
    """References in the order of their names, the float network last, then the methods as the study has them."""
    methods = [method.title for method in study.methods]
    roles = {title: next(iter(by_seed.values())).trial.role for (title, _), by_seed in found.items()}
    references = sorted(roles.keys() - set(methods), key=lambda title: (roles[title] == "float", title))
    return references + methods


def _precisions(results: Iterable[Result], plans: Mapping[str, Plan]) -> frozenset[object]:
    """What the plans of a cell choose: precisions where the plan is at hand, else its id."""
    ids = {result.plan for result in results}
    return frozenset(tuple(plans[one].precisions.items()) if one in plans else one for one in ids)


def _same(key: tuple[str, str], other: tuple[str, str], chosen: Mapping[tuple[str, str], frozenset[object]]) -> bool:
    return key != other and key[1] == other[1] and chosen[key] == chosen[other]


def _higher_is_better(study: Study, results: Sequence[Result]) -> bool:
    directions = {result.higher_is_better for result in results if belongs(study, result.trial)}
    if len(directions) > 1:
        raise InputError("some results say that a higher score is better, others that a lower one is: not one task")
    return directions != {False}

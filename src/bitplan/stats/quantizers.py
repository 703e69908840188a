"""Quantizers at one plan: what each reached, and which differences mean anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations

from bitplan.core.studies import Study
from bitplan.core.trials import Result, Trial
from bitplan.stats.compare import Cell, Comparison, Key, Place, cell_of, corrected_over_budgets, tested_pair


def quantizer_cells(study: Study, results: Iterable[Result]) -> tuple[Cell, ...]:
    """The scores of every quantizer at every plan, in the study's order; the plan stands where budgets do."""
    by_place: dict[Place, dict[Key, Result]] = defaultdict(dict)
    for result in results:
        if _belongs(study, result.trial):
            by_place[study.title_of(result.trial), result.trial.at][None, result.trial.seed] = result
    order = [one.title for one in study.quantizers]
    return tuple(cell_of(place, by_place[place]) for place in sorted(by_place, key=lambda place: order.index(place[0])))


def compare_quantizers(study: Study, results: Iterable[Result], against: str) -> tuple[Comparison, ...]:
    """Every two quantizers, one of them this one, at each plan where both have scores; corrected over the plans."""
    known = list(results)
    by_place = {(cell.title, cell.budget): cell for cell in quantizer_cells(study, known)}
    upwards = all(result.higher_is_better for result in known)
    plans = list(dict.fromkeys(at for _, at in by_place))
    comparisons: list[Comparison] = []
    for first, second in combinations((one.title for one in study.quantizers), 2):
        if against not in (first, second):
            continue
        both = [(by_place.get((first, at)), by_place.get((second, at))) for at in plans]
        tests = [tested_pair(ours, theirs, upwards) for ours, theirs in both if ours is not None and theirs is not None]
        comparisons += corrected_over_budgets(tests)
    return tuple(comparisons)


def _belongs(study: Study, trial: Trial) -> bool:
    """Whether a trial is one of the study's own quantizers at a plan that it has, trained as it says.

    A plan of a file is called by its stem and its id, which only reading the file tells: it is taken as it is.
    """
    of_file = " " in trial.at
    named = any(one.name == trial.method and (of_file or trial.at in one.at) for one in study.quantizers)
    return trial.role == "quantizer" and named and trial.recipe == study.recipe and trial.seed in study.seeds

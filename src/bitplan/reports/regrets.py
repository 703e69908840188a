"""Regret tables: what each method of a run lacks against the best plan that was found, and what it took to choose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from bitplan.core.ceilings import Ceiling, Finalist
from bitplan.core.errors import InputError
from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.reports.spending import spends_of
from bitplan.stats.compare import ALPHA, CORRECTION, mean
from bitplan.stats.regret import Regret, regrets, scores_of
from bitplan.stats.spending import MethodSpend
from bitplan.store.run_folder import RunFolder


def regret(run: RunFolder) -> Table:
    """A row per method, a column per budget that has a ceiling: regret ± standard error; ▲ where it is significant."""
    ceilings, found = _found(run)
    return regret_table(run.study, ceilings, found)


def regret_table(study: Study, ceilings: Sequence[Ceiling], found: Sequence[Regret]) -> Table:
    """The same of what was worked out already."""
    budgets = [one.search.budget for one in ceilings]
    by_place = {(one.title, one.budget): one for one in found}
    rows: list[tuple[Value, ...]] = []
    for method in study.methods:
        own = [by_place.get((method.title, budget)) for budget in budgets]
        rows.append((method.title, *(None if one is None else one.marked for one in own)))
    title = f"{study.name}: what each method lacks against the best plan found, in points of {ceilings[0].metric}"
    signs = (
        f"± standard error over pairs of trainings; ▲ p ≤ {ALPHA} by the exact rank-sum test after {CORRECTION.words}"
    )
    return Table(title, (Column("method"), *numbers(*budgets)), tuple(rows), (signs, *map(_told, ceilings)))


def regret_values(run: RunFolder) -> Table:
    """The same for programs: a row per method and budget."""
    _, found = _found(run)
    rows: list[tuple[Value, ...]] = []
    for one in found:
        interval = (one.error, one.low, one.high)
        rows.append(
            (one.title, one.budget, one.value, *interval, one.p, one.corrected, one.pairs, str(one.same).lower())
        )
    columns = (
        Column("method"), Column("budget"), *numbers("regret", "error", "low", "high", digits=3),
        *numbers("p", f"p ({CORRECTION.name})", digits=4), *numbers("pairs"), Column("same plan"),
    )  # fmt: skip
    return Table(f"{run.study.name}: regret", columns, tuple(rows))


def _found(run: RunFolder) -> tuple[list[Ceiling], tuple[Regret, ...]]:
    study, ceilings = run.study, run.found_ceilings  # what is no run's folder is refused first
    if not ceilings:
        raise InputError(f"{run.path} has no ceiling yet: `bitplan run ceiling STUDY --run {run.path}` finds one")
    return ceilings, regrets(study, run.results, ceilings, run.plans)


def _told(ceiling: Ceiling) -> str:
    """What was found, and at what expense, in a sentence."""
    best = ceiling.finalists[0]
    reached = [_reached(one) for one in ceiling.finalists]
    others = ", ".join(reached[1:])
    beside = f" (the other finalists {others})" if others else ""
    beside += "" if ceiling.complete else "; the search is not finished, or trainings of finalists failed"
    return (
        f"at {ceiling.search.budget}: the best of {len({one.picks for one in ceiling.judged})} plans by "
        f"{len(ceiling.judged)} trainings ({best.by}) reaches {reached[0]} on the test split{beside}"
    )


def _reached(finalist: Finalist) -> str:
    scores = list(scores_of(finalist).values())
    return f"{mean(scores):.2f}" if scores else "nothing, since all its trainings failed,"


# --- Methods over several runs: what each lacks against the best plan found on every network, and what choosing
# took.

Place = tuple[str, str]
"""What a run is called, and a budget."""
_OF_A_FILE = "table"  # the method whose values are in a file: what it is, only its title tells


def methods(runs: Sequence[RunFolder]) -> Table:
    """A row per method, a column per network and budget: regret ± standard error; then what choosing took in epochs.

    Methods are the same where they have the same name, whatever a study calls them; of one that a study has in several
    forms each is called by its title.
    """
    places, found, spends = _best_of(runs)
    names = list(dict.fromkeys(name for name, _ in found))
    rows: list[tuple[Value, ...]] = []
    for name in names:
        own = [found.get((name, place)) for place in places]
        rows.append((name, *(None if one is None else one.marked for one in own), _range(spends.get(name, []))))
    headings = [f"{called}, {budget}" for called, budget in places]
    columns = (Column("method"), *numbers(*headings), Column("epochs to choose"))
    notes = (
        "regret: points below the best plan that a search by training found, ± standard error over pairs of trainings; "
        f"▲ p ≤ {ALPHA} by rank sums within starts, after {CORRECTION.words} over the methods and budgets of a run",
        "an epoch of training is three passes of every sample; where runs differ, the least and the most",
    )
    return Table("Methods: regret by network and budget, and what choosing took", columns, tuple(rows), notes)


def methods_values(runs: Sequence[RunFolder]) -> Table:
    """The same for programs: a row per method, network and budget."""
    _, found, spends = _best_of(runs)
    rows: list[tuple[Value, ...]] = []
    for (name, (called, budget)), one in found.items():
        epochs = [spend.epochs for spend in spends.get(name, []) if spend.epochs is not None]
        told = (one.value, one.error, one.low, one.high, one.corrected, max(epochs, default=None))
        rows.append((name, called, budget, *told))
    columns = (
        Column("method"), Column("network"), Column("budget"), *numbers("regret", "error", "low", "high", digits=3),
        *numbers(f"p ({CORRECTION.name})", "epochs", digits=4),
    )  # fmt: skip
    return Table("Methods: regret", columns, tuple(rows))


def _best_of(
    runs: Sequence[RunFolder],
) -> tuple[list[Place], dict[tuple[str, Place], Regret], dict[str, list[MethodSpend]]]:
    places: list[Place] = []
    found: dict[tuple[str, Place], Regret] = {}
    spends: dict[str, list[MethodSpend]] = {}
    called = _called([run.study for run in runs])
    for run in runs:
        study, ceilings = run.study, run.found_ceilings
        if not ceilings:
            raise InputError(
                f"{run.path} has no ceiling: `bitplan run ceiling STUDY` finds one; leave it out until then"
            )
        names, told = _names(study), spends_of(run)
        for one in regrets(study, run.results, ceilings, run.plans):
            place = called[study.id], one.budget
            places.append(place)
            found[names[one.title], place] = one
        for title, spend in told.items():
            spends.setdefault(names.get(title, title), []).append(spend)
    return list(dict.fromkeys(places)), found, spends


def _called(studies: Sequence[Study]) -> Mapping[str, str]:
    """By the id of a study, what columns call it: its network, or its own name where others have a budget alike."""
    alike = Counter((study.model, budget) for study in studies for budget in study.budgets)
    return {
        study.id: study.name if any(alike[study.model, budget] > 1 for budget in study.budgets) else study.model
        for study in studies
    }


def _names(study: Study) -> dict[str, str]:
    """The title of a method in its study → what rows call it."""
    times = Counter(method.name for method in study.methods)
    return {
        method.title: method.title if times[method.name] > 1 or method.name == _OF_A_FILE else method.name
        for method in study.methods
    }


def _range(spends: Sequence[MethodSpend]) -> str | None:
    """What one estimate took, in epochs, the least and the most of all runs."""
    epochs = [spend.epochs for spend in spends if spend.epochs is not None]
    if not epochs:
        return None
    shown = list(dict.fromkeys(_short(value) for value in (min(epochs), max(epochs))))
    return " to ".join(shown)


def _short(epochs: float) -> str:
    return "0" if not epochs else f"{epochs:.{max(0, 1 - math.floor(math.log10(epochs)))}f}"

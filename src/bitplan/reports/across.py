"""Methods over several runs: what each lacks against the best plan found on every network, and what choosing took."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from bitplan.core.errors import InputError
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.reports.spending import spends_of
from bitplan.stats.compare import ALPHA
from bitplan.stats.correction import CORRECTION
from bitplan.stats.regret import Regret, regrets
from bitplan.stats.spending import MethodSpend

Place = tuple[str, str]
"""What a run is called, and a budget."""
_OF_A_FILE = "table"  # the method whose values are in a file: what it is, only its title tells


def methods(runs: Sequence[RunFolder]) -> Table:
    """A row per method, a column per network and budget: regret ± standard error; then what choosing took in epochs.

    Methods are the same where they have the same name, whatever a study calls them; of one that a study has in several
    forms each is called by its title.
    """
    places, found, spends = _found(runs)
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
    _, found, spends = _found(runs)
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


def _found(
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

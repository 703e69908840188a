"""Regret tables: the distance of each method from the best plan found, and the spend of choosing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from bitplan.core.ceilings import Ceiling, Finalist
from bitplan.core.errors import InputError
from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, grid, numbers
from bitplan.reports.spending import format_epochs, spends_of
from bitplan.stats.compare import ALPHA, CORRECTION, mean
from bitplan.stats.ranksum import name_test
from bitplan.stats.regret import Regret, regrets, scores_of
from bitplan.stats.spending import MethodSpend
from bitplan.store.run_folder import RunFolder


def regret(run: RunFolder) -> Table:
    """Return regret ± standard error, ▲ if significant: a row per method, a column per budget with a ceiling."""
    return regret_table(run.study, *_find_regrets(run))


def regret_table(study: Study, ceilings: Sequence[Ceiling], regrets_found: Sequence[Regret]) -> Table:
    """Return that table for ceilings and regrets that are known already."""
    texts = {(one.title, one.budget): one.text_with_mark for one in regrets_found}
    title = f"{study.name}: what each method lacks against the best plan found, in points of {ceilings[0].metric}"
    test = name_test(one.exact for one in regrets_found)
    signs = f"± standard error over pairs of trainings; ▲ p ≤ {ALPHA} by the {test} after {CORRECTION}"
    return grid(
        title,
        "method",
        [method.title for method in study.methods],
        [ceiling.search.budget for ceiling in ceilings],
        lambda method, budget: texts.get((method, budget)),
        notes=(signs, *map(_describe_ceiling, ceilings)),
    )


def regret_values(run: RunFolder) -> Table:
    """Return the regrets with their intervals as a row per method and budget."""
    rows = tuple(
        (one.title, one.budget, one.value, one.error, one.low, one.high, one.p, one.corrected, one.pairs,
         str(one.same).lower())
        for one in _find_regrets(run)[1]
    )  # fmt: skip
    columns = (
        Column("method"), Column("budget"), *numbers("regret", "error", "low", "high", digits=3),
        *numbers("p", "p (Holm)", digits=4), *numbers("pairs"), Column("same plan"),
    )  # fmt: skip
    return Table(f"{run.study.name}: regret", columns, rows)


def _find_regrets(run: RunFolder) -> tuple[list[Ceiling], tuple[Regret, ...]]:
    study, ceilings = run.study, run.found_ceilings
    if not ceilings:
        raise InputError(f"{run.path} has no ceiling yet: `bitplan run ceiling STUDY --run {run.path}` finds one")
    return ceilings, regrets(study, run.results, ceilings, run.plans)


def _describe_ceiling(ceiling: Ceiling) -> str:
    """Return a sentence about the best plan found and the trainings that this took."""
    best = ceiling.finalists[0]
    first, *others = [_format_score(finalist) for finalist in ceiling.finalists]
    beside = f" (the other finalists {', '.join(others)})" if others else ""
    beside += "" if ceiling.complete else "; the search is not finished, or trainings of finalists failed"
    return (
        f"at {ceiling.search.budget}: the best of {len({one.picks for one in ceiling.judged})} plans by "
        f"{len(ceiling.judged)} trainings ({best.by}) reaches {first} on the test split{beside}"
    )


def _format_score(finalist: Finalist) -> str:
    scores = list(scores_of(finalist).values())
    return f"{mean(scores):.2f}" if scores else "nothing, since all its trainings failed,"


# Methods over several runs.

Place = tuple[str, str]
"""The name of a run's column, and a budget."""
_TABLE = "table"  # the method whose values are in a file: only its title says which


def methods(runs: Sequence[RunFolder]) -> Table:
    """Return regret ± standard error: a row per method, a column per network and budget; then the epochs to choose.

    Rows are called by the name of the method, or by its title if a study has several forms of it.
    """
    places, by_place, spends = _read_runs(runs)
    rows: list[tuple[Value, ...]] = []
    for name in dict.fromkeys(name for name, _ in by_place):
        cells = [by_place.get((name, place)) for place in places]
        texts = (None if cell is None else cell.text_with_mark for cell in cells)
        rows.append((name, *texts, _format_range(spends.get(name, []))))
    headings = [f"{called}, {budget}" for called, budget in places]
    columns = (Column("method"), *numbers(*headings), Column("epochs to choose"))
    notes = (
        "regret: points below the best plan that a search by training found, ± standard error over pairs of trainings; "
        f"▲ p ≤ {ALPHA} by rank sums within starts, after {CORRECTION} over the methods and budgets of a run",
        "an epoch of training is three passes of every sample; where runs differ, the least and the most",
    )
    return Table("Methods: regret by network and budget, and what choosing took", columns, tuple(rows), notes)


def methods_values(runs: Sequence[RunFolder]) -> Table:
    """Return the same regrets as a row per method, network and budget."""
    _, by_place, spends = _read_runs(runs)
    rows: list[tuple[Value, ...]] = []
    for (name, (called, budget)), one in by_place.items():
        epochs = [spend.epochs for spend in spends.get(name, []) if spend.epochs is not None]
        figures = (one.value, one.error, one.low, one.high, one.corrected, max(epochs, default=None))
        rows.append((name, called, budget, *figures))
    columns = (
        Column("method"), Column("network"), Column("budget"), *numbers("regret", "error", "low", "high", digits=3),
        *numbers("p (Holm)", "epochs", digits=4),
    )  # fmt: skip
    return Table("Methods: regret", columns, tuple(rows))


def _read_runs(
    runs: Sequence[RunFolder],
) -> tuple[list[Place], dict[tuple[str, Place], Regret], dict[str, list[MethodSpend]]]:
    """Return the columns, the regret of each row and column, and the spends of each row."""
    places: list[Place] = []
    by_place: dict[tuple[str, Place], Regret] = {}
    spends: dict[str, list[MethodSpend]] = {}
    columns = _name_columns([run.study for run in runs])
    for run in runs:
        study, ceilings = run.study, run.found_ceilings
        if not ceilings:
            raise InputError(
                f"{run.path} has no ceiling: `bitplan run ceiling STUDY` finds one; leave it out until then"
            )
        names = _name_rows(study)
        for one in regrets(study, run.results, ceilings, run.plans):
            place = columns[study.id], one.budget
            places.append(place)
            by_place[names[one.title], place] = one
        for title, spend in spends_of(run).items():
            spends.setdefault(names.get(title, title), []).append(spend)
    return list(dict.fromkeys(places)), by_place, spends


def _name_columns(studies: Sequence[Study]) -> Mapping[str, str]:
    """Return the id of each study → its network, or its own name if another study has the same network and budget."""
    alike = Counter((study.model, budget) for study in studies for budget in study.budgets)
    return {
        study.id: study.name if any(alike[study.model, budget] > 1 for budget in study.budgets) else study.model
        for study in studies
    }


def _name_rows(study: Study) -> dict[str, str]:
    """Return the title of each method in its study → the name of its row."""
    times = Counter(method.name for method in study.methods)
    return {
        method.title: method.title if times[method.name] > 1 or method.name == _TABLE else method.name
        for method in study.methods
    }


def _format_range(spends: Sequence[MethodSpend]) -> str | None:
    """Return the epochs of one estimate, the least and the most of all runs."""
    epochs = [spend.epochs for spend in spends if spend.epochs is not None]
    if not epochs:
        return None
    return " to ".join(dict.fromkeys(format_epochs(value) for value in (min(epochs), max(epochs))))

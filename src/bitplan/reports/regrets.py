"""Regret tables: what each method of a run lacks against the best plan that was found, and what it took to choose."""

from __future__ import annotations

from collections.abc import Sequence

from bitplan.core.ceilings import Ceiling, Finalist
from bitplan.core.errors import InputError
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.stats.compare import ALPHA
from bitplan.stats.correction import CORRECTION
from bitplan.stats.regret import Regret, regrets, scores_of
from bitplan.stats.summary import mean


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

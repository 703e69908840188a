"""Tables of quantizers that were compared at the same plans."""

from __future__ import annotations

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.runs import RunFolder
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.reports.versus import difference_in_words, legend, seen_from, warnings_of
from bitplan.stats.compare import Cell
from bitplan.stats.quantizers import compare_quantizers, quantizer_cells


def quantizers(run: RunFolder) -> Table:
    """A row per quantizer, a column per plan: mean ± standard deviation over seeds."""
    found = _cells(run)
    by_place = {(cell.title, cell.budget): cell for cell in found}
    plans = list(dict.fromkeys(cell.budget for cell in found))
    titles = list(dict.fromkeys(cell.title for cell in found))
    rows: list[tuple[Value, ...]] = []
    for title in titles:
        cells = [by_place.get((title, at)) for at in plans]
        rows.append((title, *(None if cell is None else cell.spread for cell in cells)))
    upwards = all(result.higher_is_better for result in run.results)
    best: set[tuple[int, int]] = set()
    for column, at in enumerate(plans, start=1):
        means = [by_place[title, at].mean for title in titles if (title, at) in by_place]
        top = (max if upwards else min)(means)
        several = len(means) > 1
        best |= {
            (row, column)
            for row, title in enumerate(titles)
            if several and (title, at) in by_place and by_place[title, at].mean == top
        }
    title = f"{run.study.name}: quantizers at the same plans, {_metric(run)}, mean ± sd over seeds"
    columns = (Column("quantizer"), *numbers(*(f"all at {at}" if " " not in at else at for at in plans)))
    return Table(title, columns, tuple(rows), _left(run), frozenset(best))


def quantizer_scores(run: RunFolder) -> Table:
    """The same for programs: a row per quantizer and plan."""
    rows: list[tuple[Value, ...]] = [
        (cell.title, cell.budget, len(cell.scores), cell.mean, cell.sd) for cell in _cells(run)
    ]
    columns = (Column("quantizer"), Column("plan"), *numbers("seeds"), *numbers("mean", "sd", digits=2))
    return Table(f"{run.study.name}: quantizers at the same plans", columns, tuple(rows))


def quantizers_against(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """One quantizer at a glance: a row per other one, a column per plan."""
    titles = [one.title for one in run.study.quantizers]
    if against not in titles:
        raise UnknownName("quantizer of this run", against, titles)
    seen = seen_from(compare_quantizers(run.study, run.results, against), against)
    plans = list(dict.fromkeys(cell.budget for cell in _cells(run)))
    by_plan: dict[str, dict[str, str]] = {}
    for _, other, difference, test in seen:
        by_plan.setdefault(other, {})[test.budget] = difference_in_words(difference, test, corrected)
    rows = tuple((other, *map(texts.get, plans)) for other, texts in by_plan.items())
    tests = [test for *_, test in seen]
    title = f"{run.study.name}: {against} against the other quantizers, in points of {_metric(run)}"
    notes = (legend(against, tests, corrected, hint=""), *warnings_of(tests))
    return Table(title, (Column("against"), *numbers(*plans)), rows, notes)


def _cells(run: RunFolder) -> tuple[Cell, ...]:
    found = quantizer_cells(run.study, run.results)
    if not run.study.quantizers:
        raise InputError(f"{run.study.name} compares no quantizers: a study lists them as [[quantizers]]")
    if not found:
        raise InputError(f"{run.path} has no finished trial yet: `bitplan run status {run.path}` shows how far it is")
    return found


def _metric(run: RunFolder) -> str:
    said = {result.metric for result in run.results if result.metric}
    return said.pop() if len(said) == 1 else "score"


def _left(run: RunFolder) -> tuple[str, ...]:
    left, failed = run.unfinished, len(run.failures)
    notes = [f"{left} of {left + len(run.results) + failed} trials are not done yet"] if left else []
    return (*notes, *([f"{failed} trials failed"] if failed else []))

"""Which differences between methods mean anything: every test in a list, or one method against the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bitplan.core.errors import UnknownName
from bitplan.core.runs import RunFolder
from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.reports.spending import equal_spend, spends_of
from bitplan.stats.compare import ALPHA, Comparison, compare, metric_of, warning
from bitplan.stats.correction import CORRECTION


def significance(run: RunFolder, against: str | None = None, *, corrected: bool = False) -> Table:
    """One method against every other (None: every two) at each budget: difference, p, and what may be said."""
    _check_method(run, against)
    comparisons = compare(run.study, run.results, run.plans, against=against, spends=spends_of(run))
    title, heading = f"{run.study.name}: exact rank-sum tests", "p"
    if corrected:
        title, heading = f"{title}, corrected over budgets ({CORRECTION.name})", f"p ({CORRECTION.name})"
    rows: list[tuple[Value, ...]] = []
    for first, second, difference, test in seen_from(comparisons, against):
        p, least = (test.corrected, test.corrected_floor) if corrected else (test.p, test.floor)
        given = (None, None) if test.unequal else (p, least)
        rows.append((test.budget, first, second, difference, *given, test.verdict()))
    columns = (
        Column("budget"), Column("method"), Column("against"), *numbers("better by", digits=2),
        *numbers(heading, "least possible p", digits=4), Column("so"),
    )  # fmt: skip
    return Table(title, columns, tuple(rows), (*equal_spend(run.study), *warnings_of(comparisons)))


def versus(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """One method at a glance: a row per other method, a column per budget; p where it can mean anything."""
    _check_method(run, against)
    study, results = run.study, run.results
    seen = seen_from(compare(study, results, run.plans, against=against, spends=spends_of(run)), against)
    by_budget: dict[str, dict[str, str]] = {}  # the other method → budget → text
    for _, other, difference, test in seen:
        by_budget.setdefault(other, {})[test.budget] = difference_in_words(difference, test, corrected)
    rows = tuple((other, *map(texts.get, study.budgets)) for other, texts in by_budget.items())
    comparisons = [test for *_, test in seen]
    notes = (legend(against, comparisons, corrected), *_unequal(comparisons, study), *warnings_of(comparisons))
    title = f"{study.name}: {against} against the others, in points of {metric_of(study, results)}"
    return Table(title, (Column("against"), *numbers(*study.budgets)), rows, notes)


def legend(
    against: str, comparisons: Sequence[Comparison], corrected: bool, *, hint: str = "; --against all lists p"
) -> str:
    """What the signs of `difference_in_words` mean, as far as they occur."""
    told = f"positive: {against} is better"
    if not comparisons:
        return told
    if not any(_can_be_significant(one) for one in comparisons):
        return told + hint
    p = f"p after {CORRECTION.words} over the budgets" if corrected else "p of the exact rank-sum test"
    marks = f"★ significantly, ▽ significantly worse (p ≤ {ALPHA}), twice: also after {CORRECTION.words}"
    return f"{told}; {marks}; then {p}"


def difference_in_words(difference: float, one: Comparison, corrected: bool) -> str:
    """A difference with its mark and p; p is left out where it could not be significant whatever the scores were."""
    if one.shared:
        return "same plan"
    if one.unequal:
        return f"{difference:+.2f} ≠"
    if not _can_be_significant(one):
        return f"{difference:+.2f}"
    sign = "★" if difference > 0 else "▽"
    mark = sign * (one.significant() + one.significant(corrected=True))  # none, one or two of it
    p = one.corrected if corrected else one.p
    return f"{difference:+.2f} {mark:2} {p:.4f}"


def _can_be_significant(one: Comparison) -> bool:
    return one.floor <= ALPHA and not (one.shared or one.unequal)


def _unequal(comparisons: Sequence[Comparison], study: Study) -> tuple[str, ...]:
    """What ≠ means, where it occurs."""
    reasons = list(dict.fromkeys(one.unequal for one in comparisons if one.unequal and not one.shared))
    if not reasons:
        return equal_spend(study)
    return (f"≠: no equals, so that no p is given: {'; '.join(reasons)}", *equal_spend(study))


def warnings_of(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """What must be said of too few seeds, if anything."""
    text = warning(comparisons)
    return () if text is None else (text,)


def _check_method(run: RunFolder, title: str | None) -> None:
    titles = [method.title for method in run.study.methods]
    if title is not None and title not in titles:
        raise UnknownName("method of this run", title, titles)


def seen_from(comparisons: Iterable[Comparison], against: str | None) -> list[tuple[str, str, float, Comparison]]:
    """First method, second, by how much the first is better, and the comparison; `against` always comes first."""
    seen = []
    for test in comparisons:
        if test.second == against:
            seen.append((test.second, test.first, -test.difference, test))
        elif against in (None, test.first):
            seen.append((test.first, test.second, test.difference, test))
    return seen

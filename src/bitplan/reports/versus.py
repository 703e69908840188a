"""Which differences between methods mean anything: every test in a list, or one method against the others."""

from __future__ import annotations

from bitplan.core.errors import UnknownName
from bitplan.core.runs import RunFolder
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.stats.compare import ALPHA, Comparison, compare, metric_of, warning


def significance(run: RunFolder, against: str | None = None, *, corrected: bool = False) -> Table:
    """One method against every other (None: every two) at each budget: difference, p, and what may be said."""
    seen = _seen_from(run, against)
    rows: list[tuple[Value, ...]] = []
    for first, second, difference, one in seen:
        p, least = (one.holm, one.holm_floor) if corrected else (one.p, one.floor)
        rows.append((one.budget, first, second, difference, p, least, one.verdict()))
    columns = (
        Column("budget"), Column("method"), Column("against"), *numbers("better by", digits=2),
        *numbers("p (Holm)" if corrected else "p", "least possible p", digits=4), Column("so"),
    )  # fmt: skip
    told = warning(compare(run.study, run.results, run.plans))
    title = f"{run.study.name}: exact rank-sum tests{', corrected over budgets (Holm)' if corrected else ''}"
    return Table(title, columns, tuple(rows), (told,) if told else ())


def versus(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """One method at a glance: a row per other method, a column per budget; p where it can mean anything."""
    study, seen = run.study, _seen_from(run, against)
    others = list(dict.fromkeys(second for _, second, _, _ in seen))
    cells = {(second, one.budget): _difference(difference, one, corrected) for _, second, difference, one in seen}
    rows = tuple((other, *(cells.get((other, budget)) for budget in study.budgets)) for other in others)
    title = f"{study.name}: {against} against the others, in points of {metric_of(study, run.results)}"
    p = "p after Holm's correction over the budgets" if corrected else "p of the exact rank-sum test"
    legend = f"positive: {against} is better"
    if any(one.floor <= ALPHA and not one.shared for *_, one in seen):
        legend += (
            f"; ★ significantly, ▽ significantly worse (p ≤ {ALPHA}), twice: also after Holm's correction; then {p}"
        )
    elif seen:
        legend += "; --against all lists p"
    told = warning([one for *_, one in seen])
    return Table(title, (Column("against"), *numbers(*study.budgets)), rows, (legend, *([told] if told else [])))


def _difference(difference: float, one: Comparison, corrected: bool) -> str:
    """A difference with its mark and p; p is left out where it could not be significant whatever the scores were."""
    if one.shared:
        return "same plan"
    if one.floor > ALPHA:
        return f"{difference:+.2f}"
    sign = "★" if difference > 0 else "▽"
    mark = sign * (one.significant() + one.significant(corrected=True))
    return f"{difference:+.2f} {mark:2} {one.holm if corrected else one.p:.4f}"


def _seen_from(run: RunFolder, against: str | None) -> list[tuple[str, str, float, Comparison]]:
    """First method, second, by how much the first is better, and the comparison; `against` always comes first."""
    titles = [method.title for method in run.study.methods]
    if against is not None and against not in titles:
        raise UnknownName("method of this run", against, titles)
    found = compare(run.study, run.results, run.plans)
    return [
        (one.second, one.first, -one.difference, one) if one.second == against
        else (one.first, one.second, one.difference, one)
        for one in found
        if against is None or against in (one.first, one.second)
    ]  # fmt: skip

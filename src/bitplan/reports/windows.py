"""Methods on the same windows of a text, as a table and in sentences."""

from __future__ import annotations

from collections.abc import Iterable

from bitplan.core.runs import RunFolder
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.reports.formats import Column, Table, numbers
from bitplan.stats.windows import window_pairs


def windows(run: RunFolder, against: str | None = None) -> Table:
    """One method against every other (None: every two) at each budget: the paired difference of losses."""
    pairs = window_pairs(run.study, run.results, against)
    rows = tuple(
        (one.budget, one.first, one.second, one.paired.difference, one.paired.low, one.paired.high, one.paired.ratio,
         one.paired.windows, one.verdict)
        for one in pairs
    )  # fmt: skip
    columns = (
        Column("budget"), Column("method"), Column("against"),
        *numbers("loss by", "from", "to", "perplexity ×", digits=4), *numbers("windows", digits=0), Column("so"),
    )  # fmt: skip
    title = f"{run.study.name}: on the same windows, 95 % intervals of a bootstrap over them"
    return Table(title, columns, rows, ("negative: the first method's loss is lower, which is better",))


def window_sentences(study: Study | None, results: Iterable[Result]) -> list[str]:
    """The first method against each other, for people."""
    if study is None or not study.methods:
        return []
    return [
        f"On the same {one.paired.windows} windows at {one.budget}, {one.first} against {one.second}: loss "
        f"{one.paired.difference:+.4f} (95 % from {one.paired.low:+.4f} to {one.paired.high:+.4f}); {one.verdict}."
        for one in window_pairs(study, results, study.methods[0].title)
    ]

"""Score against spend: the scores of each method, the cost of choosing, and the data it looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from bitplan.core.studies import Study
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.stats.compare import Cell, cells, metric_of
from bitplan.stats.spending import FACTOR, NOT_SAID, MethodSpend, spends_by_title
from bitplan.store.run_folder import RunFolder


def spends_of(run: RunFolder) -> dict[str, MethodSpend]:
    """Return the spend of each method that has gains, by its title."""
    return spends_by_title(run.study, run.gains | run.bound_gains)


def score_against_spend(run: RunFolder) -> Table:
    """Return a row per method, the cheapest first: the spend of one estimate, how often it is paid, and the scores."""
    study, results = run.study, run.results
    return spend_table(study, spends_of(run), cells(study, results, run.plans), metric_of(study, results))


def spend_table(study: Study, spends: Mapping[str, MethodSpend], scored: Iterable[Cell], metric: str) -> Table:
    """Return that table for spends and scores that were read already."""
    by_place = {(cell.title, cell.budget): cell for cell in scored}
    rows: list[tuple[Value, ...]] = []
    for one in sorted(spends.values(), key=lambda one: (one.passes is None, one.passes or 0.0)):
        reached = [by_place.get((one.title, budget)) for budget in study.budgets]
        scores = [None if cell is None else cell.spread for cell in reached]
        over_all = None if one.epochs is None else one.epochs * one.times
        amounts = (_format_amount(one.epochs, one), _format_amount(over_all, one))
        rows.append((one.title, *amounts, one.paid, one.saw, *scores))
    columns = (
        Column("method"), *numbers("epochs", "over all budgets"), Column("paid"), Column("looked at"),
        *numbers(*study.budgets),
    )  # fmt: skip
    title = f"{study.name}: {metric} against what choosing took, in epochs of training"
    unit = "an epoch is three passes of every training sample: one forward, and one back, which counts 2"
    return Table(title, columns, tuple(rows), (unit, *equal_spend(study)))


def spend_by_budget(run: RunFolder) -> Table:
    """Return scores and spends as a row per method and budget."""
    study = run.study
    by_place = {(cell.title, cell.budget): cell for cell in cells(study, run.results, run.plans)}
    rows: list[tuple[Value, ...]] = []
    for one in spends_of(run).values():
        labels = None if one.labels is None else str(one.labels).lower()
        for budget in study.budgets:
            cell = by_place.get((one.title, budget))
            score = (cell.mean, cell.sd) if cell else (None, None)
            facts = (one.passes, one.epochs, one.times, labels, str(one.tested).lower(), one.trainings, one.seconds)
            rows.append((one.title, budget, *score, *facts))
    columns = (
        Column("method"), Column("budget"), *numbers("mean", "sd", "passes", "epochs", "times paid"), Column("labels"),
        Column("test scores"), *numbers("trainings", "seconds"),
    )  # fmt: skip
    return Table(f"{study.name}: score and spend", columns, tuple(rows))


def seen_notes(run: RunFolder) -> list[str]:
    """Return notes on the methods that looked at labels or test scores to choose, or do not say so."""
    spends = list(spends_of(run).values())
    notes = []
    for words, chosen in (
        ("looked at labels to choose", [one for one in spends if one.labels and not one.tested]),
        ("looked at test scores to choose, so that it is no rival", [one for one in spends if one.tested]),
        ("what it spent is not said", [one for one in spends if one.passes is None]),
    ):
        if chosen:
            notes.append(f"{words}: {', '.join(one.title for one in chosen)}")
    return notes


def equal_spend(study: Study) -> tuple[str, ...]:
    """Return the note on methods compared as equals, if the study limits the spend."""
    if study.spend is None:
        return ()
    return (f"equals: both within the study's spend of {study.spend:g} epochs, or within {FACTOR} times each other",)


def _format_amount(epochs: float | None, one: MethodSpend) -> str:
    if epochs is None:
        return NOT_SAID if one.passes is None else f"{one.passes:,.0f} passes"
    return format_epochs(epochs)


def format_epochs(epochs: float) -> str:
    """Return a number of epochs with two significant digits."""
    return "0" if not epochs else f"{epochs:.{max(0, 1 - math.floor(math.log10(epochs)))}f}"

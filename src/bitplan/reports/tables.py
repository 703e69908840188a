"""The tables of a run by name; here those of scores and of what things take: frontier, costs, compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.runs import RunFolder
from bitplan.costs.totals import total
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.reports.quantizers import quantizer_scores, quantizers
from bitplan.reports.regrets import regret, regret_values
from bitplan.reports.selections import (
    agreement,
    correlations,
    differences,
    distances,
    layers,
    lowered,
    lowered_counts,
    selections,
    trained_plans,
)
from bitplan.reports.spending import score_against_spend, seen_notes, spend_by_budget
from bitplan.stats.compare import Cell, areas, cells, metric_of
from bitplan.stats.summary import Area


def scores(run: RunFolder) -> Table:
    """What each method reached at each budget, a row each."""
    found = _cells(run)
    rows: list[tuple[Value, ...]] = []
    for cell in found:
        shared = " ".join(cell.shared_with)
        rows.append((cell.title, cell.budget or None, len(cell.scores), cell.mean, cell.sd, shared or None))
    columns = (
        Column("method"),
        Column("budget"),
        *numbers("seeds"),
        *numbers("mean", "sd", digits=2),
        Column("shared"),
    )
    return Table(f"{run.study.name}: scores", columns, tuple(rows), _notes(run, found))


def frontier(run: RunFolder) -> Table:
    """A row per method, a column per budget: mean ± standard deviation; then the area under the frontier."""
    study, results, found = run.study, run.results, _cells(run)
    by_place = {(cell.title, cell.budget): cell for cell in found}
    titles = list(dict.fromkeys(cell.title for cell in found))
    areas_of = areas(study, found)
    rows: list[tuple[Value, ...]] = []
    figures: list[tuple[float | None, ...]] = []  # the numbers of each row that compete with those of other rows
    for title in titles:
        reference, area = by_place.get((title, "")), areas_of.get(title)
        at_budgets: list[Cell | None] = [None] * len(study.budgets)  # as for a reference
        if reference is None:
            at_budgets = [by_place.get((title, budget)) for budget in study.budgets]
        rows.append(
            (reference.name if reference else title, _spread(reference), *map(_spread, at_budgets), _interval(area))
        )
        figures.append((None, None, *map(_mean, at_budgets), area.value if area else None))
    columns = (Column("method"), *numbers("no budget", *study.budgets), Column("area (95%)", number=True))
    title = f"{study.name}: {metric_of(study, results)} by {study.cost} budget, mean ± sd over seeds"
    upwards = all(result.higher_is_better for result in results)
    best = _best(figures, max if upwards else min)
    return Table(title, columns, tuple(rows), _notes(run, found), best)


def _best(
    figures: Sequence[Sequence[float | None]], pick: Callable[[Iterable[float]], float]
) -> frozenset[tuple[int, int]]:
    """The (row, column) of the best figure of every column, where there are several to choose from."""
    places: set[tuple[int, int]] = set()
    for column, values in enumerate(zip(*figures, strict=True)):
        known = [value for value in values if value is not None]
        if len(known) < 2:
            continue
        best = pick(known)
        places.update((row, column) for row, value in enumerate(values) if value == best)
    return frozenset(places)


def costs(run: RunFolder) -> Table:
    """What each method took to estimate: seconds, epochs of training data, samples, trainings."""
    rows: list[tuple[Value, ...]] = []
    for title, gains in (run.gains | run.bound_gains).items():
        samples, per_epoch = gains.counts.get("samples", 0), gains.counts.get("samples_per_epoch")
        epochs: float | None = None  # not known where a method does not say how many samples an epoch has
        if per_epoch:
            epochs = samples / per_epoch
        elif not samples:
            epochs = 0.0
        rows.append((title, gains.seconds, epochs, samples, gains.counts.get("trainings", 0)))
    columns = (Column("method"), *numbers("seconds", "epochs", digits=2), *numbers("samples", "trainings"))
    return Table(f"{run.study.name}: what estimating took", columns, tuple(rows))


def compression(run: RunFolder) -> Table:
    """What each plan comes to beside its score: bit operations, size, compression."""
    graph = run.graph
    by_place = {(cell.title, cell.budget): cell for cell in _cells(run)}
    rows: list[tuple[Value, ...]] = []
    for (title, budget), plan in trained_plans(run).items():
        assert graph is not None, "plans have a graph"
        score = _mean(by_place.get((title, budget)))
        figures = total(plan, graph)
        billions, inner_billions, megabytes = figures.bops / 1e9, figures.bops_without_ends / 1e9, figures.bits / 8e6
        rows.append((title, budget or None, score, billions, inner_billions, megabytes, figures.compression))
    columns = (
        Column("method"), Column("budget"), *numbers("score", digits=2), *numbers("GBOPs", "GBOPs without ends", "MB"),
        *numbers("times smaller", digits=2),
    )  # fmt: skip
    return Table(f"{run.study.name}: what the plans save", columns, tuple(rows))


_Make = Callable[[RunFolder], Table]
_MakeWithin = Callable[[RunFolder, Sequence[str]], Table]
# Each by its name: for people, then for programs.
TABLES: dict[str, tuple[_Make, _Make]] = {
    "frontier": (frontier, scores),
    "agreement": (agreement, correlations),
    "costs": (costs, costs),
    "spend": (score_against_spend, spend_by_budget),
    "compression": (compression, compression),
    "quantizers": (quantizers, quantizer_scores),
    "regret": (regret, regret_values),
}
CHOSEN: dict[str, tuple[_MakeWithin, _MakeWithin]] = {
    "layers": (layers, selections),
    "differences": (differences, distances),
    "lowered": (lowered, lowered_counts),
}


def check_name(which: str, others: Iterable[str] = ()) -> None:
    """Refuse a table that there is not; `others` are those of no run."""
    if which not in (*TABLES, *CHOSEN):
        raise UnknownName("table", which, (*TABLES, *CHOSEN, *others))


def make(which: str, run: RunFolder, *, plain: bool, budgets: Sequence[str] = ()) -> Table:
    """A table by name; `plain` has one value per cell, for programs.

    `budgets` may be others than the study's where nothing needs to be trained for them.
    """
    check_name(which)
    if which in CHOSEN:
        chosen_for_people, chosen_for_programs = CHOSEN[which]
        return (chosen_for_programs if plain else chosen_for_people)(run, budgets)
    if budgets:
        raise InputError(
            f"the table {which} is of trained networks, or of no budget: {' and '.join(CHOSEN)} take budgets other "
            "than the study's"
        )
    for_people, for_programs = TABLES[which]
    return (for_programs if plain else for_people)(run)


def _cells(run: RunFolder) -> tuple[Cell, ...]:
    found = cells(run.study, run.results, run.plans)
    if not run.study.methods:
        raise InputError(
            f"{run.study.name} compares quantizers and no methods: `bitplan run tables --which quantizers`"
        )
    if not found:
        raise InputError(f"{run.path} has no finished trial yet: `bitplan run status {run.path}` shows how far it is")
    return found


def _interval(area: Area | None) -> str | None:
    if area is None:
        return None
    if area.low is None or area.high is None:
        return f"{area.value:.2f}"
    return f"{area.value:.2f} ({area.low:.2f} to {area.high:.2f})"


def _spread(cell: Cell | None) -> str | None:
    return None if cell is None else cell.spread


def _mean(cell: Cell | None) -> float | None:
    return None if cell is None else cell.mean


def _notes(run: RunFolder, found: Sequence[Cell]) -> tuple[str, ...]:
    """Which cells are the same networks, what is missing, what failed."""
    notes = [*_shared(found), *seen_notes(run)]
    left, failed = run.unfinished, len(run.failures)
    if left:
        notes.append(f"{left} of {left + len(run.results) + failed} trials are not done yet")
    if failed:
        notes.append(f"{failed} trials failed")
    return tuple(notes)


def _shared(found: Sequence[Cell]) -> list[str]:
    """A note for each set of methods whose networks at a budget are the same."""
    notes = []
    noted: set[tuple[str, frozenset[str]]] = set()
    for cell in found:
        alike = (cell.title, *cell.shared_with)
        key = cell.budget, frozenset(alike)
        if cell.shared_with and cell.budget and key not in noted:
            noted.add(key)
            notes.append(f"at {cell.budget} {', '.join(alike)} chose the same: trained once")
    return notes

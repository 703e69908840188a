"""The tables of a run: its frontier, what methods cost, which layers they choose and how alike, what that saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.records import Plan
from bitplan.core.runs import RunFolder
from bitplan.core.trials import Result
from bitplan.costs.base import add_limited
from bitplan.costs.totals import total
from bitplan.plan.base import select
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.stats.agreement import rank_correlation
from bitplan.stats.compare import Cell, areas, cells, metric_of
from bitplan.stats.summary import Area


def scores(run: RunFolder) -> Table:
    """What each method reached at each budget, a row each."""
    rows = tuple(
        (cell.title, cell.budget or None, len(cell.scores), cell.mean, cell.sd, " ".join(cell.shared_with) or None)
        for cell in _cells(run)
    )
    columns = (
        Column("method"),
        Column("budget"),
        *numbers("seeds"),
        *numbers("mean", "sd", digits=2),
        Column("shared"),
    )
    return Table(f"{run.study.name}: scores", columns, rows, _notes(run))


def frontier(run: RunFolder) -> Table:
    """A row per method, a column per budget: mean ± standard deviation; then the area under the frontier."""
    study, found = run.study, _cells(run)
    table = {(cell.title, cell.budget): cell for cell in found}
    titles = list(dict.fromkeys(cell.title for cell in found))
    spans = areas(study, run.results)
    rows: list[tuple[Value, ...]] = []
    figures: list[list[float | None]] = []
    for title in titles:
        reference, area = table.get((title, "")), spans.get(title)
        by_budget = [None if reference else table.get((title, budget)) for budget in study.budgets]
        rows.append((title, _spread(reference), *map(_spread, by_budget), _interval(area)))
        figures.append([None, None, *(cell.mean if cell else None for cell in by_budget), area.value if area else None])
    columns = (Column("method"), *numbers("no budget", *study.budgets), Column("area (95%)", number=True))
    title = f"{study.name}: {metric_of(study, run.results)} by {study.cost} budget, mean ± sd over seeds"
    upwards = all(result.higher_is_better for result in run.results)
    return Table(title, columns, tuple(rows), _notes(run), _best(figures, max if upwards else min))


def _best(
    figures: Sequence[Sequence[float | None]], pick: Callable[[Iterable[float]], float]
) -> frozenset[tuple[int, int]]:
    """The places of the best figure of every column, where there are several to choose from."""
    found = set()
    for place, column in enumerate(zip(*figures, strict=True)):
        known = [value for value in column if value is not None]
        found |= {(row, place) for row, value in enumerate(column) if len(known) > 1 and value == pick(known)}
    return frozenset(found)


def costs(run: RunFolder) -> Table:
    """What each method took to estimate: seconds, epochs of training data, samples, trainings."""
    rows: list[tuple[Value, ...]] = []
    for title, gains in run.gains.items():
        samples, epoch = gains.counts.get("samples", 0), gains.counts.get("samples_per_epoch")
        epochs = samples / epoch if epoch else None if samples else 0.0
        rows.append((title, gains.seconds, epochs, samples, gains.counts.get("trainings", 0)))
    columns = (Column("method"), *numbers("seconds", "epochs", digits=2), *numbers("samples", "trainings"))
    return Table(f"{run.study.name}: what estimating took", columns, tuple(rows))


def layers(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The precision of every group by every method: one column per method, its budgets in turn."""
    study, chosen = run.study, _chosen(run, budgets)
    within = tuple(budgets) or study.budgets
    groups = [group.name for group in run.graph.selectable] if run.graph else []
    titles = [method.title for method in study.methods]
    rows = tuple(
        (group, *(" ".join(_bits(chosen.get((title, budget)), group) for budget in within) for title in titles))
        for group in groups
    )
    title = f"{study.name}: precision of each group at {', '.join(within)}"
    return Table(title, (Column("group"), *map(Column, titles)), rows)


def selections(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The same, a row per group, method and budget."""
    groups = [group.name for group in run.graph.selectable] if run.graph else []
    rows = tuple(
        (group, title, budget, str(plan.precisions[group]))
        for (title, budget), plan in _chosen(run, budgets).items()
        for group in groups
    )
    return Table(f"{run.study.name}: selections", tuple(map(Column, ("group", "method", "budget", "precision"))), rows)


def agreement(run: RunFolder) -> Table:
    """How alike two methods rank the groups: Spearman's correlation of their gains, a row and a column per method."""
    known = run.gains
    rows = tuple((one, *(rank_correlation(known[one], known[other]) for other in known)) for one in known)
    title = f"{run.study.name}: rank correlation of the gains (Spearman)"
    return Table(title, (Column("method"), *numbers(*known, digits=2)), rows)


def correlations(run: RunFolder) -> Table:
    """The same, a row per two methods."""
    known = run.gains
    rows = tuple((one, other, rank_correlation(known[one], known[other])) for one, other in combinations(known, 2))
    columns = (Column("method"), Column("other"), *numbers("rank correlation"))
    return Table(f"{run.study.name}: agreement of the methods", columns, rows)


def differences(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """On how many groups two methods differ within each budget in turn, a row and a column per method."""
    within, chosen, titles = tuple(budgets) or run.study.budgets, _chosen(run, budgets), list(run.gains)

    def text(one: str, other: str) -> str | None:
        counts = [_apart(chosen, run, one, other, budget) for budget in within]
        return None if one == other else " ".join("–" if count is None else str(count) for count in counts)

    rows = tuple((one, *(text(one, other) for other in titles)) for one in titles)
    of = len(run.graph.selectable) if run.graph else 0
    title = f"{run.study.name}: groups (of {of}) that two methods choose differently at {', '.join(within)}"
    return Table(title, (Column("method"), *(Column(title, number=True) for title in titles)), rows)


def distances(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The same, a row per two methods and a column per budget."""
    within, chosen = tuple(budgets) or run.study.budgets, _chosen(run, budgets)
    rows = tuple(
        (one, other, *(_apart(chosen, run, one, other, budget) for budget in within))
        for one, other in combinations(run.gains, 2)
    )
    columns = (Column("method"), Column("other"), *numbers(*(f"differ at {budget}" for budget in within)))
    return Table(f"{run.study.name}: groups that two methods choose differently", columns, rows)


def compression(run: RunFolder) -> Table:
    """What each plan comes to beside its score: bit operations, size, compression."""
    graph = run.graph
    reached = {(cell.title, cell.budget): cell for cell in _cells(run)}
    rows: list[tuple[Value, ...]] = []
    for (title, budget), plan in _plans(run).items():
        assert graph is not None, "plans have a graph"
        figures, cell = total(plan, graph), reached.get((title, budget))
        rows.append(
            (title, budget or None, cell.mean if cell else None, figures.bops / 1e9, figures.bops_without_ends / 1e9,
             figures.bits / 8e6, figures.compression)
        )  # fmt: skip
    columns = (
        Column("method"), Column("budget"), *numbers("score", digits=2), *numbers("GBOPs", "GBOPs without ends", "MB"),
        *numbers("times smaller", digits=2),
    )  # fmt: skip
    return Table(f"{run.study.name}: what the plans save", columns, tuple(rows))


TABLES: dict[str, tuple[Callable[[RunFolder], Table], Callable[[RunFolder], Table]]] = {
    "frontier": (frontier, scores),
    "agreement": (agreement, correlations),
    "costs": (costs, costs),
    "compression": (compression, compression),
}
_Chosen = Callable[[RunFolder, Sequence[str]], Table]
CHOSEN: dict[str, tuple[_Chosen, _Chosen]] = {
    "layers": (layers, selections),
    "differences": (differences, distances),
}


def make(which: str, run: RunFolder, *, plain: bool, budgets: Sequence[str] = ()) -> Table:
    """A table by name; `plain` has one value per cell, for programs.

    `budgets` may be others than the study's where nothing needs to be trained for them.
    """
    if which in CHOSEN:
        return CHOSEN[which][plain](run, budgets)
    if which not in TABLES:
        raise UnknownName("table", which, (*TABLES, *CHOSEN))
    if budgets:
        raise InputError(
            f"the table {which} is of trained networks, or of no budget: {' and '.join(CHOSEN)} take budgets other "
            "than the study's"
        )
    return TABLES[which][plain](run)


def _cells(run: RunFolder) -> tuple[Cell, ...]:
    found = cells(run.study, run.results, run.plans)
    if not found:
        raise InputError(f"{run.path} has no finished trial yet: `bitplan status {run.path}` shows how far it is")
    return found


def _interval(area: Area | None) -> str | None:
    if area is None or area.low is None or area.high is None:
        return None if area is None else f"{area.value:.2f}"
    return f"{area.value:.2f} ({area.low:.2f} to {area.high:.2f})"


def _spread(cell: Cell | None) -> str | None:
    if cell is None or cell.sd is None:
        return None if cell is None else f"{cell.mean:.2f}"
    return f"{cell.mean:.2f} ± {cell.sd:.2f}"


def _plans(run: RunFolder) -> dict[tuple[str, str], Plan]:
    """The plan of each method at each budget, references included; the float network has none."""
    study, plans = run.study, run.plans
    titles = [method.title for method in study.methods]
    wanted: list[Result] = [one for one in run.results if one.plan in plans and one.training]
    wanted.sort(key=lambda one: titles.index(title) if (title := study.title_of(one.trial)) in titles else -1)
    return {(study.title_of(one.trial), ", ".join(one.trial.budgets)): plans[one.plan] for one in wanted}


def _chosen(run: RunFolder, budgets: Sequence[str]) -> dict[tuple[str, str], Plan]:
    """The same within any budgets, chosen here from the gains; without budgets, what the trials were trained with."""
    if not budgets:
        return _plans(run)
    graph, own, gains = run.graph, run.costs, run.gains
    if graph is None or own is None:
        return {}
    costs = add_limited([own], [Budget.parse(budget) for budget in budgets], graph, own.choices)
    return {
        (method.title, budget): select(graph, gains[method.title], costs, budget=budget, selector=method.selector)
        for method in run.study.methods
        if method.title in gains
        for budget in budgets
    }


def _apart(chosen: Mapping[tuple[str, str], Plan], run: RunFolder, one: str, other: str, budget: str) -> int | None:
    """How many groups two methods choose differently within a budget; None where one has no plan yet."""
    first, second, graph = chosen.get((one, budget)), chosen.get((other, budget)), run.graph
    if first is None or second is None or graph is None:
        return None
    return sum(first.precisions[group.name] != second.precisions[group.name] for group in graph.selectable)


def _bits(plan: Plan | None, group: str) -> str:
    if plan is None:
        return "–"
    precision = plan.precisions[group]
    alike = precision.weight_bits == precision.act_bits
    return str(precision.weight_bits) if alike else str(precision)


def _notes(run: RunFolder) -> tuple[str, ...]:
    """Which cells are the same networks, what is missing, what failed."""
    notes = []
    told: set[frozenset[str]] = set()
    for cell in _cells(run):
        alike = frozenset((cell.title, *cell.shared_with, cell.budget))
        if cell.shared_with and alike not in told and cell.budget:
            told.add(alike)
            notes.append(f"at {cell.budget} {', '.join((cell.title, *cell.shared_with))} chose the same: trained once")
    agenda, failed = run.agenda, len(run.failures)
    if agenda is not None:
        left = len(agenda.trials) - len(run.results) - failed
        notes += [f"{left} of {len(agenda.trials)} trials are not done yet"] if left > 0 else []
    return (*notes, *([f"{failed} trials failed"] if failed else []))

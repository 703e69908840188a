"""Which precisions the methods choose, and how alike they are: tables for which nothing needs to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from bitplan.core.budget import Budget
from bitplan.core.records import Plan
from bitplan.core.runs import RunFolder
from bitplan.costs.base import add_limited
from bitplan.reports.formats import Column, Table, Value, numbers
from bitplan.selection.base import select_each
from bitplan.stats.agreement import rank_correlation
from bitplan.stats.compare import Place

Plans = Mapping[Place, Plan]


def layers(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The precision of every group by every method: one column per method, its budgets in turn."""
    study, chosen = run.study, _chosen(run, budgets)
    within = tuple(budgets) or study.budgets
    titles = [method.title for method in study.methods]
    rows: list[tuple[Value, ...]] = []
    for group in _groups(run):
        row: list[Value] = [group]
        for title in titles:
            plans = [chosen.get((title, budget)) for budget in within]
            row.append(" ".join(_bits(plan, group) for plan in plans))
        rows.append(tuple(row))
    title = f"{study.name}: precision of each group at {', '.join(within)}"
    return Table(title, (Column("group"), *map(Column, titles)), tuple(rows))


def selections(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The same, a row per group, method and budget."""
    groups = _groups(run)
    rows: list[tuple[Value, ...]] = []
    for (title, budget), plan in _chosen(run, budgets).items():
        rows += [(group, title, budget, str(plan.precisions[group])) for group in groups]
    columns = tuple(map(Column, ("group", "method", "budget", "precision")))
    return Table(f"{run.study.name}: selections", columns, tuple(rows))


def agreement(run: RunFolder) -> Table:
    """How alike two methods rank the groups: Spearman's correlation of their gains, a row and a column per method."""
    by_title = run.gains
    rows: list[tuple[Value, ...]] = []
    for title, gains in by_title.items():
        rows.append((title, *(rank_correlation(gains, other) for other in by_title.values())))
    columns = (Column("method"), *numbers(*by_title, digits=2))
    return Table(f"{run.study.name}: rank correlation of the gains (Spearman)", columns, tuple(rows))


def correlations(run: RunFolder) -> Table:
    """The same, a row per two methods."""
    by_title = run.gains
    rows: list[tuple[Value, ...]] = []
    for first, second in combinations(by_title, 2):
        rows.append((first, second, rank_correlation(by_title[first], by_title[second])))
    columns = (Column("method"), Column("other"), *numbers("rank correlation"))
    return Table(f"{run.study.name}: agreement of the methods", columns, tuple(rows))


def differences(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """On how many groups two methods differ within each budget in turn, a row and a column per method."""
    within, titles = tuple(budgets) or run.study.budgets, list(run.gains)
    chosen, groups = _chosen(run, budgets), _groups(run)
    rows: list[tuple[Value, ...]] = []
    for title in titles:
        row: list[Value] = [title]
        for other in titles:
            if other == title:
                row.append(None)
                continue
            counts = _apart(chosen, (title, other), within, groups)
            row.append(" ".join("–" if count is None else str(count) for count in counts))
        rows.append(tuple(row))
    about = f"groups (of {len(groups)}) that two methods choose differently at {', '.join(within)}"
    return Table(f"{run.study.name}: {about}", (Column("method"), *numbers(*titles)), tuple(rows))


def distances(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The same, a row per two methods and a column per budget."""
    within, chosen, groups = tuple(budgets) or run.study.budgets, _chosen(run, budgets), _groups(run)
    rows: list[tuple[Value, ...]] = []
    for pair in combinations(run.gains, 2):
        rows.append((*pair, *_apart(chosen, pair, within, groups)))
    columns = (Column("method"), Column("other"), *numbers(*(f"differ at {budget}" for budget in within)))
    return Table(f"{run.study.name}: groups that two methods choose differently", columns, tuple(rows))


def lowered(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """How many groups each method lowers below the highest choice within each budget (the paper's appendix D).

    In brackets how many layers that is: linked ones are lowered together.
    """
    within, counts = tuple(budgets) or run.study.budgets, _lowered(run, budgets)
    rows: list[tuple[Value, ...]] = []
    for method in run.study.methods:
        found = [counts.get((method.title, budget)) for budget in within]
        rows.append((method.title, *(None if each is None else f"{each[0]} ({each[1]})" for each in found)))
    graph = run.graph
    groups = graph.selectable if graph else ()
    about = (
        f"groups (layers) below {run.study.choices[-1]}, of {len(groups)} ({sum(len(one.layers) for one in groups)})"
    )
    return Table(f"{run.study.name}: {about}", (Column("method"), *numbers(*within)), tuple(rows))


def lowered_counts(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """The same, a row per method and budget."""
    rows: list[tuple[Value, ...]] = []
    for (title, budget), (groups, layers_below) in _lowered(run, budgets).items():
        rows.append((title, budget, groups, layers_below))
    columns = (Column("method"), Column("budget"), *numbers("groups lowered", "layers lowered"))
    return Table(f"{run.study.name}: how much is lowered", columns, tuple(rows))


def trained_plans(run: RunFolder) -> Plans:
    """The plan of each method at each budget, those of references first; the float network has none."""
    study, plans = run.study, run.plans
    turns = {method.title: turn for turn, method in enumerate(study.methods)}
    first = (None, study.start.seed)  # of several starts the first stands for the method
    done = [result for result in run.results if result.trial.role != "quantizer"]  # whose plan was given
    done = [result for result in done if result.trial.start_seed in first]
    planned = [result for result in done if result.plan in plans and result.training]
    planned.sort(key=lambda result: turns.get(study.title_of(result.trial), -1))
    by_place: dict[Place, Plan] = {}
    for result in planned:
        place = study.title_of(result.trial), ", ".join(result.trial.budgets)
        by_place[place] = plans[result.plan]
    return by_place


def _chosen(run: RunFolder, budgets: Sequence[str]) -> Plans:
    """Plans within any budgets, chosen here from the gains; without budgets, those that the trials were trained by."""
    if not budgets:
        return trained_plans(run)
    graph, own_cost, gains = run.graph, run.costs, run.gains
    if graph is None or own_cost is None:
        return {}
    costs = add_limited([own_cost], [Budget.parse(budget) for budget in budgets], graph, own_cost.choices)
    chosen: dict[Place, Plan] = {}
    for method in run.study.methods:
        own = gains.get(method.title)
        if own is None:
            continue
        plans = select_each(graph, own, costs, budgets=budgets, selector=method.selector)
        chosen |= {(method.title, budget): plan for budget, plan in zip(budgets, plans, strict=True)}
    return chosen


def _lowered(run: RunFolder, budgets: Sequence[str]) -> dict[Place, tuple[int, int]]:
    """How many groups, and layers, each plan of a method has below the highest choice."""
    graph, highest = run.graph, run.study.choices[-1]
    titles = {method.title for method in run.study.methods}
    counts: dict[Place, tuple[int, int]] = {}
    for (title, budget), plan in _chosen(run, budgets).items():
        if title in titles and graph is not None:
            below = [group for group in graph.selectable if plan.precisions[group.name] != highest]
            counts[title, budget] = len(below), sum(len(group.layers) for group in below)
    return counts


def _groups(run: RunFolder) -> list[str]:
    """The groups that there is a choice for, in order of execution."""
    graph = run.graph
    return [group.name for group in graph.selectable] if graph else []


def _apart(plans: Plans, titles: tuple[str, str], budgets: Sequence[str], groups: Sequence[str]) -> list[int | None]:
    """How many groups two methods choose differently within each budget; None where one has no plan yet."""
    counts: list[int | None] = []
    for budget in budgets:
        first, second = (plans.get((title, budget)) for title in titles)
        if first is None or second is None:
            counts.append(None)
        else:
            counts.append(sum(first.precisions[group] != second.precisions[group] for group in groups))
    return counts


def _bits(plan: Plan | None, group: str) -> str:
    if plan is None:
        return "–"
    precision = plan.precisions[group]
    alike = precision.weight_bits == precision.act_bits
    return str(precision.weight_bits) if alike else str(precision)

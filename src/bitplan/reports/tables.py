"""The tables of a run by name; tables of regret and of spend are in the files beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from bitplan.core.budget import Budget
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.records import Plan
from bitplan.core.studies import Study
from bitplan.core.trials import Result
from bitplan.costs.base import add_limited
from bitplan.costs.standard import total
from bitplan.reports.formats import Column, Table, Value, grid, numbers
from bitplan.reports.regrets import regret, regret_values
from bitplan.reports.spending import equal_spend, score_against_spend, seen_notes, spend_by_budget, spends_of
from bitplan.selection.base import select_each
from bitplan.stats.compare import (
    ALPHA,
    CORRECTION,
    Area,
    Cell,
    Comparison,
    Place,
    areas,
    cells,
    compare,
    compare_quantizers,
    metric_of,
    quantizer_cells,
    warning,
)
from bitplan.stats.ranksum import name_test, rank_correlation
from bitplan.stats.windows import window_pairs
from bitplan.store.run_folder import RunFolder

# Plans of the methods: nothing needs to be trained for these tables.

Plans = Mapping[Place, Plan]


def layers(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return the precision of every group: a column per method, its budgets side by side."""
    study, plans = run.study, _select_plans(run, budgets)
    within = tuple(budgets) or study.budgets
    titles = [method.title for method in study.methods]

    def list_bits(group: str, title: str) -> str:
        return " ".join(_format_bits(plans.get((title, budget)), group) for budget in within)

    rows = tuple((group, *(list_bits(group, title) for title in titles)) for group in _list_groups(run))
    title = f"{study.name}: precision of each group at {', '.join(within)}"
    return Table(title, (Column("group"), *map(Column, titles)), rows)


def selections(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return the precisions as a row per group, method and budget."""
    groups = _list_groups(run)
    rows: list[tuple[Value, ...]] = []
    for (title, budget), plan in _select_plans(run, budgets).items():
        rows += [(group, title, budget, str(plan.precisions[group])) for group in groups]
    columns = tuple(map(Column, ("group", "method", "budget", "precision")))
    return Table(f"{run.study.name}: selections", columns, tuple(rows))


def agreement(run: RunFolder) -> Table:
    """Return Spearman's correlation of the gains of every two methods: a row and a column per method."""
    gains = run.gains
    title = f"{run.study.name}: rank correlation of the gains (Spearman)"
    return grid(
        title, "method", gains, gains, lambda one, other: rank_correlation(gains[one], gains[other]), digits=2
    )  # fmt: skip


def correlations(run: RunFolder) -> Table:
    """Return the same correlations as a row per two methods."""
    gains = run.gains
    rows = tuple((one, other, rank_correlation(gains[one], gains[other])) for one, other in combinations(gains, 2))
    columns = (Column("method"), Column("other"), *numbers("rank correlation"))
    return Table(f"{run.study.name}: agreement of the methods", columns, rows)


def differences(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return the number of groups that two methods choose differently: a row and a column per method."""
    within, plans, groups = tuple(budgets) or run.study.budgets, _select_plans(run, budgets), _list_groups(run)

    def list_counts(title: str, other: str) -> str | None:
        if other == title:
            return None
        counts = _count_differences(plans, (title, other), within, groups)
        return " ".join("–" if count is None else str(count) for count in counts)

    about = f"groups (of {len(groups)}) that two methods choose differently at {', '.join(within)}"
    return grid(f"{run.study.name}: {about}", "method", run.gains, run.gains, list_counts)


def distances(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return the same numbers as a row per two methods and a column per budget."""
    within, plans, groups = tuple(budgets) or run.study.budgets, _select_plans(run, budgets), _list_groups(run)
    pairs = combinations(run.gains, 2)
    rows = tuple((*pair, *_count_differences(plans, pair, within, groups)) for pair in pairs)
    columns = (Column("method"), Column("other"), *numbers(*(f"differ at {budget}" for budget in within)))
    return Table(f"{run.study.name}: groups that two methods choose differently", columns, rows)


def tabulate_lowered(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return how many groups each method lowers below the highest choice within each budget (the paper's appendix D).

    The number of layers is in brackets: linked layers are lowered together.
    """
    within, counts = tuple(budgets) or run.study.budgets, _count_lowered(run, budgets)

    def count(title: str, budget: str) -> str | None:
        groups_and_layers = counts.get((title, budget))
        return "{} ({})".format(*groups_and_layers) if groups_and_layers else None

    graph = run.graph
    groups = graph.selectable if graph else ()
    of_all = f"{len(groups)} ({sum(len(group.layers) for group in groups)})"
    title = f"{run.study.name}: groups (layers) below {run.study.choices[-1]}, of {of_all}"
    return grid(title, "method", [method.title for method in run.study.methods], within, count)


def count_lowered(run: RunFolder, budgets: Sequence[str] = ()) -> Table:
    """Return the same numbers as a row per method and budget."""
    rows = tuple((*place, *counts) for place, counts in _count_lowered(run, budgets).items())
    columns = (Column("method"), Column("budget"), *numbers("groups lowered", "layers lowered"))
    return Table(f"{run.study.name}: how much is lowered", columns, rows)


def trained_plans(run: RunFolder) -> Plans:
    """Return the plan of each method at each budget, those of references first; the float network has none."""
    study, plans = run.study, run.plans
    turns = {method.title: turn for turn, method in enumerate(study.methods)}
    first = (None, study.start.seed)  # with several starts the first stands for the method
    trained = [
        result
        for result in run.results
        if result.trial.role != "quantizer" and result.trial.start_seed in first  # plans of quantizers were given
        if result.plan in plans and result.training
    ]
    trained.sort(key=lambda result: turns.get(study.title_of(result.trial), -1))
    return {
        (study.title_of(result.trial), ", ".join(result.trial.budgets)): plans[result.plan] for result in trained
    }  # fmt: skip


def _select_plans(run: RunFolder, budgets: Sequence[str]) -> Plans:
    """Select plans within any budgets by the gains; without budgets, return those that were trained."""
    if not budgets:
        return trained_plans(run)
    graph, own_cost, all_gains = run.graph, run.costs, run.gains
    if graph is None or own_cost is None:
        return {}
    costs = add_limited([own_cost], [Budget.parse(budget) for budget in budgets], graph, own_cost.choices)
    by_place: dict[Place, Plan] = {}
    for method in run.study.methods:
        gains = all_gains.get(method.title)
        if gains is not None:
            plans = select_each(graph, gains, costs, budgets=budgets, selector=method.selector)
            by_place |= {(method.title, budget): plan for budget, plan in zip(budgets, plans, strict=True)}
    return by_place


def _count_lowered(run: RunFolder, budgets: Sequence[str]) -> dict[Place, tuple[int, int]]:
    """Return how many groups, and layers, each plan of a method has below the highest choice."""
    graph, highest = run.graph, run.study.choices[-1]
    titles = {method.title for method in run.study.methods}
    counts: dict[Place, tuple[int, int]] = {}
    for (title, budget), plan in _select_plans(run, budgets).items():
        if title in titles and graph is not None:
            below = [group for group in graph.selectable if plan.precisions[group.name] != highest]
            counts[title, budget] = len(below), sum(len(group.layers) for group in below)
    return counts


def _list_groups(run: RunFolder) -> list[str]:
    """Return the names of the groups with a choice, in order of execution."""
    graph = run.graph
    return [group.name for group in graph.selectable] if graph else []


def _count_differences(
    plans: Plans, titles: tuple[str, str], budgets: Sequence[str], groups: Sequence[str]
) -> list[int | None]:
    """Return how many groups two methods choose differently within each budget; None if one has no plan yet."""
    counts: list[int | None] = []
    for budget in budgets:
        first, second = (plans.get((title, budget)) for title in titles)
        if first is None or second is None:
            counts.append(None)
        else:
            counts.append(sum(first.precisions[group] != second.precisions[group] for group in groups))
    return counts


def _format_bits(plan: Plan | None, group: str) -> str:
    if plan is None:
        return "–"
    precision = plan.precisions[group]
    return str(precision.weight_bits if precision.weight_bits == precision.act_bits else precision)


# Comparisons: every test in a list, or one method against the others.


def significance(run: RunFolder, against: str | None = None, *, corrected: bool = False) -> Table:
    """Return every test of one method against the others (None: of every two methods) at each budget."""
    _check_title("method of this run", against, [method.title for method in run.study.methods])
    comparisons = compare(run.study, run.results, run.plans, against=against, spends=spends_of(run))
    name = name_test(test.exact for test in comparisons)
    title, heading = f"{run.study.name}: {name.replace('test', 'tests')}", "p"
    if corrected:
        title, heading = f"{title}, corrected over budgets (Holm)", "p (Holm)"
    rows: list[tuple[Value, ...]] = []
    for first, second, difference, test in orient_comparisons(comparisons, against):
        p, least = (test.corrected, test.corrected_floor) if corrected else (test.p, test.floor)
        figures = (None, None) if test.unequal else (p, least)
        rows.append((test.budget, first, second, difference, *figures, test.verdict()))
    columns = (
        Column("budget"), Column("method"), Column("against"), *numbers("better by", digits=2),
        *numbers(heading, "least possible p", digits=4), Column("so"),
    )  # fmt: skip
    return Table(title, columns, tuple(rows), (*equal_spend(run.study), *warnings_of(comparisons)))


def versus(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """Return one method at a glance: a row per other method, a column per budget; p if it can mean anything."""
    study, results = run.study, run.results
    _check_title("method of this run", against, [method.title for method in study.methods])
    comparisons = compare(study, results, run.plans, against=against, spends=spends_of(run))
    notes = (legend(against, comparisons, corrected), *_explain_unequal(comparisons, study), *warnings_of(comparisons))
    title = f"{study.name}: {against} against the others, in points of {metric_of(study, results)}"
    return _compare_at_a_glance(title, against, comparisons, study.budgets, corrected, notes)


def quantizers_against(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """Return one quantizer at a glance: a row per other quantizer, a column per plan."""
    _check_title("quantizer of this run", against, [quantizer.title for quantizer in run.study.quantizers])
    tests = compare_quantizers(run.study, run.results, against)
    plans = list(dict.fromkeys(cell.budget for cell in _quantizer_cells(run)))
    title = f"{run.study.name}: {against} against the other quantizers, in points of {_name_metric(run)}"
    notes = (legend(against, tests, corrected, hint=""), *warnings_of(tests))
    return _compare_at_a_glance(title, against, tests, plans, corrected, notes)


def _compare_at_a_glance(
    title: str,
    against: str,
    comparisons: Iterable[Comparison],
    budgets: Iterable[str],
    corrected: bool,
    notes: tuple[str, ...],
) -> Table:
    seen = orient_comparisons(comparisons, against)
    texts = {
        (other, test.budget): describe_difference(difference, test, corrected) for _, other, difference, test in seen
    }
    others = dict.fromkeys(other for _, other, *_ in seen)
    return grid(title, "against", others, budgets, lambda other, budget: texts.get((other, budget)), notes=notes)


def legend(
    against: str, comparisons: Sequence[Comparison], corrected: bool, *, hint: str = "; --against all lists p"
) -> str:
    """Return the meaning of the signs of `difference_in_words` that can occur."""
    sign = f"positive: {against} is better"
    tested = [test for test in comparisons if _can_be_significant(test)]
    if not comparisons:
        return sign
    if not tested:
        return sign + hint
    name = name_test(test.exact for test in tested)
    p = f"p after {CORRECTION} over the budgets" if corrected else f"p of the {name}"
    marks = f"★ significantly, ▽ significantly worse (p ≤ {ALPHA}), twice: also after {CORRECTION}"
    return f"{sign}; {marks}; then {p}"


def describe_difference(difference: float, test: Comparison, corrected: bool) -> str:
    """Return a difference with its mark and p; p is left out if no scores could make it significant."""
    if test.shared:
        return "same plan"
    if test.unequal:
        return f"{difference:+.2f} ≠"
    if not _can_be_significant(test):
        return f"{difference:+.2f}"
    sign = "★" if difference > 0 else "▽"
    mark = sign * (test.significant() + test.significant(corrected=True))  # none, one or two of them
    p = test.corrected if corrected else test.p
    return f"{difference:+.2f} {mark:2} {p:.4f}"


def _can_be_significant(test: Comparison) -> bool:
    return test.floor <= ALPHA and not (test.shared or test.unequal)


def _explain_unequal(comparisons: Sequence[Comparison], study: Study) -> tuple[str, ...]:
    """Return the notes about ≠ and about equal spends."""
    reasons = list(dict.fromkeys(test.unequal for test in comparisons if test.unequal and not test.shared))
    if not reasons:
        return equal_spend(study)
    return (f"≠: no equals, so that no p is given: {'; '.join(reasons)}", *equal_spend(study))


def warnings_of(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """Return the note about too few seeds, if there is one."""
    text = warning(comparisons)
    return () if text is None else (text,)


def _check_title(what: str, title: str | None, titles: Sequence[str]) -> None:
    if title is not None and title not in titles:
        raise UnknownName(what, title, titles)


def orient_comparisons(
    comparisons: Iterable[Comparison], against: str | None
) -> list[tuple[str, str, float, Comparison]]:
    """Return first method, second, the lead of the first, and the comparison; `against` always comes first."""
    seen = []
    for test in comparisons:
        if test.second == against:
            seen.append((test.second, test.first, -test.difference, test))
        elif against in (None, test.first):
            seen.append((test.first, test.second, test.difference, test))
    return seen


# Scores, and costs of estimates and plans.


def quantizers(run: RunFolder) -> Table:
    """Return mean ± standard deviation over seeds: a row per quantizer, a column per plan."""
    by_place = {(cell.title, cell.budget): cell for cell in _quantizer_cells(run)}
    plans = list(dict.fromkeys(plan for _, plan in by_place))
    titles = list(dict.fromkeys(title for title, _ in by_place))
    rows = tuple((title, *(_spread(by_place.get((title, plan))) for plan in plans)) for title in titles)
    figures = [(None, *(_mean(by_place.get((title, plan))) for plan in plans)) for title in titles]
    title = f"{run.study.name}: quantizers at the same plans, {_name_metric(run)}, mean ± sd over seeds"
    columns = (Column("quantizer"), *numbers(*(f"all at {plan}" if " " not in plan else plan for plan in plans)))
    return Table(title, columns, rows, tuple(_note_unfinished(run)), _find_best(figures, run.results))


def quantizer_scores(run: RunFolder) -> Table:
    """Return the same scores as a row per quantizer and plan."""
    rows = tuple((cell.title, cell.budget, len(cell.scores), cell.mean, cell.sd) for cell in _quantizer_cells(run))
    columns = (Column("quantizer"), Column("plan"), *numbers("seeds"), *numbers("mean", "sd", digits=2))
    return Table(f"{run.study.name}: quantizers at the same plans", columns, rows)


def _quantizer_cells(run: RunFolder) -> tuple[Cell, ...]:
    if not run.study.quantizers:
        raise InputError(f"{run.study.name} compares no quantizers: a study lists them as [[quantizers]]")
    return _check_any(run, quantizer_cells(run.study, run.results))


def _method_cells(run: RunFolder) -> tuple[Cell, ...]:
    if not run.study.methods:
        raise InputError(
            f"{run.study.name} compares quantizers and no methods: `bitplan run tables --which quantizers`"
        )
    return _check_any(run, cells(run.study, run.results, run.plans))


def _check_any(run: RunFolder, scored: tuple[Cell, ...]) -> tuple[Cell, ...]:
    if not scored:
        raise InputError(f"{run.path} has no finished trial yet: `bitplan run status {run.path}` shows how far it is")
    return scored


def _name_metric(run: RunFolder) -> str:
    metrics = {result.metric for result in run.results if result.metric}
    return metrics.pop() if len(metrics) == 1 else "score"


def scores(run: RunFolder) -> Table:
    """Return the scores of each method as a row per budget."""
    scored = _method_cells(run)
    rows = tuple(
        (cell.title, cell.budget or None, len(cell.scores), cell.mean, cell.sd, " ".join(cell.shared_with) or None)
        for cell in scored
    )
    columns = (
        Column("method"), Column("budget"), *numbers("seeds"), *numbers("mean", "sd", digits=2), Column("shared"),
    )  # fmt: skip
    return Table(f"{run.study.name}: scores", columns, rows, _list_notes(run, scored))


def frontier(run: RunFolder) -> Table:
    """Return mean ± standard deviation: a row per method, a column per budget; then the area under the frontier."""
    study, results, scored = run.study, run.results, _method_cells(run)
    by_place = {(cell.title, cell.budget): cell for cell in scored}
    areas_of = areas(study, scored)
    rows: list[tuple[Value, ...]] = []
    figures: list[tuple[float | None, ...]] = []  # the numbers of each row that compete with those of other rows
    for title in dict.fromkeys(cell.title for cell in scored):
        reference, area = by_place.get((title, "")), areas_of.get(title)
        at_budgets: list[Cell | None] = [None] * len(study.budgets)  # as for a reference
        if reference is None:
            at_budgets = [by_place.get((title, budget)) for budget in study.budgets]
        name = reference.name if reference else title
        rows.append((name, _spread(reference), *map(_spread, at_budgets), _format_area(area)))
        figures.append((None, None, *map(_mean, at_budgets), area.value if area else None))
    columns = (Column("method"), *numbers("no budget", *study.budgets), Column("area (95%)", number=True))
    title = f"{study.name}: {metric_of(study, results)} by {study.cost} budget, mean ± sd over seeds"
    return Table(title, columns, tuple(rows), _list_notes(run, scored), _find_best(figures, results))


def _find_best(figures: Sequence[Sequence[float | None]], results: Iterable[Result]) -> frozenset[tuple[int, int]]:
    """Return the (row, column) of the best figure of every column with several figures."""
    pick: Callable[[Iterable[float]], float] = max if all(result.higher_is_better for result in results) else min
    places: set[tuple[int, int]] = set()
    for column, values in enumerate(zip(*figures, strict=True)):
        known = [value for value in values if value is not None]
        if len(known) > 1:
            best = pick(known)
            places.update((row, column) for row, value in enumerate(values) if value == best)
    return frozenset(places)


def costs(run: RunFolder) -> Table:
    """Return the cost of each method's estimate: seconds, epochs of training data, samples, trainings."""
    rows: list[tuple[Value, ...]] = []
    for title, gains in (run.gains | run.bound_gains).items():
        samples, per_epoch = gains.counts.get("samples", 0), gains.counts.get("samples_per_epoch")
        epochs: float | None = None  # unknown if a method does not say how many samples an epoch has
        if per_epoch:
            epochs = samples / per_epoch
        elif not samples:
            epochs = 0.0
        rows.append((title, gains.seconds, epochs, samples, gains.counts.get("trainings", 0)))
    columns = (Column("method"), *numbers("seconds", "epochs", digits=2), *numbers("samples", "trainings"))
    return Table(f"{run.study.name}: what estimating took", columns, tuple(rows))


def compression(run: RunFolder) -> Table:
    """Return each plan's score beside its bit operations, size and compression."""
    graph = run.graph
    by_place = {(cell.title, cell.budget): cell for cell in _method_cells(run)}
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
# Each table by its name: for people, then for programs.
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
    "lowered": (tabulate_lowered, count_lowered),
}


def check_name(which: str, others: Iterable[str] = ()) -> None:
    """Raise UnknownName if there is no such table; `others` are the tables that need no run."""
    if which not in (*TABLES, *CHOSEN):
        raise UnknownName("table", which, (*TABLES, *CHOSEN, *others))


def make(which: str, run: RunFolder, *, plain: bool, budgets: Sequence[str] = ()) -> Table:
    """Return a table by name; `plain` has one value per cell, for programs.

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


def _format_area(area: Area | None) -> str | None:
    if area is None:
        return None
    if area.low is None or area.high is None:
        return f"{area.value:.2f}"
    return f"{area.value:.2f} ({area.low:.2f} to {area.high:.2f})"


def _spread(cell: Cell | None) -> str | None:
    return None if cell is None else cell.spread


def _mean(cell: Cell | None) -> float | None:
    return None if cell is None else cell.mean


def _list_notes(run: RunFolder, scored: Sequence[Cell]) -> tuple[str, ...]:
    """Return which cells are the same networks, who saw labels, and which trials are not done."""
    return (*_note_shared(scored), *seen_notes(run), *_note_unfinished(run))


def _note_unfinished(run: RunFolder) -> list[str]:
    left, failed = run.unfinished, len(run.failures)
    notes = [f"{left} of {left + len(run.results) + failed} trials are not done yet"] if left else []
    return notes + ([f"{failed} trials failed"] if failed else [])


def _note_shared(scored: Sequence[Cell]) -> list[str]:
    """Return a note for each set of methods whose networks at a budget are the same."""
    notes = []
    noted: set[tuple[str, frozenset[str]]] = set()
    for cell in scored:
        alike = (cell.title, *cell.shared_with)
        key = cell.budget, frozenset(alike)
        if cell.shared_with and cell.budget and key not in noted:
            noted.add(key)
            notes.append(f"at {cell.budget} {', '.join(alike)} chose the same: trained once")
    return notes


# Methods on the same windows of a text, as a table and in sentences.


def windows(run: RunFolder, against: str | None = None) -> Table:
    """Return the paired difference of losses of one method and every other (None: every two) at each budget."""
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
    """Return sentences about the first method against each other."""
    if study is None or not study.methods:
        return []
    return [
        f"On the same {one.paired.windows} windows at {one.budget}, {one.first} against {one.second}: loss "
        f"{one.paired.difference:+.4f} (95 % from {one.paired.low:+.4f} to {one.paired.high:+.4f}); {one.verdict}."
        for one in window_pairs(study, results, study.methods[0].title)
    ]

"""The tables of a run by name; here those of scores and of what things take: frontier, costs, compression."""

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
from bitplan.reports.formats import Column, Table, Value, numbers
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
from bitplan.stats.ranksum import rank_correlation
from bitplan.stats.windows import window_pairs
from bitplan.store.run_folder import RunFolder

# --- Which precisions the methods choose, and how alike they are: tables for which nothing needs to be trained.

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


# --- Which differences between methods mean anything: every test in a list, or one method against the others.


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


# --- Tables of quantizers that were compared at the same plans.


def quantizers(run: RunFolder) -> Table:
    """A row per quantizer, a column per plan: mean ± standard deviation over seeds."""
    found = _quantizer_cells(run)
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
        (cell.title, cell.budget, len(cell.scores), cell.mean, cell.sd) for cell in _quantizer_cells(run)
    ]
    columns = (Column("quantizer"), Column("plan"), *numbers("seeds"), *numbers("mean", "sd", digits=2))
    return Table(f"{run.study.name}: quantizers at the same plans", columns, tuple(rows))


def quantizers_against(run: RunFolder, against: str, *, corrected: bool = False) -> Table:
    """One quantizer at a glance: a row per other one, a column per plan."""
    titles = [one.title for one in run.study.quantizers]
    if against not in titles:
        raise UnknownName("quantizer of this run", against, titles)
    seen = seen_from(compare_quantizers(run.study, run.results, against), against)
    plans = list(dict.fromkeys(cell.budget for cell in _quantizer_cells(run)))
    by_plan: dict[str, dict[str, str]] = {}
    for _, other, difference, test in seen:
        by_plan.setdefault(other, {})[test.budget] = difference_in_words(difference, test, corrected)
    rows = tuple((other, *map(texts.get, plans)) for other, texts in by_plan.items())
    tests = [test for *_, test in seen]
    title = f"{run.study.name}: {against} against the other quantizers, in points of {_metric(run)}"
    notes = (legend(against, tests, corrected, hint=""), *warnings_of(tests))
    return Table(title, (Column("against"), *numbers(*plans)), rows, notes)


def _quantizer_cells(run: RunFolder) -> tuple[Cell, ...]:
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


# --- Methods on the same windows of a text, as a table and in sentences.


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

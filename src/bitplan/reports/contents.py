"""The content of the page, as plain data for its script: every number is computed here, none in the browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import getitem
from typing import Any

import numpy as np

from bitplan import __version__
from bitplan.core.budget import Budget
from bitplan.core.codes import entropy
from bitplan.core.errors import BudgetError
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.studies import Fit, Study
from bitplan.core.trials import Trial
from bitplan.costs.base import price
from bitplan.costs.standard import FLOAT_BITS, total
from bitplan.reports.formats import to_page
from bitplan.reports.regrets import regret_table
from bitplan.reports.scores import Answer, Scores, answer, gather
from bitplan.reports.spending import spend_table
from bitplan.reports.subject import Candidate, Subject
from bitplan.reports.tables import window_sentences
from bitplan.selection.base import select
from bitplan.selection.frontier import Frontier, Point, Points, select_all
from bitplan.stats.compare import ALPHA, CORRECTION, Cell, Comparison
from bitplan.stats.ranksum import name_test
from bitplan.stats.regret import regrets

Data = dict[str, Any]


def contents(subject: Subject, plans: dict[str, Plan]) -> Data:
    """Return the whole page; parts that a single plan cannot have are None."""
    scores, track = gather(subject, plans), lay_track(subject)
    chosen = answer(subject, scores)
    choices = subject.candidates[0].gains.choices
    return {
        "title": subject.title,
        "task": subject.study.task if subject.study else None,
        "choices": [{"name": str(choice), "w": choice.weight_bits, "a": choice.act_bits} for choice in choices],
        "alpha": ALPHA,
        "correction": CORRECTION,
        "cost": {"name": subject.cost.name, "unit": subject.cost.unit},
        "answer": _answer(subject, scores, chosen),
        "scores": scores and _scores(subject, scores),
        "network": _network(subject.graph),
        "methods": [_method(candidate, subject) for candidate in subject.candidates],
        "histograms": histograms(subject),
        "track": _track(subject, track),
        "rides": [encode(ride, subject) for ride in track.rides],
        "spend": scores and _spend(subject, scores),
        "regret": _regret(subject, plans),
        "additivity": additivity_data(subject),
        "trials": trials_data(subject),
        "provenance": provenance_data(subject),
    }


def _track(subject: Subject, track: Track) -> Data:
    """Return the slider: a stop is [label, place on the axis of budgets, units that it leaves to choosable layers]."""
    unit, account = Budget.parse(subject.budget).unit.on_axis, subject.account
    aside = unit.aside(account)
    return {
        "stops": [[stop.label, float(unit.amount(stop.capacity, account)), stop.capacity] for stop in track.stops],
        "start": next(index for index, stop in enumerate(track.stops) if stop.label == subject.budget),
        "axis": unit.axis(account),
        "fixed": None if aside is None else unit.told(0, account),
        "complete": track.complete,
        "others": list(subject.others),
        "budgets": [index for index, stop in enumerate(track.stops) if stop.label in subject.budgets],
    }


def _answer(subject: Subject, scores: Scores | None, chosen: Answer) -> Data:
    candidate = next(candidate for candidate in subject.candidates if candidate.title == chosen.title)
    plan = subject.plan or subject.make(candidate, chosen.budget)
    figures = total(plan, subject.graph)
    rows: list[Data] = []
    if chosen.cell is not None:
        references = scores.references if scores is not None else ()
        rows = [_row(cell) for cell in (chosen.cell, *references)]
    choices = candidate.gains.choices
    picks = [plan.precisions[group.name] for group in subject.graph.selectable]
    return {
        "method": chosen.title,
        "budget": chosen.budget,
        "under": Budget.parse(chosen.budget).words(subject.cost.name),
        "others": list(subject.others),
        "sentences": list(chosen.sentences),
        "rows": rows,
        "used": describe_spent(subject, plan.limits[0].cost),
        "cost": plan.limits[0].cost,
        "bits": figures.bits,
        "smaller": figures.compression,
        "bmacs": figures.bmacs,
        "bops": figures.bops,
        "counts": [[str(choice), picks.count(choice)] for choice in choices],
        "fixed": len(subject.graph.groups) - len(picks),
        "proof": plan.proof,
        "command": subject.reproduce(candidate, chosen.budget),
    }


def _row(cell: Cell) -> Data:
    return {"title": cell.title, "mean": cell.mean, "sd": cell.sd, "scores": list(cell.scores)}


def _amounts(subject: Subject, budgets: Sequence[str]) -> dict[str, Fraction]:
    """Return budget → place on the axis."""
    unit = Budget.parse(subject.budget).unit
    return {written: Budget.parse(written).place(unit) for written in budgets}


def _scores(subject: Subject, scores: Scores) -> Data:
    """Return every cell and every test; they refer to methods and budgets by their places in `titles` and `budgets`."""
    assert subject.study is not None
    amounts = _amounts(subject, subject.study.budgets)
    budgets = sorted(amounts, key=lambda written: amounts[written])
    titles = [method.title for method in subject.study.methods]

    def cell_data(cell: Cell) -> Data:
        places = {"m": titles.index(cell.title), "b": budgets.index(cell.budget)}
        return places | {"mean": cell.mean, "sd": cell.sd, "scores": list(cell.scores), "same": list(cell.shared_with)}

    def test_data(test: Comparison) -> list[Any]:
        places = [titles.index(test.first), titles.index(test.second), budgets.index(test.budget)]
        return [*places, test.difference, test.p, test.corrected, test.verdict()]

    return {
        "metric": scores.metric,
        "up": scores.higher_is_better,
        "budgets": [[budget, float(amounts[budget])] for budget in budgets],
        "unit": axis_label(subject),
        "titles": titles,
        "cells": [cell_data(cell) for cell in scores.methods],
        "references": [_row(cell) for cell in scores.references],
        "test": name_test(test.exact for test in scores.comparisons),
        "tests": [test_data(test) for test in scores.comparisons],
        "notes": _notes(subject, scores),
    }


def _spend(subject: Subject, scores: Scores) -> Data | None:
    """Return score against spend as a table of texts."""
    if subject.study is None or not subject.spends:
        return None
    return to_page(spend_table(subject.study, subject.spends, scores.methods, scores.metric))


def _regret(subject: Subject, plans: dict[str, Plan]) -> Data | None:
    """Return the regrets as a table of texts, if there are ceilings."""
    if subject.study is None or not subject.ceilings:
        return None
    found = regrets(subject.study, subject.results, subject.ceilings, plans)
    return to_page(regret_table(subject.study, subject.ceilings, found))


def axis_label(subject: Subject) -> str:
    """Return the name of the axis of budgets."""
    return Budget.parse(subject.budget).unit.axis(subject.account)


def _notes(subject: Subject, scores: Scores) -> list[str]:
    """Return notes on missing trials and few seeds."""
    notes, failed = [], len(subject.failures)
    failures = f"; {failed} failed, the table of trials says why" if failed else ""
    if scores.done < scores.planned:
        notes.append(f"{scores.done} of {scores.planned} trials are done{failures}. The others have no point here.")
    elif failed:
        notes.append(f"All {scores.planned} trials are done{failures}.")
    if scores.methods and scores.single_seed:
        notes.append("One seed only: there is no spread to show, and no difference can be called significant.")
    if scores.methods and len({cell.title for cell in scores.methods}) == 1:
        notes.append("Only one method has scores, so there is nothing to compare.")
    if scores.methods and not scores.references:
        notes.append("No float network and none at one precision was trained, so there is no line to compare with.")
    return notes + window_sentences(subject.study, subject.results)


def _network(graph: Graph) -> Data:
    """Return the groups in order; a layer is a list [name, kind, macs, weights, inputs, place in the graph]."""
    places = {layer.name: index for index, layer in enumerate(graph.layers)}
    through = {link.layers[0]: link.through for link in graph.links}
    groups = []
    for group in graph.groups:
        layers = [
            [layer.name, layer.kind, layer.macs, layer.weights, layer.in_features, places[layer.name]]
            for layer in group.layers
        ]
        fixed = None
        if group.fixed is not None:
            fixed = {"name": str(group.fixed), "w": group.fixed.weight_bits, "why": group.layers[0].why}
        groups.append({"layers": layers, "fixed": fixed, "through": through.get(group.name)})
    return {
        "model": graph.model,
        "macs": sum(layer.macs for layer in graph.layers),
        "weights": sum(layer.weights for layer in graph.layers),
        "unreached": list(graph.unreached),
        "groups": groups,
    }


def _method(candidate: Candidate, subject: Subject) -> Data:
    """Return a method and its gains, a row for each group that may be chosen."""
    gains = candidate.gains
    names = [group.name for group in subject.graph.selectable]
    ranks = _ranks(sorted(names, key=lambda name: -gains.rows[name][-1]), gains)
    return {
        "title": candidate.title,
        "name": gains.method,
        "options": gains.options,
        "selector": candidate.selector,
        "seconds": gains.seconds,
        "counts": gains.counts,
        "seed": gains.seed,
        "id": gains.id,
        "rows": _shorten_rows(gains.rows, names),
        "errors": gains.errors and _shorten_rows(gains.errors, names),
        "ranks": [ranks[name] + 1 for name in names],
    }


def _shorten_rows(rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[list[float]]:
    return [[round_for_page(value) for value in rows[name]] for name in names]


def _ranks(order: Sequence[str], gains: Gains) -> dict[str, int]:
    """Return the place of every group by falling gain; equal gains share the better place."""
    ranks: dict[str, int] = {}
    for index, name in enumerate(order):
        before = order[index - 1] if index else None
        tied = before is not None and gains.rows[before][-1] == gains.rows[name][-1]
        ranks[name] = ranks[before] if tied and before else index
    return ranks


# The budgets that the slider stops at, and the selection of every method at each of them.

LIMIT = 200
LIMIT_TOGETHER = 30  # where several budgets hold at once, every stop is a search of its own
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STEPS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5))

Picks = tuple[int, ...]
"""A selection: for each group that may be chosen, in order, which of the choices it has."""
PointAt = Callable[[int], Point | None]


@dataclass(frozen=True)
class Stop:
    """A place of the slider: its label, and the units it allows."""

    label: str
    capacity: int


@dataclass(frozen=True)
class Ride:
    """The selection of a method at every stop; None if no selection meets the other budgets."""

    candidate: Candidate
    points: tuple[Point | None, ...]


@dataclass(frozen=True)
class Track:
    """All stops by ascending capacity, and the ride of every method; `complete`: no point of a frontier is left out."""

    stops: tuple[Stop, ...]
    rides: tuple[Ride, ...]
    complete: bool


def lay_track(subject: Subject) -> Track:
    """Find the selections of all methods: from whole frontiers where one budget holds and the selector is exact."""
    together = bool(subject.others)
    frontiers = {
        candidate.title: select_all(subject.graph, candidate.gains, subject.cost)
        for candidate in subject.candidates
        if candidate.selector == "exact" and not together
    }
    written = _label_budgets(subject)
    points = {int(cost) for frontier in frontiers.values() for cost in frontier.costs}
    complete = bool(points) and len(points) + len(written) <= LIMIT
    room = (LIMIT_TOGETHER if together else LIMIT) - len(written)
    between = points if complete else _grid(subject.cost, subject.account.highest, room)
    stops = _stops(subject, written, between)
    rides = []
    for candidate in subject.candidates:
        point_at = _planner(subject, candidate, frontiers.get(candidate.title))
        rides.append(Ride(candidate, tuple(_ride(subject, stops, point_at))))
    return Track(stops, tuple(rides), complete)


def _stops(subject: Subject, written: Mapping[int, str], between: Iterable[int]) -> tuple[Stop, ...]:
    """Return the budgets as they are written, and the places between, by ascending capacity."""
    unit, account = Budget.parse(subject.budget).unit.on_axis, subject.account
    # A label is rounded up, so that who asks for it gets the plan of its stop.
    stops = [Stop(unit.enough(place, account, fine=True), place) for place in between if place not in written]
    stops += [Stop(label, capacity) for capacity, label in written.items()]
    return tuple(sorted(stops, key=lambda stop: stop.capacity))


def _label_budgets(subject: Subject) -> dict[int, str]:
    """Return capacity → label of the budgets that can be met; too many are thinned out, the chosen one stays."""
    least = sum(min(row) for row in subject.cost.rows.values())
    if subject.capacity(subject.budget) < least:  # refused with what is possible
        select(subject.graph, subject.candidates[0].gains, subject.costs, budget=subject.budget)
    every = math.ceil(len(subject.budgets) / (LIMIT - 1))
    kept = [*subject.budgets[::every], subject.budget]
    labels = {subject.capacity(budget): budget for budget in kept}
    return {capacity: label for capacity, label in labels.items() if capacity >= least}


def _grid(cost: Costs, whole: int, room: int) -> set[int]:
    """Return round percentages between the least and the highest cost, as fine as there is room for."""
    least = sum(min(row) for row in cost.rows.values())
    for step in STEPS:
        low = math.ceil(Fraction(100 * least, whole) / step)
        stops = [whole * step * place // 100 for place in range(low, int(100 / step) + 1)]
        if len(stops) <= room:
            break
    return {int(stop) for stop in stops}


def _ride(subject: Subject, stops: Sequence[Stop], point_at: PointAt) -> Iterator[Point | None]:
    """Yield the selection at every stop; for a page about one plan, that very plan at its budget."""
    for stop in stops:
        if subject.plan is not None and stop.label == subject.budget:
            yield _point(subject.plan, subject)
        else:
            yield point_at(stop.capacity)


def _planner(subject: Subject, candidate: Candidate, frontier: Frontier | None) -> PointAt:
    if frontier is not None:
        return frontier.point
    cost = subject.cost
    others = [other for other in subject.costs if other.name != cost.name]
    costs = [cost, *others]  # the first budget, in units, is of the first cost
    budgets = [str(subject.account.highest), *subject.others]
    try:
        return Points.of(subject.graph, candidate.gains, costs, budgets, candidate.selector).at
    except BudgetError:
        return lambda _: None


def _point(plan: Plan, subject: Subject) -> Point:
    limit, choices = plan.limits[0], subject.cost.choices
    picks = tuple(choices.index(plan.precisions[group.name]) for group in subject.graph.selectable)
    return Point(picks, limit.cost, plan.gain, limit.shadow_price)


def encode(ride: Ride, subject: Subject) -> dict[str, object]:
    """Return a ride for the page: every different selection once, a digit per group, and its number at each stop."""
    by_picks = {point.picks: point for point in ride.points if point is not None}
    selections, points = list(by_picks), list(by_picks.values())
    place = {picks: index for index, picks in enumerate(selections)}
    at: list[int | None] = []
    prices: list[float | None] = []
    for point in ride.points:  # stops may share a selection, but each has a shadow price of its own
        at.append(None if point is None else place[point.picks])
        prices.append(None if point is None else point.shadow_price)
    return {
        "picks": [_digits(picks) for picks in selections],
        "cost": [point.cost for point in points],
        "used": [describe_spent(subject, point.cost) for point in points],
        "gain": [point.gain for point in points],
        "bops": _sums(subject, "bops", selections),
        "bits": _sums(subject, "memory", selections),
        "smaller": _compressions(subject, selections),
        "at": at,
        "price": prices,
    }


def _digits(picks: Picks) -> str:
    return "".join(DIGITS[pick] for pick in picks)


def describe_spent(subject: Subject, spent: int) -> str:
    """Return the cost of choosable layers, as budgets are written, without idle zeros."""
    unit = Budget.parse(subject.budget).unit.on_axis
    return unit.told(spent, subject.account, more=1, trim=True)


def _sums(subject: Subject, cost: str, selections: Sequence[Picks]) -> list[int]:
    """Return the costs of selections by another measure, fixed layers included."""
    priced = price(cost, subject.graph, subject.cost.choices)
    fixed = sum(priced.fixed.values())
    rows = [priced.rows[group.name] for group in subject.graph.selectable]
    return [fixed + _sum_of_picked(rows, picks) for picks in selections]


def _compressions(subject: Subject, selections: Sequence[Picks]) -> list[float]:
    """Return 32-bit size over size of the weights of each selection; 1 for a network without weights."""
    graph, choices = subject.graph, subject.cost.choices
    fixed = sum(layer.weights * layer.fixed.weight_bits for layer in graph.layers if layer.fixed)
    rows = [[group.weights * choice.weight_bits for choice in choices] for group in graph.selectable]
    as_floats = FLOAT_BITS * sum(layer.weights for layer in graph.layers)
    compressions = []
    for picks in selections:
        stored = fixed + _sum_of_picked(rows, picks)
        compressions.append(as_floats / stored if stored else 1.0)
    return compressions


def _sum_of_picked(rows: Sequence[Sequence[int]], picks: Picks) -> int:
    """Return the sum over groups of the value, in the group's row of choices, that is picked there."""
    return sum(map(getitem, rows, picks))


# The lower half of the page: whether gains add up, every trial, and the origin of all figures.


def additivity_data(subject: Subject) -> Data | None:
    """Return points (predicted, measured) with their correlations; None if neither experiment was done."""
    pairs, fit = subject.pairs, subject.fit
    if pairs is None and fit is None:
        return None
    return {
        "pairs": pairs and {
            "metric": pairs.metric,
            "r": pairs.correlation,
            "points": [[pair.predicted, pair.measured, f"{pair.first} + {pair.second}"] for pair in pairs.pairs],
        },
        "fit": fit and {
            "metric": fit.metric,
            "r": fit.correlation,
            "r_held_out": fit.correlation_held_out,
            "residual": fit.residual,
            "networks": fit.networks,
            "fitted": fit_points(fit, held_out=False),
            "held_out": fit_points(fit, held_out=True),
        },
    }  # fmt: skip


def fit_points(fit: Fit, *, held_out: bool) -> list[list[Any]]:
    """Return predicted and measured score of the networks that made the fit, or of those held out from it."""
    kept_out = set(fit.held_out)
    networks = zip(fit.predicted, fit.measured, fit.vectors, strict=True)
    points: list[list[Any]] = []
    for index, (predicted, measured, vector) in enumerate(networks):
        if (index in kept_out) == held_out:
            points.append([predicted, measured, f"{sum(vector)} of {len(vector)} groups at the highest choice"])
    return points


def trials_data(subject: Subject) -> list[list[Any]] | None:
    """Return one row per trial: method, budget, seed, score or None, seconds, device, trial, plan, error."""
    study = subject.study
    if study is None:
        return None

    def head(trial: Trial) -> list[Any]:
        start = "" if trial.start_seed is None else f", start {trial.start_seed}"
        return [f"{study.title_of(trial)}{start}", ", ".join(trial.budgets), trial.seed]

    rows: list[list[Any]] = []
    for result in subject.results:
        trial = result.trial
        rows.append([*head(trial), result.score, result.seconds, result.device, trial.id, result.plan, ""])
    for failure in subject.failures:
        trial = failure.trial
        rows.append([*head(trial), None, failure.seconds, "", trial.id, "", failure.error or "failed"])

    def by_budget(row: list[Any]) -> tuple[str, str, int]:
        title, budget, seed, *_ = row
        return budget, title, seed

    return sorted(rows, key=by_budget)


def provenance_data(subject: Subject) -> list[list[str]]:
    """Return names and values, in the order of the flow."""
    rows = [("bitplan", __version__), ("network", subject.graph.model), ("graph", subject.graph.id)]
    for cost in subject.costs:
        rows.append((f"costs ({cost.name})", cost.id))
    for candidate in subject.candidates:
        gains = candidate.gains
        rows.append((f"gains ({candidate.title})", _with_options(f"{gains.id}, seed {gains.seed}", gains.options)))
    if subject.plan is not None:
        rows.append(("plan", subject.plan.id))
    if subject.study is not None:
        rows += _describe_study(subject.study)
    rows += _machines(subject)
    return [list(row) for row in rows]


def _describe_study(study: Study) -> list[tuple[str, str]]:
    return [
        ("study", f"{study.name} ({study.id})"),
        ("task", _with_options(study.task, study.task_options)),
        ("budgets", ", ".join(study.budgets)),
        ("seeds", ", ".join(map(str, study.seeds))),
        ("recipe", _fields(study.recipe)),
        ("start", _fields(study.start)),
        ("rules", _fields(study.rules)),
    ]


def _with_options(name: str, options: dict[str, Any]) -> str:
    return ", ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _fields(record: Any) -> str:
    """Return the fields that differ from the defaults."""
    content = record.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return ", ".join(f"{key} {_flat(value)}" for key, value in content.items()) or "as the defaults say"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items())
        return f"({inside})"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _machines(subject: Subject) -> list[tuple[str, str]]:
    """Return versions and devices of all results; if they differ, every one."""
    versions: dict[str, set[str]] = {}
    for result in subject.results:
        for library, version in result.versions.items():
            versions.setdefault(library, set()).add(version)
    versions.pop("bitplan", None)  # the page is of this one
    rows = [(library, ", ".join(sorted(versions[library]))) for library in sorted(versions)]
    devices = sorted({result.device for result in subject.results if result.device})
    if devices:
        rows.append(("device", ", ".join(devices)))
    return rows


# How often each code occurs among the weights of a layer at each precision, and its entropy.

MOST_BARS = 256


def histograms(subject: Subject) -> dict[str, Any] | None:
    """Return the codes of every layer by weight bits, from the first method that counted them, at most 256 bars each.

    Methods count at the highest choice, `bits`; lower counts are derived from that (see `lowered`).
    """
    for candidate in subject.candidates:
        counted, choices = candidate.gains.histograms, candidate.gains.choices
        if counted:
            top = choices[-1].weight_bits
            below = sorted({top - choice.weight_bits for choice in choices}, reverse=True)
            layers = {name: _by_bits(counts, top, below) for name, counts in counted.items()}
            return {"method": candidate.title, "bits": top, "layers": layers}
    return None


def _by_bits(counts: Sequence[int], top: int, below: Sequence[int]) -> dict[str, list[Any]]:
    """Return the bars of a layer counted at `top` bits, at so many bits below that."""
    return {str(top - fewer): _draw_bars(lower_histogram(counts, fewer) if fewer else counts) for fewer in below}


def lower_histogram(counts: Sequence[int], bits: int) -> list[int]:
    """Return an estimate of the codes with so many bits fewer and a step of 2^bits, as a lowered layer starts.

    A weight lies within half a step of its code c, so its new code is c / 2^bits rounded, except if that falls between
    two codes: there a line through the neighbouring counts says how many weights lie on either side.
    """
    old = np.asarray(counts, np.int64)  # (N), and so are all below, but for `new`: (N / 2^bits)
    width = 1 << bits
    codes = np.arange(len(old)) - len(old) // 2
    lower, rest = np.divmod(codes, width)  # the new code below or at c / 2^bits, and how many old steps c is above it
    before, after = np.roll(old, 1), np.roll(old, -1)
    upper_half = np.clip(np.rint(old / 2 - (before - after) / 16), 0, old).astype(np.int64)
    rounded_up = np.where(2 * rest == width, upper_half, np.where(2 * rest > width, old, 0))
    new = np.zeros(len(old) >> bits, np.int64)
    for code, amount in ((lower, old - rounded_up), (lower + 1, rounded_up)):
        place = np.minimum(code + len(new) // 2, len(new) - 1)  # beyond the highest code, clipped to it
        np.add.at(new, place, amount)
    return [int(count) for count in new]


def round_for_page(value: float) -> float:
    """Return a number with seven digits, enough for the eye."""
    return float(f"{value:.7g}")


def _draw_bars(counts: Sequence[int]) -> list[Any]:
    """Return bars, with neighbouring codes together if there are too many; and the entropy."""
    width = -(-len(counts) // MOST_BARS)
    bars = [sum(counts[start : start + width]) for start in range(0, len(counts), width)]
    return [bars, round_for_page(entropy(counts))]

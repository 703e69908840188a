"""What the page shows, as plain data for its script: every number is computed here, none in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from bitplan.core.budget import Budget
from bitplan.core.records import Gains, Graph, Plan
from bitplan.costs.totals import total
from bitplan.reports.budget_axis import Track, encode, lay_track, used
from bitplan.reports.evidence import additivity_data, provenance_data, trials_data
from bitplan.reports.formats import Table
from bitplan.reports.regrets import regret_table
from bitplan.reports.scores import Answer, Scores, answer, gather
from bitplan.reports.spending import spend_table
from bitplan.reports.subject import Candidate, Subject
from bitplan.reports.weights import histograms, short
from bitplan.reports.windows import window_sentences
from bitplan.stats.compare import ALPHA, Cell, Comparison
from bitplan.stats.correction import CORRECTION
from bitplan.stats.regret import regrets

Data = dict[str, Any]


def contents(subject: Subject, plans: dict[str, Plan]) -> Data:
    """The whole page; parts that a single plan cannot have are None."""
    scores, track = gather(subject, plans), lay_track(subject)
    chosen = answer(subject, scores)
    choices = subject.candidates[0].gains.choices
    return {
        "title": subject.title,
        "task": subject.study.task if subject.study else None,
        "choices": [{"name": str(choice), "w": choice.weight_bits, "a": choice.act_bits} for choice in choices],
        "alpha": ALPHA,
        "correction": CORRECTION.words,
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
    """The slider: a stop is [label, place on the axis of budgets, units that it leaves to choosable layers]."""
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
        "used": used(subject, plan.limits[0].cost),
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
    """Where budgets lie on the axis, by how they are written."""
    unit = Budget.parse(subject.budget).unit
    return {written: Budget.parse(written).place(unit) for written in budgets}


def _scores(subject: Subject, scores: Scores) -> Data:
    """Every cell and every test; methods and budgets stand in them as places in `titles` and `budgets`."""
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
        "tests": [test_data(test) for test in scores.comparisons],
        "notes": _notes(subject, scores),
    }


def _spend(subject: Subject, scores: Scores) -> Data | None:
    """Score against spend as a table of texts; headings of numbers begin with ">"."""
    if subject.study is None or not subject.spends:
        return None
    return _texts(spend_table(subject.study, subject.spends, scores.methods, scores.metric))


def _regret(subject: Subject, plans: dict[str, Plan]) -> Data | None:
    """What methods lack against the best plans found, where these were looked for."""
    if subject.study is None or not subject.ceilings:
        return None
    found = regrets(subject.study, subject.results, subject.ceilings, plans)
    return _texts(regret_table(subject.study, subject.ceilings, found))


def _texts(made: Table) -> Data:
    columns = [f">{column.name}" if column.number else column.name for column in made.columns]
    return {"columns": columns, "rows": made.texts(), "notes": list(made.notes)}


def axis_label(subject: Subject) -> str:
    """What the axis of budgets is called."""
    return Budget.parse(subject.budget).unit.axis(subject.account)


def _notes(subject: Subject, scores: Scores) -> list[str]:
    """What is missing or thin, in words."""
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
    """Groups in order; a layer is a list [name, kind, macs, weights, inputs, place in the graph]."""
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
    """A method and its gains, a row for each group that may be chosen."""
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
        "rows": _shortened(gains.rows, names),
        "errors": gains.errors and _shortened(gains.errors, names),
        "ranks": [ranks[name] + 1 for name in names],
    }


def _shortened(rows: Mapping[str, Sequence[float]], names: Sequence[str]) -> list[list[float]]:
    return [[short(value) for value in rows[name]] for name in names]


def _ranks(order: Sequence[str], gains: Gains) -> dict[str, int]:
    """The place of every group by falling gain; equal gains share the better place."""
    ranks: dict[str, int] = {}
    for index, name in enumerate(order):
        before = order[index - 1] if index else None
        tied = before is not None and gains.rows[before][-1] == gains.rows[name][-1]
        ranks[name] = ranks[before] if tied and before else index
    return ranks

"""Records in one to three lines, for consoles and logs; notes follow, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.shown import one_line
from bitplan.core.trials import Recipe, Result


def lines_of(record: Record) -> list[str]:
    """What a record says, its most important line first."""
    write = _WRITERS.get(type(record))
    lines = [f"{type(record).__name__} {record.id}"] if write is None else write(record)
    return [one_line(line) for line in (*lines, *getattr(record, "notes", ()))]


def headline(graph: Graph) -> str:
    """A graph in one line."""
    groups, links = len(graph.groups), len(graph.links)
    macs = sum(layer.macs for layer in graph.layers)
    weights = sum(layer.weights for layer in graph.layers)
    return (
        f"{graph.model}: {len(graph.layers)} layers in {groups} groups ({links} links), {len(graph.selectable)} to "
        f"choose; {macs / 1e9:.3g} GMACs, {weights / 1e6:.3g} M weights"
    )


def counted(precisions: Iterable[Precision]) -> str:
    """How many have which precision, the lowest first."""
    picks = Counter(precisions)
    ordered = sorted(picks, key=lambda precision: (precision.weight_bits, precision.act_bits))
    return ", ".join(f"{picks[precision]} at {precision}" for precision in ordered)


def _method(gains: Gains) -> str:
    """A method with its options."""
    options = ", ".join(f"{key}={value}" for key, value in gains.options.items())
    return f"{gains.method}({options})" if options else gains.method


def _graph(graph: Graph) -> list[str]:
    fixed = Counter(layer.rule for layer in graph.layers if layer.rule)
    rules = ", ".join(f"{count} by the rule {rule!r}" for rule, count in fixed.items())
    return [f"Graph of {headline(graph)}", *([f"fixed layers: {rules}"] if rules else [])]


def _gains(gains: Gains) -> list[str]:
    choices = ", ".join(map(str, gains.choices))
    first = f"Gains by {_method(gains)} of {len(gains.rows)} groups at {choices}"
    if not gains.rows:
        return [first]
    most, least = (pick(gains.rows, key=lambda name: gains.rows[name][-1]) for pick in (max, min))
    values = [f"{gains.rows[name][-1]:.4g} ({name})" for name in (least, most)]
    return [
        first,
        f"from {values[0]} to {values[1]} at {gains.choices[-1]}; {gains.seconds:.3g} s of work{_spend(gains)}",
    ]


def _spend(gains: Gains) -> str:
    """What it took to choose, where that was anything."""
    if gains.spend is None or not gains.spend.passes:
        return ""
    epochs = "" if gains.epochs is None else f" ({gains.epochs:.2g} epochs)"
    seen = ", test scores" if gains.spend.tested else ", labels" if gains.spend.labels else ""
    return f", {gains.spend.passes:,.0f} passes{epochs}{seen}"


def _costs(costs: Costs) -> list[str]:
    columns = list(zip(*costs.rows.values(), strict=True)) or [()] * len(costs.choices)
    sums = [f"{sum(column):,} at {choice}" for column, choice in zip(columns, costs.choices, strict=True)]
    unit = f" {costs.unit}" if costs.unit else ""
    fixed = f"; fixed layers {sum(costs.fixed.values()):,}" if costs.fixed else ""
    return [f"Costs {costs.name} of {len(costs.rows)} groups: {', '.join(sums)}{unit}{fixed}"]


def _plan(plan: Plan) -> list[str]:
    method = f"by {plan.method}, {plan.selector}" if plan.limits else plan.method
    first = f"Plan of {plan.model} ({method}): layers {counted(plan.precisions.values())}"
    used = [f"{limit.budget} of {limit.cost_name}: {limit.cost:,} of {limit.capacity:,}" for limit in plan.limits]
    return [first, *([f"{'; '.join(used)}; {plan.proof}"] if used else [])]


def _result(result: Result) -> list[str]:
    trial = result.trial
    asked = " ".join([trial.method, *trial.budgets, f"seed {trial.seed}"])
    metric = result.metric or "score"
    return [f"Result of {trial.model} on {trial.task}, {asked}: {metric} {result.score:.4g} with plan {result.plan}"]


def _recipe(recipe: Recipe) -> list[str]:
    usual = type(recipe).model_fields
    said = [f"{name}={value!r}" for name, value in recipe if value != usual[name].default]
    return [f"Recipe({', '.join(said)})"]


_WRITERS: dict[type[Record], Callable[[Any], list[str]]] = {
    Graph: _graph,
    Gains: _gains,
    Costs: _costs,
    Plan: _plan,
    Result: _result,
    Recipe: _recipe,
}

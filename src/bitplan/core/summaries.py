"""Records in one to three lines, for consoles and logs; notes follow, a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from bitplan.core.escaping import one_line
from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Layer, Plan
from bitplan.core.trials import Recipe, Result


def describe_record(record: Record) -> list[str]:
    """Return a record in a few lines, the most important first."""
    write = _WRITERS.get(type(record))
    lines = [f"{type(record).__name__} {record.id}"] if write is None else write(record)
    return [one_line(line) for line in (*lines, *getattr(record, "notes", ()))]


def headline(graph: Graph) -> str:
    """Return a graph in one line."""
    groups, links = len(graph.groups), len(graph.links)
    macs = sum(layer.macs for layer in graph.layers)
    weights = sum(layer.weights for layer in graph.layers)
    return (
        f"{graph.model}: {len(graph.layers)} layers in {groups} groups ({links} links), {len(graph.selectable)} to "
        f"choose; {macs / 1e9:.3g} GMACs, {weights / 1e6:.3g} M weights"
    )


def count_precisions(precisions: Iterable[Precision]) -> str:
    """Return how many layers have which precision, the lowest first."""
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
    first = f"Plan of {plan.model} ({method}): layers {count_precisions(plan.precisions.values())}"
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


# --- Records as notebooks show them: a small table with bars, readable on light and on dark, which runs and loads
# nothing.

_WIDE = 160  # pixels of the longest bar
_COLOURS = {2: "#d97706", 3: "#65a30d", 4: "#0891b2", 8: "#4f7fe0"}
_OTHER, _BELOW = "#8b6fc0", "#dc5a5a"  # other bits; what is below 0
_STYLE = """<style>
.bitplan{font:13px/1.45 system-ui,sans-serif;color:inherit;max-width:80em}
.bitplan .rows{max-height:30em;overflow:auto;margin:.4em 0}
.bitplan table{border-collapse:collapse;margin:0;background:none;color:inherit;font-size:inherit}
.bitplan th,.bitplan td{text-align:left;padding:1px 12px 1px 0;border:0;background:none;vertical-align:middle}
.bitplan th,.bitplan td{white-space:nowrap}
.bitplan th{font-weight:600;opacity:.7}
.bitplan .n{text-align:right;font-variant-numeric:tabular-nums}
.bitplan code{font:12px ui-monospace,monospace;background:none;color:inherit;padding:0}
.bitplan i{display:inline-block;height:.75em;border-radius:2px;vertical-align:baseline}
.bitplan .quiet{opacity:.7}
</style>"""
Cells = Sequence[str]


def render_record(record: Record) -> str | None:
    """The page of a record; None for kinds that have none."""
    draw = _DRAWERS.get(type(record))
    if draw is None:
        return None
    first, *others = (escape(line) for line in describe_record(record))
    told = f"<div><b>{first}</b></div>" + "".join(f'<div class="quiet">{line}</div>' for line in others)
    return f'<div class="bitplan">{_STYLE}{told}{draw(record)}</div>'


def _render_graph(graph: Graph) -> str:
    """Layers with what they cost, which are linked and why some are fixed."""
    most = max(layer.macs for layer in graph.layers)
    names = {name: f"link {number}" for number, link in enumerate(graph.links, 1) for name in link.layers}
    through = {name: link.through for link in graph.links for name in link.layers}
    rows = []
    for layer in graph.layers:
        linked = f'<span title="{_text(through[layer.name])}">{names[layer.name]}</span>' if layer.name in names else ""
        macs = f"{layer.macs:,}", _bar(layer.macs, most, wide=_WIDE // 2)
        rows.append((_name(layer.name), _text(layer.kind), *macs, f"{layer.weights:,}", linked, _fixed(layer)))
    return _table(("layer", "kind", ">MACs", "", ">weights", "reads", "precision"), rows)


def _fixed(layer: Layer) -> str:
    return f"{layer.fixed}, {_text(layer.why)}" if layer.fixed else "<b>to choose</b>"


def _render_gains(gains: Gains) -> str:
    """A bar for what the highest choice gains; below 0 in another colour."""
    most = max((abs(row[-1]) for row in gains.rows.values()), default=0.0)
    errors = gains.errors or {}
    rows = []
    for name, row in gains.rows.items():
        colour = _BELOW if row[-1] < 0 else _COLOURS[4]
        error = f"± {errors[name][-1]:.2g}" if name in errors else ""
        figures = [f"{value:.4g}" for value in row[1:]]
        rows.append((_name(name), *figures, error, _bar(abs(row[-1]), most, colour)))
    columns = [f">{choice}" for choice in gains.choices[1:]]
    return _table(("group", *columns, ">", f"gain over {gains.choices[0]}"), rows)


def _render_costs(costs: Costs) -> str:
    """A bar for what a group costs at the highest choice, and fixed layers beside."""
    most = max([row[-1] for row in costs.rows.values()] + list(costs.fixed.values()), default=0)
    rows = [
        (_name(name), *(f"{value:,}" for value in row), _bar(row[-1], most, _COLOURS[4]))
        for name, row in costs.rows.items()
    ]
    blank = ("",) * (len(costs.choices) - 1)
    rows += [
        (_name(name), *blank, "not measured" if name in costs.lacking else f"{value:,}", f"{_bar(value, most)} fixed")
        for name, value in costs.fixed.items()
    ]
    return _table(("group", *(f">{choice}" for choice in costs.choices), _text(costs.unit)), rows)


def _render_plan(plan: Plan) -> str:
    """A bar for the bits of each layer's weights, and one for those of its inputs."""
    linked = {name: f"link {number}" for number, link in enumerate(plan.links, 1) for name in link}
    rows = [
        (_name(name), str(precision), _bits(precision), linked.get(name, ""))
        for name, precision in plan.precisions.items()
    ]
    return _table(("layer", "bits", "weights, inputs", "reads"), rows)


def _bits(precision: Precision) -> str:
    bars = [_bar(bits, 16, _COLOURS.get(bits, _OTHER), 80) for bits in (precision.weight_bits, precision.act_bits)]
    return "".join(f'<span style="display:inline-block;width:90px">{bar}</span>' for bar in bars)


def _render_result(result: Result) -> str:
    """What was trained, and how the loss went."""
    trial = result.trial
    facts = {
        "score": f"{result.score:.6g} {result.metric}",
        "method": " ".join([trial.method, *trial.budgets]),
        "seed": trial.seed,
        "plan": result.plan,
        "time": f"{result.seconds:.3g} s on {result.device or 'an unknown device'}",
    }
    losses = [float(str(line["loss"])) for line in result.log if line.get("loss") is not None]
    rows = [(_text(key), _text(value)) for key, value in facts.items()]
    return _table(("", ""), [*rows, ("loss", _line(losses))] if len(losses) > 1 else rows)


def _line(values: Sequence[float]) -> str:
    """A curve as large as a few words."""
    low, high = min(values), max(values)
    span, last = (high - low) or 1.0, len(values) - 1
    points = " ".join(
        f"{_WIDE * place / last:.1f},{24 * (high - value) / span + 2:.1f}" for place, value in enumerate(values)
    )
    curve = f'<polyline points="{points}" fill="none" stroke="{_COLOURS[4]}" stroke-width="1.5"/>'
    words = f"{values[0]:.3g} → {values[-1]:.3g}"
    return f'<svg width="{_WIDE}" height="28" role="img" aria-label="{words}">{curve}</svg> {words}'


def _bar(value: float, most: float, colour: str = "#8a8f98", wide: int = _WIDE) -> str:
    width = 0.0 if not most else wide * value / most
    return f'<i style="width:{width:.1f}px;background:{colour}"></i>'


def _table(columns: Cells, rows: Iterable[Cells]) -> str:
    """Columns that start with ">" are numbers. Cells are HTML."""
    classes = [' class="n"' if column.startswith(">") else "" for column in columns]
    marked = list(zip(classes, columns, strict=True))
    head = "".join(f"<th{kind}>{column.removeprefix('>')}</th>" for kind, column in marked)
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="rows"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _name(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _text(value: object) -> str:
    return escape(one_line(value))


_DRAWERS: dict[type[Record], Callable[[Any], str]] = {
    Graph: _render_graph,
    Gains: _render_gains,
    Costs: _render_costs,
    Plan: _render_plan,
    Result: _render_result,
}

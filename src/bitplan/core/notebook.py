"""Records as notebooks show them: a small table with bars, readable on light and on dark, which runs and loads nothing.

Colours of text are the notebook's own; those of bars lie between light and dark. What stands in names is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from bitplan.core.brief import lines_of
from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Costs, Gains, Graph, Layer, Plan
from bitplan.core.shown import one_line
from bitplan.core.trials import Result

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


def html_of(record: Record) -> str | None:
    """The page of a record; None for kinds that have none."""
    draw = _DRAWERS.get(type(record))
    if draw is None:
        return None
    first, *others = (escape(line) for line in lines_of(record))
    told = f"<div><b>{first}</b></div>" + "".join(f'<div class="quiet">{line}</div>' for line in others)
    return f'<div class="bitplan">{_STYLE}{told}{draw(record)}</div>'


def _graph(graph: Graph) -> str:
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


def _gains(gains: Gains) -> str:
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


def _costs(costs: Costs) -> str:
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


def _plan(plan: Plan) -> str:
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


def _result(result: Result) -> str:
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
    Graph: _graph,
    Gains: _gains,
    Costs: _costs,
    Plan: _plan,
    Result: _result,
}

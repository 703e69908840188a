"""Records, runs and tables on the terminal, drawn by rich."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from bitplan.cli.terminal import say, say_json
from bitplan.core.budget import Account, Budget
from bitplan.core.escaping import escape_text
from bitplan.core.method_facts import describe_method
from bitplan.core.precision import Precision
from bitplan.core.progress import clock
from bitplan.core.record import Record
from bitplan.core.records import Checkpoint, Costs, Gains, Graph, Layer, Limit, Plan
from bitplan.core.studies import Fit, Pairs, Study
from bitplan.core.summaries import count_precisions, headline
from bitplan.costs.standard import total
from bitplan.reports.formats import Column, Table, to_json

if TYPE_CHECKING:
    from bitplan.selection.confidence import Confidence
    from bitplan.selection.frontier import Frontier
    from bitplan.study.forecast import Forecast
    from bitplan.study.status import Checked, Status
    from bitplan.study.sweep import Summary

_WIDTH = 160  # where the output is on no terminal
_PADDING = re.compile(r" +$", re.MULTILINE)


class ShownConsole(Console):
    """A console on which escape sequences and markup in a text have no effect."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before anything is measured, so that columns fit the escaped text."""
        return super().render_str(escape_text(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape whatever reaches the screen by another way."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else escape_text(text), style, control)


class _Trimmed:
    """A pipe or a file without blanks at the ends of lines, which a pager would fold."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def console() -> Console:
    """The terminal, or a plain page where the output goes elsewhere."""
    if sys.stdout.isatty():
        return ShownConsole(highlight=False, markup=False)
    return ShownConsole(width=_page_width(), file=_Trimmed(sys.stdout), highlight=False, markup=False)  # type: ignore[arg-type]


def _page_width() -> int:
    """Return COLUMNS, or the width of the terminal that a pipe is read on, or a wide default."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _WIDTH
    except (OSError, ValueError):  # it is none, or has none
        return _WIDTH


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on standard error until the block ends; yield the function that moves it."""
    words = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words)
    beside = ShownConsole(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=beside, transient=True) as progress:
        task = progress.add_task(escape_text(what), total=None)
        yield lambda done, total, what: progress.update(
            task, completed=done, total=total, description=escape_text(what)
        )


_COLOURS = {2: "yellow", 3: "green", 4: "cyan", 8: "blue"}
_WIDE = 120  # from here on there is room for everything
_FIELD = 400  # characters of a field
_NAMES = 40  # longer names of layers may be folded
_UNSURE = "The gains by {} carry no standard errors, so how sure each choice is cannot be said"


def table(*columns: str, title: str | None = None) -> RichTable:
    """An empty table; columns that start with ">" are numbers."""
    made = RichTable(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    for column in columns:
        if column.startswith(">"):
            made.add_column(column.removeprefix(">"), justify="right", overflow="fold", no_wrap=True)
        else:
            made.add_column(column, justify="left", overflow="fold", no_wrap=False)
    return made


def show_graph(graph: Graph) -> None:
    """Print the layers in execution order, with links and the layers that the example did not reach."""
    rows = table("layer", "kind", ">MACs", ">weights", ">inputs", "precision", "why")
    for layer in graph.layers:
        bits = _bits(layer.fixed.weight_bits) if layer.fixed else Text("to choose", "bold")
        rows.add_row(
            layer.name, layer.kind, f"{layer.macs:,}", f"{layer.weights:,}", f"{layer.in_features:,}", bits,
            _reason(layer, graph),
        )  # fmt: skip
    out = console()
    out.print(rows)
    out.print(f"\n{headline(graph)}")
    if graph.unreached:
        out.print(_describe_unreached(graph))


def _describe_unreached(graph: Graph) -> str:
    return f"Not reached by the example input, so not planned: {', '.join(graph.unreached)}"


def show_rows(record: Gains | Costs) -> None:
    """One line per group, one column per choice."""
    rows = table("group", *(f">{choice}" for choice in record.choices), title=record.label)
    errors = (record.errors if isinstance(record, Gains) else None) or {}
    for name, row in record.rows.items():
        own_errors = errors.get(name, (0.0,) * len(row))
        rows.add_row(name, *(_number_text(value, error) for value, error in zip(row, own_errors, strict=True)))
    console().print(rows)


def _number_text(value: float, error: float) -> str:
    """A gain or a cost; costs are whole numbers."""
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"{text} ± {error:.2g}" if error else text


def show_plan(
    plan: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], explain: bool, sure: Confidence | None = None
) -> None:
    """The answer first, then the layers; with reasons where asked for, and with how sure they are where it is known."""
    out = console()
    out.print(headline(graph))
    for line in (*plan_lines(plan, graph, costs), _count_choices(plan, graph)):
        out.print(line)
    out.print()
    if explain:
        out.print(_explain_rows(plan, graph, gains, costs[0], sure, wide=out.width >= _WIDE))
        out.print(f"\n{sure or _UNSURE.format(gains.method)}")
    else:
        out.print(_bars(plan, graph))
    if graph.unreached:
        out.print(f"\n{_describe_unreached(graph)}")


def plan_lines(plan: Plan, graph: Graph, costs: Sequence[Costs]) -> list[str]:
    """Return a line for each budget, for the gain and for the size of a plan."""
    accounts = {cost.name: Account.of(graph, cost) for cost in costs}
    lines = [_limit_line(limit, accounts.get(limit.cost_name)) for limit in plan.limits]
    lines += [_file_line(plan, graph, cost) for cost in costs if cost.target]
    lines += [_describe_binding(plan.limits)] if len(plan.limits) > 1 else []
    lines.append(f"gain {plan.gain:.6g} by {plan.method}, {plan.selector} selection ({plan.proof})")
    figures = total(plan, graph)
    lines.append(
        f"{figures.bops / 1e9:.4g} GBOPs ({figures.bops_without_ends / 1e9:.4g} without first and last layer), "
        f"{figures.bits / 8e6:.4g} MB of weights, {figures.compression:.2f}× smaller than 32-bit"
    )
    return lines


def _limit_line(limit: Limit, account: Account | None) -> str:
    """Return how much of a budget is used, of the whole network if the budget counts it."""
    more = f"one more percent would gain {limit.shadow_price:.4g}"
    if limit.fixed is None or account is None:
        spent = f"{limit.cost:,} of {limit.capacity:,} used, {limit.slack:,} left"
        return f"{limit.budget} of {limit.cost_name}: {spent}; {more}"
    budget = Budget.parse(limit.budget)
    used, fixed = (budget.unit.told(spent, account) for spent in (limit.cost, 0))
    left = budget.unit.text(limit.slack / budget.unit.one(account))
    return f"{budget.words(limit.cost_name)}: {used} used, {fixed} of it by fixed layers, {left} left; {more}"


def _file_line(plan: Plan, graph: Graph, cost: Costs) -> str:
    """Return the bytes of the tensors in a target's file, and the bits per weight."""
    chosen = sum(cost.rows[group.name][cost.choices.index(plan.precisions[group.name])] for group in graph.selectable)
    weights, every = (sum(one.weights for one in groups) for groups in (graph.selectable, graph.groups))
    fixed = sum(cost.fixed.values())
    return (
        f"{cost.name}: {chosen + fixed:,} bytes of tensors, {fixed:,} of them fixed; {8 * chosen / weights:.3f} bits "
        f"for each chosen weight, {8 * (chosen + fixed) / every:.3f} for each of all"
    )


def _describe_binding(limits: Sequence[Limit]) -> str:
    """Which of several budgets hold the plan back: more of them would gain something."""
    binding = [limit.cost_name for limit in limits if limit.shadow_price > 0]
    idle = [limit.cost_name for limit in limits if limit.shadow_price <= 0]
    if not binding:
        return "no budget binds alone: one more percent of any of them would gain nothing"
    return f"binding: {', '.join(binding)}" + (f"; there is room in {', '.join(idle)}" if idle else "")


def _count_choices(plan: Plan, graph: Graph) -> str:
    """Return the number of groups at each precision."""
    shares = count_precisions(plan.precisions[group.name] for group in graph.selectable)
    fixed = len(graph.groups) - len(graph.selectable)
    return f"groups: {shares}; {fixed} fixed by rules" if fixed else f"groups: {shares}"


def _bars(plan: Plan, graph: Graph) -> RichTable:
    rows = table("layer", "bits", "", "why")
    rows.columns[0].min_width = _name_width(graph)
    for layer in graph.layers:
        precision = plan.precisions[layer.name]
        rows.add_row(layer.name, str(precision), _draw_bits(precision), _reason(layer, graph, through=False))
    return rows


def _name_width(graph: Graph) -> int:
    """Return the least width of the column of names."""
    return min(_NAMES, max(len(layer.name) for layer in graph.layers))


def _draw_bits(precision: Precision) -> Text:
    """A block per bit of the weights, so that the eye finds the low layers without colour too."""
    return Text("█" * precision.weight_bits, _COLOURS.get(precision.weight_bits, "magenta"))


def _explain_rows(
    plan: Plan, graph: Graph, gains: Gains, cost: Costs, sure: Confidence | None, *, wide: bool
) -> RichTable:
    """Gain and cost of every layer's choice, how sure it is where known, and why it is fixed or linked.

    Where the terminal is wide, also the group that a layer belongs to: it has the name of its first layer.
    """
    columns = ["layer", "bits", "", "group", ">gain", f">{cost.name}", ">sure", "why"]
    left_out = set()
    if not wide:
        left_out.add("group")
    if sure is None:
        left_out.add(">sure")
    rows = table(*(name for name in columns if name not in left_out))
    rows.columns[0].min_width = _name_width(graph)
    group_of = {layer.name: group.name for group in graph.groups for layer in group.layers}
    for layer in graph.layers:
        precision, group = plan.precisions[layer.name], group_of[layer.name]
        if layer.fixed:
            price = "not measured" if layer.name in cost.lacking else f"{cost.fixed.get(layer.name, 0):,}"
            gain = kept = ""
        elif layer.name != group:
            gain = price = kept = "″"  # those of its group stand in the line of the first layer
        else:
            pick = gains.choices.index(precision)
            gain = f"{gains.rows[group][pick]:.4g} of {gains.rows[group][-1]:.4g}"
            price = f"{cost.rows[group][pick]:,}"
            kept = f"{sure.share(group):.0%}" if sure else ""
        why = _reason(layer, graph, through=wide)
        cells: list[str | Text] = [layer.name, str(precision), _draw_bits(precision), group, gain, price, kept, why]
        rows.add_row(*(cell for name, cell in zip(columns, cells, strict=True) if name not in left_out))
    return rows


def _reason(layer: Layer, graph: Graph, *, through: bool = True) -> str:
    """Return why a layer is fixed and which layers it is linked to."""
    reasons = [layer.why] if layer.why else []
    link = graph.link_of(layer.name)
    if link:
        others = ", ".join(name for name in link.layers if name != layer.name)
        reasons.append(f"linked to {others} through {link.through}" if through else f"linked to {others}")
    return "; ".join(reasons)


def _bits(bits: int) -> Text:
    return Text(f"{bits} bits", _COLOURS.get(bits, "magenta"))


def show_frontier(frontier: Frontier, budgets: Sequence[str], *, as_json: bool) -> None:
    """The best plan at each budget; as JSON, every point of the frontier as well."""
    plans = [frontier.plan(budget) for budget in budgets]
    if as_json:
        pairs = zip(frontier.costs, frontier.values, strict=True)
        points = [{"cost": int(cost), "gain": float(gain)} for cost, gain in pairs]
        _print_json({"points": points, "plans": [json.loads(plan.to_json()) for plan in plans]})
        return
    console().print(_frontier_rows(frontier, plans))
    where = "on the whole frontier" if frontier.complete else "on the concave hull of the frontier"
    console().print(f"\n{len(frontier):,} points {where} of {frontier.cost.name}; --json has them all")
    if any(plan.limits[0].fixed is not None for plan in plans):
        console().print("Amounts are those of the whole network, fixed layers included; a share would be without them")


def _frontier_rows(frontier: Frontier, plans: Sequence[Plan]) -> RichTable:
    """Return a row per plan: its budget, its cost and gain, and the groups at each precision."""
    choices = frontier.cost.choices
    counted = [f">at {choice}" for choice in choices]
    rows = table(
        "budget", ">used", ">gain", ">one % more", *counted, ">GBOPs", ">smaller", title=headline(frontier.graph)
    )
    for plan in plans:
        limit, figures = plan.limits[0], total(plan, frontier.graph)
        unit = Budget.parse(limit.budget).unit.on_axis
        picks = [plan.precisions[group.name] for group in frontier.graph.selectable]
        used = unit.told(limit.cost, frontier.account, more=1)
        rows.add_row(
            limit.budget, used, f"{plan.gain:.5g}", f"+{limit.shadow_price:.3g}",
            *(str(picks.count(choice)) for choice in choices),
            f"{figures.bops / 1e9:.4g}", f"{figures.compression:.2f}×",
        )  # fmt: skip
    return rows


def show_names(names: Mapping[str, str], *, as_json: bool) -> None:
    """Print names with a few words about each."""
    if as_json:
        _print_json(list(names))
        return
    if not names:
        console().print("none yet")
        return
    described = any(names.values())
    rows = table("name", "what it is") if described else table("name")
    for name, summary in names.items():
        if described:
            rows.add_row(name, summary)
        else:
            rows.add_row(name)
    console().print(rows)


def show_quantizers(methods: Mapping[str, Mapping[str, str]], *, as_json: bool) -> None:
    """Print quantizers with their bits, uniformity, options and sources."""
    if as_json:
        _print_json(methods)
        return
    rows = table("name", "what it is", "weights", "inputs", "uniform", "options", "from")
    for name, said in methods.items():
        rows.add_row(name, *said.values())
    console().print(rows)


def show_difference(first: Plan, second: Plan, *, as_json: bool) -> None:
    """The layers whose precision differs."""
    names = list(dict.fromkeys([*first.precisions, *second.precisions]))
    pairs = {name: (first.precisions.get(name), second.precisions.get(name)) for name in names}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if as_json:
        _print_json({name: [ours and str(ours), theirs and str(theirs)] for name, (ours, theirs) in differing.items()})
        return
    out = console()
    if not differing:
        out.print(f"the same precisions for all {len(names)} layers")
        return
    rows = table("layer", "first", "second", "change")
    for name, (ours, theirs) in differing.items():
        rows.add_row(name, str(ours or "absent"), str(theirs or "absent"), _change(ours, theirs))
    out.print(rows)
    out.print(f"\n{len(differing)} of {len(names)} layers differ")


def _change(first: Precision | None, second: Precision | None) -> str:
    """Return whether a layer got more or fewer bits, or nothing if one plan lacks it."""
    if first is None or second is None:
        return ""
    if second.above(first):
        return "more bits"
    return "fewer bits" if first.above(second) else "mixed bits"


def show_record(record: Record) -> None:
    """Print a graph, gains, costs or a plan as a table; of another record its fields."""
    if isinstance(record, Graph):
        show_graph(record)
    elif isinstance(record, Gains | Costs):
        show_rows(record)
    elif isinstance(record, Plan):
        _show_precisions(record)
    elif isinstance(record, Checkpoint) and record.plan is not None:
        say(f"{record.kind()} {record.id} of {record.spec or 'a model that it does not name'}")
        _show_precisions(record.plan)
    else:
        say(str(record))
        rows = table("field", "value")
        for name, value in record.model_dump(mode="json").items():
            text = json.dumps(value, ensure_ascii=False)
            rows.add_row(name, text if len(text) <= _FIELD else f"{text[:_FIELD]} …")
        console().print(rows)


def _show_precisions(plan: Plan) -> None:
    """Print a plan without its graph."""
    out = console()
    out.print(str(plan))
    rows = table("layer", "bits", "")
    for name, precision in plan.precisions.items():
        rows.add_row(name, str(precision), _draw_bits(precision))
    out.print(rows)


def _print_json(content: object) -> None:
    say_json(json.dumps(content, indent=1))


def show_score(task: Any, scores: Mapping[str, float], facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the scores of a network on a task's test split, and further facts."""
    if as_json:
        say_json(json.dumps({"task": task.name, "scores": dict(scores), **facts}))
        return
    listed = ", ".join(f"{metric} {score:.2f}" for metric, score in scores.items())
    more = "".join(f"; {name} {value}" for name, value in facts.items())
    say(f"{listed} on the {task.size('test'):,} test samples of {task.name}{more}")


_LETTERS = (
    "passes: of one sample through the network, backwards counts 2; N samples that are looked at, T of an epoch of "
    "training, G groups, C choices, P plans. docs/methods.md has the formulas."
)


def show_methods(methods: Mapping[str, type], *, as_json: bool) -> None:
    """Print methods with their needs, costs and sources."""
    if as_json:
        told = {name: describe_method(method) for name, method in methods.items()}
        plain = {name: None if about is None else dataclasses.asdict(about) for name, about in told.items()}
        say_json(json.dumps(plain, indent=1, ensure_ascii=False))
        return
    rows = table("name", "what it is", "data", "labels", "trains", "passes", "source")
    for name, method in methods.items():
        about, what = describe_method(method), (method.__doc__ or "").split("\n")[0]
        if about is None:
            rows.add_row(name, what, *["–"] * 5)
            continue
        seen = ["yes" if yes else "no" for yes in (about.data, about.labels, about.trains)]
        rows.add_row(name, what, *seen, about.passes, about.source)
    console().print(rows)
    say(_LETTERS)


_FAILURES_SHOWN = 5
_BAR = 24  # blocks of a bar
_GAP = 2  # between two columns
_LEAST = 16  # what a column of texts keeps of its width where room is scarce
_FIRST_NAMES = 24  # and the first one, which says what a row is about


def show_table(content: Table) -> None:
    """A table of a run on the terminal; one that is too wide goes on below, its first column repeated."""
    out, texts = console(), [[escape_text(text) for text in row] for row in content.texts()]
    for row, column in content.best:
        texts[row][column] = f"* {texts[row][column]}"
    widths = [_column_width(column, cells) for column, *cells in zip(content.columns, *texts, strict=True)]
    widths[0] = dataclasses.replace(widths[0], least=min(_FIRST_NAMES, widths[0].wanted))
    out.print(Text(content.title, "bold"))
    for part, columns in enumerate(_parts(widths, out.width)):
        rows = list(range(len(texts)))
        if part > 0:
            out.print()
            rows = [row for row in rows if any(content.rows[row][column] is not None for column in columns[1:])]
        made = _make_rows([content.columns[column] for column in columns], _share_width(widths, columns, out.width))
        for row in rows:
            cells = []
            for column in columns:
                style = "bold" if (row, column) in content.best else ""
                cells.append(Text(texts[row][column], style))
            made.add_row(*cells)
        out.print(made)
    for note in content.notes:
        out.print(_indent(note))
    if content.best:
        out.print(_indent("* the best of its column"))
    out.print()


def _make_rows(columns: Sequence[Column], widths: Sequence[int]) -> RichTable:
    """An empty table with these columns, each exactly so wide."""
    made = table(*(f">{column.name}" if column.number else column.name for column in columns))
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
        column.no_wrap = False  # the headings of numbers may be folded
    return made


@dataclasses.dataclass(frozen=True)
class _Width:
    """The least width of a column and the one it would like."""

    least: int
    wanted: int


def _column_width(column: Column, cells: Sequence[str]) -> _Width:
    """Headings and texts may be folded, numbers may not."""
    content = max(map(cell_len, cells), default=0)
    wanted = max(content, cell_len(column.name))
    if column.number:
        return _Width(max(content, *map(cell_len, column.name.split()), 1), wanted)
    return _Width(min(_LEAST, wanted), wanted)


def _share_width(widths: Sequence[_Width], columns: Sequence[int], room: int) -> list[int]:
    """Return the widths of these columns; spare room goes first to those that lack little."""
    given = {column: widths[column].least for column in columns}
    spare = room - sum(given.values()) - _GAP * (len(columns) - 1)
    for column in sorted(columns, key=lambda column: widths[column].wanted - widths[column].least):
        more = max(0, min(widths[column].wanted - given[column], spare))
        given[column] += more
        spare -= more
    return list(given.values())


def _indent(content: str | RichTable) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _parts(widths: Sequence[_Width], room: int) -> list[list[int]]:
    """Which columns stand side by side: all of them where they fit, else the first with as many as do."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = sum(widths[before].least + _GAP for before in parts[-1])
        if len(parts[-1]) > 1 and taken + widths[column].least > room:
            parts.append([0])
        parts[-1].append(column)
    return parts


def print_tables(tables: Mapping[str, Table]) -> None:
    """Several tables as one JSON object."""
    content = {name: json.loads(to_json(one)) for name, one in tables.items()}
    say_json(json.dumps(content, indent=1, ensure_ascii=False))


def show_status(status: Status, *, as_json: bool, by_method: bool = True) -> None:
    """Print the progress of a run, its running and failed trials; `by_method` adds a bar for each method."""
    if as_json:
        _print_status(status)
        return
    out = console()
    out.print(_status_line(status))
    if by_method and status.parts:
        out.print(_indent(_meters(status)))
    for job in status.running:
        step = f", step {job.step}" if job.step else ""
        out.print(_indent(f"running: {job.what}{step}"))
    for failed in status.failed[:_FAILURES_SHOWN]:
        out.print(f"  failed: {status.study.words(failed.trial)}: {' '.join(failed.error.split())}")
    if status.failed:
        out.print("  tracebacks are in failures/; `bitplan sweep --retry` tries them again")
    for line in status.damaged[:_FAILURES_SHOWN]:
        out.print(f"  damaged: {line}")
    if status.damaged:
        out.print("  `bitplan run store check` names all; `bitplan sweep` mends what it can and says what is missing")
    if status.missing:
        out.print("  `bitplan sweep --redo-damaged` does the missing ones again, whose results were damaged")


def _print_status(status: Status) -> None:
    """Print the status as JSON: the study by its name, failures in words."""
    content = dataclasses.asdict(dataclasses.replace(status, study=status.study.name, failed=(), parts=()))  # type: ignore[arg-type]
    del content["parts"]
    content["failed"] = [{"trial": status.study.words(one.trial), "error": one.error} for one in status.failed]
    say_json(json.dumps(content, indent=1))


def _status_line(status: Status) -> str:
    line = f"{status.study.name}: {status.done} of {status.total} trials done"
    if status.shared:
        line += f" ({status.shared} of all share a training with another)"
    line += f", {len(status.running)} running, {len(status.failed)} failed, {status.waiting} waiting"
    if status.missing:
        line += f", {status.missing} missing"
    unfinished = status.waiting or status.running
    if unfinished and status.seconds_left is not None:
        line += f"; about {clock(status.seconds_left)} left"
    return line


def _meters(status: Status) -> RichTable:
    """A bar for the whole run, and one for each method and reference; failures where there are any."""
    from bitplan.study.status import MethodProgress

    rows = table("", "", ">done", ">failed") if status.failed else table("", "", ">done")
    rows.show_header = bool(status.failed)
    whole = MethodProgress("all trials", status.total, status.done, len(status.failed))
    for part in (whole, *status.parts):
        full = _BAR * part.done // max(1, part.total)
        blocks = Text("█" * full, "green").append("░" * (_BAR - full), "dim")
        counts = [f"{part.done}/{part.total}"]
        if status.failed:
            counts.append(str(part.failed or ""))
        rows.add_row(Text(escape_text(part.title), "bold" if part is whole else ""), blocks, *counts)
    return rows


def show_forecast(study: Study, folder: Path, forecast: Forecast, *, as_json: bool) -> None:
    """Every trial with its seconds, then the sums."""
    if as_json:
        _print_forecast(study, forecast)
        return
    rows = table("trial", "id", ">about", "state", title=f"{study.name} → {folder}")
    for line in forecast.lines:
        state = "done" if line.done else "to do"
        rows.add_row(study.words(line.trial), line.trial.id, clock(line.seconds), state)
    out = console()
    out.print(rows)
    left = sum(not line.done for line in forecast.lines)
    methods = "".join(f"; {title} estimates for about {clock(seconds)}" for title, seconds in forecast.methods.items())
    out.print(
        f"\n{left} of {len(forecast.lines)} trials to do: at most about {clock(forecast.seconds)} in turn "
        f"({1000 * forecast.step_seconds:.0f} ms a step){methods}; {forecast.bytes_kept / 1e6:.1f} MB kept, and "
        f"{forecast.bytes_passing / 1e6:.1f} MB at a time for each training. Trials that choose the same layers are "
        "trained once."
    )


def _print_forecast(study: Study, forecast: Forecast) -> None:
    trials = []
    for line in forecast.lines:
        trial = line.trial
        trials.append({"id": trial.id, "trial": study.words(trial), "done": line.done, "seconds": line.seconds})
    names = [field.name for field in dataclasses.fields(forecast) if field.name != "lines"]
    sums = {name: getattr(forecast, name) for name in names}
    say_json(json.dumps({"trials": trials, **sums}, indent=1))


def print_summary(summary: Summary, folder: Path) -> None:
    """Print the counts of a finished sweep as JSON."""
    counts = {"total": summary.total, "done": summary.done, "failed": len(summary.failed)}
    counts["missing"] = len(summary.missing)
    say_json(json.dumps({"run": str(folder), **counts, "trained": summary.trained, "seconds": summary.seconds}))


def show_check(checked: Checked, *, as_json: bool) -> None:
    """Print a line for each damaged file of a run, then the number of files checked."""
    if as_json:
        wrong = [{"path": str(one.path), "what": one.what} for one in checked.wrong]
        unknown = [str(path) for path in checked.unknown]
        say_json(json.dumps({"files": checked.files, "wrong": wrong, "unknown": unknown}, indent=1))
        return
    for one in checked.wrong:
        what = " ".join(one.what.split())
        say(what if str(one.path) in what else f"{one.path}: {what}")
    for path in checked.unknown:
        say(f"not checked, since it carries no checksum: {path}")
    say(f"{checked.files} files checked: {f'{len(checked.wrong)} wrong' if checked.wrong else 'all sound'}")


def show_additivity(pairs: Pairs | None, fit: Fit | None, *, as_json: bool) -> None:
    """Print the results of both experiments on additivity."""
    if as_json:
        records = [record for record in (pairs, fit) if record is not None]
        say_json(json.dumps({record.kind(): json.loads(record.to_json()) for record in records}, indent=1))
        return
    out = console()
    if pairs is not None:
        out.print(
            f"{len(pairs.pairs)} pairs of groups, by {pairs.metric}: predicted against measured drop R = "
            f"{pairs.correlation:.3f} (the paper: 0.98)"
        )
    if fit is not None:
        held = "none" if fit.correlation_held_out is None else f"{fit.correlation_held_out:.4f}"
        out.print(
            f"{fit.networks} random plans of {fit.epochs:.3g} epochs, by {fit.metric}: R = {fit.correlation:.4f} on "
            f"those fitted, {held} on those held out (the paper: 0.9996 and 0.9994); residual {fit.residual:.3g}"
        )

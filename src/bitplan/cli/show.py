"""Records as tables for people."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bitplan.core.budget import Budget
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph, Layer, Limit, Plan
from bitplan.core.units import Account
from bitplan.costs.totals import total
from bitplan.plan.confidence import Confidence
from bitplan.plan.frontier import Frontier

_COLOURS = {2: "yellow", 3: "green", 4: "cyan", 8: "blue"}
_WIDTH = 160  # where the output is no terminal
_WIDE = 120  # from here on there is room for everything
_NAMES = 40  # longer names of layers may be folded
_UNSURE = "The gains by {} carry no standard errors, so how sure each choice is cannot be said"


def console() -> Console:
    """The terminal, or a plain wide page where the output goes into a file."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns that start with ">" are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return made


def show_graph(graph: Graph) -> None:
    """Layers in execution order, links and what the example did not reach."""
    rows = table("layer", "kind", ">MACs", ">weights", ">inputs", "precision", "why")
    for layer in graph.layers:
        rows.add_row(
            layer.name, layer.kind, f"{layer.macs:,}", f"{layer.weights:,}", f"{layer.in_features:,}",
            _bits(layer.fixed.weight_bits) if layer.fixed else Text("to choose", "bold"), _reason(layer, graph),
        )  # fmt: skip
    out = console()
    out.print(rows)
    out.print(f"\n{headline(graph)}")
    if graph.unreached:
        out.print(f"Not reached by the example input, so not planned: {', '.join(graph.unreached)}")


def headline(graph: Graph) -> str:
    """A graph in one line."""
    groups, links = len(graph.groups), len(graph.links)
    macs, weights = (sum(getattr(layer, field) for layer in graph.layers) for field in ("macs", "weights"))
    return (
        f"{graph.model}: {len(graph.layers)} layers in {groups} groups ({links} links), {len(graph.selectable)} to "
        f"choose; {macs / 1e9:.3g} GMACs, {weights / 1e6:.3g} M weights"
    )


def show_rows(record: Gains | Costs) -> None:
    """One line per group, one column per choice."""
    rows = table("group", *(f">{choice}" for choice in record.choices), title=record.label)
    errors = getattr(record, "errors", None) or {}
    for name, row in record.rows.items():
        shown = [f"{value:,}" if isinstance(value, int) else f"{value:.6g}" for value in row]
        after = [f" ± {error:.2g}" if error else "" for error in errors.get(name, [0] * len(row))]
        rows.add_row(name, *map("".join, zip(shown, after, strict=True)))
    console().print(rows)


def show_plan(
    plan: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], explain: bool, sure: Confidence | None = None
) -> None:
    """The answer first, then the layers; with reasons where asked for, and with how sure they are where it is known."""
    out = console()
    out.print(headline(graph))
    for line in (*plan_lines(plan, graph, costs), _chosen(plan, graph)):
        out.print(line)
    out.print()
    wide = out.width >= _WIDE
    out.print(_explained(plan, graph, gains, costs[0], sure, wide) if explain else _bars(plan, graph))
    if explain:
        out.print(f"\n{sure or _UNSURE.format(gains.method)}")
    if graph.unreached:
        out.print(f"\nNot reached by the example input, so not planned: {', '.join(graph.unreached)}")


def plan_lines(plan: Plan, graph: Graph, costs: Sequence[Costs]) -> list[str]:
    """What was asked for and what it comes to, a line each."""
    accounts = {cost.name: Account.of(graph, cost) for cost in costs}
    lines = [_limit_line(limit, accounts.get(limit.cost_name)) for limit in plan.limits]
    proof = (
        "no bound" if plan.gap is None else "proven best" if plan.gap == 0 else f"at most {plan.gap:.2g} below the best"
    )
    lines.append(f"gain {plan.gain:.6g} by {plan.method}, {plan.selector} selection ({proof})")
    figures = total(plan, graph)
    lines.append(
        f"{figures.bops / 1e9:.4g} GBOPs ({figures.bops_without_ends / 1e9:.4g} without first and last layer), "
        f"{figures.bits / 8e6:.4g} MB of weights, {figures.compression:.2f}× smaller than 32-bit"
    )
    return lines


def _limit_line(limit: Limit, account: Account | None) -> str:
    """What a budget allowed and what is used of it; of the whole network where that is what was asked for."""
    more = f"one more percent would gain {limit.shadow_price:.4g}"
    if limit.fixed is None or account is None:
        spent = f"{limit.cost:,} of {limit.capacity:,} used, {limit.slack:,} left"
        return f"{limit.budget} of {limit.cost_name}: {spent}; {more}"
    budget = Budget.parse(limit.budget)
    used, fixed = (budget.unit.told(spent, account) for spent in (limit.cost, 0))
    left = budget.unit.text(limit.slack / budget.unit.one(account))
    return f"{budget.words(limit.cost_name)}: {used} used, {fixed} of it by fixed layers, {left} left; {more}"


def _chosen(plan: Plan, graph: Graph) -> str:
    """How many groups got which precision."""
    picks = Counter(plan.precisions[group.name] for group in graph.selectable)
    ordered = sorted(picks, key=lambda one: (one.weight_bits, one.act_bits))
    fixed = len(graph.groups) - len(graph.selectable)
    shares = ", ".join(f"{picks[one]} at {one}" for one in ordered)
    return f"groups: {shares}" + (f"; {fixed} fixed by rules" if fixed else "")


def _bars(plan: Plan, graph: Graph) -> Table:
    rows = table("layer", "bits", "", "why")
    rows.columns[0].min_width = _name_width(graph)
    for layer in graph.layers:
        precision = plan.precisions[layer.name]
        rows.add_row(layer.name, str(precision), _bar(precision), _reason(layer, graph, through=False))
    return rows


def _name_width(graph: Graph) -> int:
    """What the names of layers keep where room is scarce."""
    return min(_NAMES, max(len(layer.name) for layer in graph.layers))


def _bar(precision: Precision) -> Text:
    """A block per bit of the weights, so that the eye finds the low layers without colour too."""
    return Text("█" * precision.weight_bits, _COLOURS.get(precision.weight_bits, "magenta"))


def _explained(plan: Plan, graph: Graph, gains: Gains, cost: Costs, sure: Confidence | None, wide: bool) -> Table:
    """Group, gain and cost of every layer's choice, how sure it is, and why it is fixed or linked."""
    grouped = ["group"] if wide else []
    rows = table("layer", "bits", "", *grouped, ">gain", f">{cost.name}", *([">sure"] if sure else []), "why")
    rows.columns[0].min_width = _name_width(graph)
    leader = {layer.name: group.name for group in graph.groups for layer in group.layers}
    for layer in graph.layers:
        precision, group = plan.precisions[layer.name], leader[layer.name]
        kept = ""
        if layer.fixed:
            gain, price = "", "not measured" if layer.name in cost.lacking else f"{cost.fixed.get(layer.name, 0):,}"
        else:
            pick = gains.choices.index(precision)
            first = group == layer.name
            gain = f"{gains.rows[group][pick]:.4g} of {gains.rows[group][-1]:.4g}" if first else "″"
            price = f"{cost.rows[group][pick]:,}" if first else "″"
            kept = f"{sure.share(group):.0%}" if sure and first else "″"
        rows.add_row(
            layer.name, str(precision), _bar(precision), *([group] if wide else []), gain, price,
            *([kept] if sure else []), _reason(layer, graph, through=wide),
        )  # fmt: skip
    return rows


def _reason(layer: Layer, graph: Graph, *, through: bool = True) -> str:
    """Why a layer is fixed, and which others it is linked to, through what."""
    parts = [layer.why] if layer.why else []
    link = graph.link_of(layer.name)
    if link:
        others = ", ".join(name for name in link.layers if name != layer.name)
        parts.append(f"linked to {others}" + (f" through {link.through}" if through else ""))
    return "; ".join(parts)


def _bits(bits: int) -> Text:
    return Text(f"{bits} bits", _COLOURS.get(bits, "magenta"))


def show_frontier(frontier: Frontier, budgets: Sequence[str], *, as_json: bool) -> None:
    """The best plan at each budget; as JSON, every point of the frontier as well."""
    plans = [frontier.plan(budget) for budget in budgets]
    if as_json:
        points = [
            {"cost": int(cost), "gain": float(gain)} for cost, gain in zip(frontier.costs, frontier.values, strict=True)
        ]
        _print_json({"points": points, "plans": [json.loads(plan.to_json()) for plan in plans]})
        return
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
    console().print(rows)
    console().print(f"\n{len(frontier):,} points on the whole frontier of {frontier.cost.name}; --json has them all")
    if any(plan.limits[0].fixed is not None for plan in plans):
        console().print("Amounts are those of the whole network, fixed layers included; a share would be without them")


def show_names(names: Mapping[str, str], *, as_json: bool) -> None:
    """Names, with what they are in a few words."""
    if as_json:
        _print_json(list(names))
        return
    rows = table("name", "what it is") if any(names.values()) else table("name")
    for name, summary in names.items():
        rows.add_row(*([name, summary] if any(names.values()) else [name]))
    console().print(rows if names else "none yet")


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
        change = (
            ""
            if not ours or not theirs
            else "more"
            if theirs.above(ours)
            else "fewer"
            if ours.above(theirs)
            else "mixed"
        )
        rows.add_row(name, str(ours or "absent"), str(theirs or "absent"), f"{change} bits" if change else "")
    out.print(rows)
    out.print(f"\n{len(differing)} of {len(names)} layers differ")


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=1))


def show_score(task: Any, scores: Mapping[str, float], facts: Mapping[str, Any], *, as_json: bool) -> None:
    """What a network scores on a task's test split, and what else there is to say."""
    if as_json:
        print(json.dumps({"task": task.name, "scores": dict(scores), **facts}))
        return
    shown = ", ".join(f"{metric} {score:.2f}" for metric, score in scores.items())
    more = "".join(f"; {name} {value}" for name, value in facts.items())
    print(f"{shown} on the {task.size('test'):,} test samples of {task.name}{more}")

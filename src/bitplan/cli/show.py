"""Records as tables for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from bitplan.cli.console import console
from bitplan.cli.terminal import say, say_json
from bitplan.core.budget import Account, Budget
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph, Layer, Limit, Plan
from bitplan.core.summaries import counted, headline
from bitplan.costs.standard import total

if TYPE_CHECKING:
    from bitplan.selection.confidence import Confidence
    from bitplan.selection.frontier import Frontier

_COLOURS = {2: "yellow", 3: "green", 4: "cyan", 8: "blue"}
_WIDE = 120  # from here on there is room for everything
_NAMES = 40  # longer names of layers may be folded
_UNSURE = "The gains by {} carry no standard errors, so how sure each choice is cannot be said"


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table; columns that start with ">" are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        if column.startswith(">"):
            made.add_column(column.removeprefix(">"), justify="right", overflow="fold", no_wrap=True)
        else:
            made.add_column(column, justify="left", overflow="fold", no_wrap=False)
    return made


def show_graph(graph: Graph) -> None:
    """Layers in execution order, links and what the example did not reach."""
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
        out.print(_unreached(graph))


def _unreached(graph: Graph) -> str:
    return f"Not reached by the example input, so not planned: {', '.join(graph.unreached)}"


def show_rows(record: Gains | Costs) -> None:
    """One line per group, one column per choice."""
    rows = table("group", *(f">{choice}" for choice in record.choices), title=record.label)
    errors = (record.errors if isinstance(record, Gains) else None) or {}
    for name, row in record.rows.items():
        own_errors = errors.get(name, (0.0,) * len(row))
        rows.add_row(name, *(_figure(value, error) for value, error in zip(row, own_errors, strict=True)))
    console().print(rows)


def _figure(value: float, error: float) -> str:
    """A gain or a cost; costs are whole numbers."""
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"{text} ± {error:.2g}" if error else text


def show_plan(
    plan: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], explain: bool, sure: Confidence | None = None
) -> None:
    """The answer first, then the layers; with reasons where asked for, and with how sure they are where it is known."""
    out = console()
    out.print(headline(graph))
    for line in (*plan_lines(plan, graph, costs), _chosen(plan, graph)):
        out.print(line)
    out.print()
    if explain:
        out.print(_explained(plan, graph, gains, costs[0], sure, wide=out.width >= _WIDE))
        out.print(f"\n{sure or _UNSURE.format(gains.method)}")
    else:
        out.print(_bars(plan, graph))
    if graph.unreached:
        out.print(f"\n{_unreached(graph)}")


def plan_lines(plan: Plan, graph: Graph, costs: Sequence[Costs]) -> list[str]:
    """What was asked for and what it comes to, a line each."""
    accounts = {cost.name: Account.of(graph, cost) for cost in costs}
    lines = [_limit_line(limit, accounts.get(limit.cost_name)) for limit in plan.limits]
    lines += [_file_line(plan, graph, cost) for cost in costs if cost.target]
    lines += [_binding(plan.limits)] if len(plan.limits) > 1 else []
    lines.append(f"gain {plan.gain:.6g} by {plan.method}, {plan.selector} selection ({plan.proof})")
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


def _file_line(plan: Plan, graph: Graph, cost: Costs) -> str:
    """What the tensors of a target's file will take, and what that is for each weight."""
    chosen = sum(cost.rows[group.name][cost.choices.index(plan.precisions[group.name])] for group in graph.selectable)
    weights, every = (sum(one.weights for one in groups) for groups in (graph.selectable, graph.groups))
    fixed = sum(cost.fixed.values())
    return (
        f"{cost.name}: {chosen + fixed:,} bytes of tensors, {fixed:,} of them fixed; {8 * chosen / weights:.3f} bits "
        f"for each chosen weight, {8 * (chosen + fixed) / every:.3f} for each of all"
    )


def _binding(limits: Sequence[Limit]) -> str:
    """Which of several budgets hold the plan back: more of them would gain something."""
    binding = [limit.cost_name for limit in limits if limit.shadow_price > 0]
    idle = [limit.cost_name for limit in limits if limit.shadow_price <= 0]
    if not binding:
        return "no budget binds alone: one more percent of any of them would gain nothing"
    return f"binding: {', '.join(binding)}" + (f"; there is room in {', '.join(idle)}" if idle else "")


def _chosen(plan: Plan, graph: Graph) -> str:
    """How many groups got which precision."""
    shares = counted(plan.precisions[group.name] for group in graph.selectable)
    fixed = len(graph.groups) - len(graph.selectable)
    return f"groups: {shares}; {fixed} fixed by rules" if fixed else f"groups: {shares}"


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


def _explained(plan: Plan, graph: Graph, gains: Gains, cost: Costs, sure: Confidence | None, *, wide: bool) -> Table:
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
        cells: list[str | Text] = [layer.name, str(precision), _bar(precision), group, gain, price, kept, why]
        rows.add_row(*(cell for name, cell in zip(columns, cells, strict=True) if name not in left_out))
    return rows


def _reason(layer: Layer, graph: Graph, *, through: bool = True) -> str:
    """Why a layer is fixed, and which others it is linked to, through what."""
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


def _frontier_rows(frontier: Frontier, plans: Sequence[Plan]) -> Table:
    """A row per plan: its budget, what it comes to, and how many groups it gives each choice."""
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
    """Names, with what they are in a few words."""
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
    """Methods of quantization: what each is, its bits, whether it is uniform, its options, where it comes from."""
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
    """What becomes of a layer's bits, in words; nothing to say where one plan does not have it."""
    if first is None or second is None:
        return ""
    if second.above(first):
        return "more bits"
    return "fewer bits" if first.above(second) else "mixed bits"


def _print_json(content: object) -> None:
    say_json(json.dumps(content, indent=1))


def show_score(task: Any, scores: Mapping[str, float], facts: Mapping[str, Any], *, as_json: bool) -> None:
    """What a network scores on a task's test split, and what else there is to say."""
    if as_json:
        say_json(json.dumps({"task": task.name, "scores": dict(scores), **facts}))
        return
    listed = ", ".join(f"{metric} {score:.2f}" for metric, score in scores.items())
    more = "".join(f"; {name} {value}" for name, value in facts.items())
    say(f"{listed} on the {task.size('test'):,} test samples of {task.name}{more}")

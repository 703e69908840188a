"""select: Graph + Gains + Costs + budgets → Plan; and what a selector must be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import getitem

import numpy as np

from bitplan.core.budget import WEIGHT_BITS, Account, Budget, BudgetLike
from bitplan.core.errors import BudgetError, InputError, NothingToChoose, RecordError, suggestion
from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph, Limit, Plan
from bitplan.core.registry import SELECTORS
from bitplan.selection.exact import exact, exact_each
from bitplan.selection.problem import Integers, Problem, Selection, Selector, to_integers


def select(
    graph: Graph,
    gains: Gains,
    costs: Costs | Iterable[Costs],
    *,
    budget: BudgetLike | Sequence[BudgetLike],
    selector: str | Selector | None = None,
    levels: int | None = None,
) -> Plan:
    """Choose the precisions of greatest total gain within every budget.

    Of selections with equal gain the cheaper one is taken (by the first budget, then the next), then the one that
    keeps the earlier layer at the higher precision. `selector` is the one that the gains' method is defined with
    unless named. `levels=10000` rounds the gains to whole levels first, as the paper does.
    """
    return select_each(graph, gains, costs, budgets=[budget], selector=selector, levels=levels)[0]


def select_each(
    graph: Graph,
    gains: Gains,
    costs: Costs | Iterable[Costs],
    *,
    budgets: Sequence[BudgetLike | Sequence[BudgetLike]],
    selector: str | Selector | None = None,
    levels: int | None = None,
) -> list[Plan]:
    """What `select` gives for each of several budgets, in one pass where they limit the same cost."""
    priced = [costs] if isinstance(costs, Costs) else list(costs)
    name, solve = selector_of(selector, gains)
    posed = _pose_each(graph, gains, priced, budgets, levels)
    problems = [one.problem for one in posed]
    selections = exact_each(problems) if solve is exact else [solve(problem) for problem in problems]
    plans = []
    for one, selection in zip(posed, selections, strict=True):
        more = more_of(checked(selection, one.problem, name), one.problem, solve)
        prices = [value * one.problem.unit for value in more]
        plans.append(make_plan(graph, gains, one.costs, one.problem, selection, one.budgets, prices, name))
    return plans


@dataclass(frozen=True)
class Posed:
    """The problem of some budgets that can be met, and the cost that each of them limits."""

    budgets: tuple[Budget, ...]
    costs: tuple[Costs, ...]
    problem: Problem


def pose(
    graph: Graph,
    gains: Gains,
    costs: Costs | Iterable[Costs],
    budget: BudgetLike | Sequence[BudgetLike],
    levels: int | None = None,
) -> Posed:
    """Read the budgets and put the problem in whole numbers, or say why there is none."""
    return _pose_each(graph, gains, [costs] if isinstance(costs, Costs) else list(costs), [budget], levels)[0]


def _pose_each(
    graph: Graph,
    gains: Gains,
    priced: list[Costs],
    budgets: Sequence[BudgetLike | Sequence[BudgetLike]],
    levels: int | None,
) -> list[Posed]:
    """The problem of each of several budgets; those that limit the same costs share their arrays."""
    check_selectable(graph)
    check_provenance(graph, gains, priced)
    posed: list[Posed] = []
    shared: dict[tuple[str, ...], Problem] = {}
    for budget in budgets:
        written = [budget] if isinstance(budget, str | float | int | Budget) else list(budget)
        parsed = tuple(Budget.parse(one) for one in written)
        if not parsed:
            raise InputError("no budget was given")
        limited = tuple(cost_of(one, graph, gains.choices, priced) for one in parsed)
        capacities = [one.capacity(Account.of(graph, cost)) for one, cost in zip(parsed, limited, strict=True)]
        names = tuple(cost.name for cost in limited)
        if names not in shared:
            shared[names] = make_problem(graph, gains, limited, capacities, levels)
        problem = shared[names].within(_whole(capacities))
        check_feasible(parsed, limited, graph, problem)
        posed.append(Posed(parsed, limited, problem))
    return posed


def selector_of(selector: str | Selector | None, gains: Gains) -> tuple[str, Selector]:
    """The selector asked for, or else the one that the gains' method is defined with, and its name."""
    name = selector if isinstance(selector, str) else gains.selector if selector is None else "custom"
    return name, selector if callable(selector) else SELECTORS.get(name)


def check_provenance(graph: Graph, gains: Gains, costs: Sequence[Costs]) -> None:
    """Raise unless gains and costs belong to this graph and to the same choices."""
    names = [group.name for group in graph.selectable]
    for record in (gains, *costs):
        what = f"the {record.kind()} ({record.label})"
        if record.graph != graph.id:
            raise InputError(f"{what} belong to graph {record.graph}, not to this one ({graph.id}): make them again")
        if list(record.rows) != names and set(record.rows) != set(names):
            odd = sorted(set(record.rows) ^ set(names))[0]
            state = "lack" if odd in names else "have an unknown"
            raise RecordError(f"{what} {state} group {odd!r}{suggestion(odd, names)}")
        if record.choices != gains.choices:
            shown = [",".join(map(str, one.choices)) for one in (record, gains)]
            raise InputError(f"{what} are for {shown[0]}, the gains for {shown[1]}: use the same choices")


def cost_of(budget: Budget, graph: Graph, choices: tuple[Precision, ...], costs: Sequence[Costs]) -> Costs:
    """The cost that a budget limits: the one it brings, the named one, or the first that it fits."""
    own = budget.unit.own_cost(graph, choices)
    if own is not None:
        return next((cost for cost in costs if budget.unit.fits(cost.name, cost.unit)), own)
    names = [cost.name for cost in costs]
    if budget.cost is not None and budget.cost not in names:
        known = suggestion(budget.cost, names)
        raise InputError(f"budget {budget} limits {budget.cost!r}, which was not priced{known}")
    if budget.cost is not None:
        return costs[names.index(budget.cost)]
    fitting = [cost for cost in costs if budget.unit.fits(cost.name, cost.unit)]
    if not fitting:
        counted = ", ".join(f"{cost.name} counts {cost.unit or 'what it does not say'}" for cost in costs)
        raise BudgetError(
            f"budget {budget} is an amount of {budget.unit.kind}, and no cost counts that ({counted}): price one that "
            f"does, such as a measured table with a line `# unit: {budget.unit.written}`, or ask for a share: 70%"
        )
    return fitting[0]


def make_problem(
    graph: Graph, gains: Gains, costs: Sequence[Costs], capacities: Sequence[int], levels: int | None
) -> Problem:
    """The problem in whole numbers."""
    names = tuple(group.name for group in graph.selectable)
    places = places_of(costs)
    scaled = to_integers([_placed(gains.rows[name], places.get(name)) for name in names], levels)
    prices = [[cost.rows[name] for name in names] for cost in costs]
    if max(sum(max(row) for row in table) for table in prices) >= 2**62:
        raise InputError("the costs add up to more than 2^62 units: use a coarser unit")
    return Problem(
        groups=names,
        choices=gains.choices,
        values=scaled.values,
        costs=np.array(prices, dtype=np.int64),
        capacities=_whole(capacities),
        unit=scaled.unit,
        rounding=scaled.rounding,
    )


def places_of(costs: Sequence[Costs]) -> dict[str, tuple[int, ...]]:
    """For groups some of whose choices take one place in a target's file, the choice that is taken for each."""
    return {name: row for cost in costs for name, row in cost.places.items()}


def _placed(row: tuple[float, ...], places: tuple[int, ...] | None) -> tuple[float, ...]:
    """Gains of what is stored: of choices that take one place in a file the widest, so that none is worth less."""
    return row if places is None else tuple(row[place] for place in places)


def stored(picks: Sequence[int], groups: Sequence[str], costs: Sequence[Costs]) -> tuple[int, ...]:
    """Picks with the widest choice of each place in a target's file, which costs no more."""
    places = places_of(costs)
    return tuple(places[name][pick] if name in places else pick for name, pick in zip(groups, picks, strict=True))


def _whole(capacities: Sequence[int]) -> Integers:
    return np.array([min(capacity, 2**62) for capacity in capacities], dtype=np.int64)


def checked(selection: Selection, problem: Problem, selector: str) -> Selection:
    """Hold a selector to its contract: one valid pick per group, never over budget."""
    picks = np.array(selection.picks, dtype=np.int64)
    valid = len(picks) == len(problem.groups) and bool(((picks >= 0) & (picks < len(problem.choices))).all())
    if not valid:
        raise InputError(f"{selector} did not return one choice for each of the {len(problem.groups)} groups")
    for spent, capacity in zip(spent_by(problem, selection.picks), problem.capacities, strict=True):
        if spent > capacity:
            raise InputError(f"{selector} spends {spent} where {capacity} are allowed")
    return selection


def spent_by(problem: Problem, picks: Sequence[int]) -> list[int]:
    """What the picks cost, by each budget's measure."""
    chosen = problem.costs[:, np.arange(len(picks)), list(picks)]
    return [int(total) for total in chosen.sum(axis=1)]


def gain_of(gains: Gains, problem: Problem, picks: Sequence[int]) -> float:
    """The total gain of the picks, summed without rounding."""
    return math.fsum(map(getitem, map(gains.rows.__getitem__, problem.groups), picks))


def more_of(selection: Selection, problem: Problem, solve: Selector) -> tuple[float, ...]:
    """What one more percent of each budget would add; where a selector does not say, by asking it again."""
    if selection.more is not None:
        return selection.more
    every, more = np.arange(len(problem.groups)), []
    worth = problem.values[every, list(selection.picks)].sum()
    for index, percent in enumerate(problem.percents):
        wider = problem.capacities.copy()
        wider[index] += percent
        more.append(float(problem.values[every, list(solve(problem.within(wider)).picks)].sum() - worth))
    return tuple(more)


def make_plan(
    graph: Graph,
    gains: Gains,
    costs: Sequence[Costs],
    problem: Problem,
    selection: Selection,
    budgets: Sequence[Budget],
    prices: Sequence[float],
    selector: str,
) -> Plan:
    """Write a selection down as a plan for all layers, with its provenance."""
    picks = stored(selection.picks, problem.groups, costs)
    chosen = {
        layer.name: problem.choices[pick]
        for group, pick in zip(graph.selectable, picks, strict=True)
        for layer in group.layers
    }
    fixed = graph.fixed_beside(problem.choices)
    precisions = chosen | fixed
    return Plan(
        model=graph.model,
        precisions={layer.name: precisions[layer.name] for layer in graph.layers},
        links=tuple(link.layers for link in graph.links),
        method=gains.method,
        selector=selector,
        limits=tuple(
            Limit(
                budget=str(budget),
                cost_name=cost.name,
                capacity=int(capacity),
                cost=used,
                shadow_price=price,
                fixed=budget.unit.aside(Account.of(graph, cost)),
            )
            for budget, cost, capacity, used, price in zip(
                budgets, costs, problem.capacities, spent_by(problem, picks), prices, strict=True
            )
        ),
        gain=gain_of(gains, problem, picks),
        gap=None if selection.gap is None else problem.rounding + selection.gap * problem.unit,
        rounding=0.0 if selection.gap is None else problem.rounding,
        sources={
            "graph": graph.id,
            "gains": gains.id,
            **{cost.name: cost.id for cost in costs if cost.name != WEIGHT_BITS},
        },
        uses=graph.uses,
        integers=graph.integers,
        target=next((cost.target for cost in costs if cost.target), ""),
        notes=(
            *graph.describe_rules(fixed),
            *graph.notes,
            *gains.notes,
            *_elsewhere(gains, budgets),
            *_shared_places(costs),
        ),
    )


def _shared_places(costs: Sequence[Costs]) -> tuple[str, ...]:
    """What is to say where a target's file has one place for several choices."""
    return tuple(
        f"target: in {len(cost.places)} of {len(cost.rows)} groups {cost.target} stores some of "
        f"{', '.join(map(str, cost.choices))} in one place, and the widest of these is taken"
        for cost in costs
        if cost.places
    )


def _elsewhere(gains: Gains, budgets: Sequence[Budget]) -> tuple[str, ...]:
    """What is to say where gains that hold for one budget are selected from at another."""
    held, asked = (", ".join(map(str, every)) for every in (map(Budget.parse, gains.budgets), budgets))
    if not gains.budgets or held == asked:
        return ()
    return (f"gains: {gains.method} chose for {held}, and this plan is what {asked} leaves of that: estimate again",)


def check_selectable(graph: Graph) -> None:
    """Raise when the rules leave nothing to choose, saying which rule took how many layers."""
    if graph.selectable:
        return
    narrow = [layer for layer in graph.layers if layer.rule == "narrow"]
    reasons = ["the rule on input features"] * len(narrow)
    reasons += [layer.why for layer in graph.layers if layer.rule != "narrow"]
    shown = ", ".join(f"{count} by {reason}" for reason, count in Counter(reasons).items())
    ends = all(layer.is_end for layer in graph.layers)
    hint = (
        "relax that rule with --rules narrow=0 (Rules(narrow=0))"
        if narrow
        else "choose for its ends too, --rules first=free,last=free (Rules(first=None, last=None))"
        if ends
        else "free some with --rules free=PATTERN (Rules(free=…))"
    )
    raise NothingToChoose(
        f"nothing left to choose in {graph.model}: all {len(graph.layers)} layers are fixed, {shown}; {hint}"
    )


def check_feasible(budgets: Sequence[Budget], costs: Sequence[Costs], graph: Graph, problem: Problem) -> None:
    """Raise unless each budget alone can be met, saying the least that is possible and what would lower it."""
    for index, (budget, cost) in enumerate(zip(budgets, costs, strict=True)):
        least = int(problem.costs[index].min(axis=1).sum())
        if least > problem.capacities[index]:
            raise BudgetError(_impossible(budget, cost, Account.of(graph, cost), least))


def _impossible(budget: Budget, cost: Costs, account: Account, least: int) -> str:
    """Why a budget cannot be met: `least` is what the choosable layers cost at the lowest choice."""
    unit, lowest = budget.unit, cost.choices[0]
    aside = unit.aside(account)
    if cost.target:
        return _impossible_file(budget, cost, account, least)
    whole, part, hint = "", "", ""
    if aside is not None:
        whole = " of the whole network"
        part = f", {unit.told(0, account)} of it for the {len(cost.fixed)} fixed layers"
        hint = ", or fix fewer layers" if aside else ""
    return (
        f"budget {budget} cannot be met: with every layer at its lowest precision ({lowest}) the {cost.name}{whole} is "
        f"{unit.told(least, account)}{part}. Raise the budget to at least {unit.enough(least, account)}, or add a "
        f"precision below {lowest}{hint}"
    )


def _impossible_file(budget: Budget, cost: Costs, account: Account, least: int) -> str:
    """The same of a target's file, whose fixed part is mostly one table."""
    unit, lowest = budget.unit, cost.choices[0]
    part, hints = "", [f"add a choice below {lowest}"] if lowest.weight_bits > 2 else []
    if unit.aside(account):
        part = f", {unit.told(0, account)} of it for what is not chosen"
        largest = max(cost.fixed, key=lambda name: cost.fixed[name])
        taken = unit.text(cost.fixed[largest] / unit.one(account))
        hints.append(
            f"store {largest} ({taken}) in fewer bits, such as --rules 'free={largest}' "
            f"or --rules 'fix={largest}=w4a16'"
        )
    if "size" in cost.target or cost.target.startswith(("vllm", "matmulnbits", "packed")):
        hints.append("take larger groups (--target …:size=128)")
    if cost.places:
        hints.append(f"{len(cost.places)} of {len(cost.rows)} groups have rows for which {cost.name} stores no less")
    lower = f"; {'; '.join(hints)}" if hints else ""
    return (
        f"budget {budget} cannot be met: with every layer at its lowest precision the {cost.name} takes "
        f"{unit.told(least, account)}{part}. Raise the budget to at least {unit.enough(least, account)}{lower}"
    )

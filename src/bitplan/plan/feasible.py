"""Whether there is anything to choose, and whether the budgets can be met at all: checked before solving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitplan.core.budget import Budget
from bitplan.core.errors import BudgetError, NothingToChoose
from bitplan.core.records import Costs, Graph
from bitplan.core.units import Account
from bitplan.plan.problem import Problem


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
            f"store {largest} ({taken}) in fewer bits, "
            f"such as --rules 'free={largest}' or --rules 'fix={largest}=w4a16'"
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

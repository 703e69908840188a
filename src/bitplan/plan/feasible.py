"""Whether there is anything to choose, and whether the budgets can be met at all: checked before solving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bitplan.core.budget import Budget
from bitplan.core.errors import BudgetError, NothingToChoose
from bitplan.core.records import Costs, Graph
from bitplan.plan.problem import Problem


def check_selectable(graph: Graph) -> None:
    """Raise when the rules leave nothing to choose, saying which rule took how many layers."""
    if graph.selectable:
        return
    narrow = [layer for layer in graph.layers if layer.rule == "narrow"]
    reasons = ["the rule on input features"] * len(narrow)
    reasons += [layer.why for layer in graph.layers if layer.rule != "narrow"]
    shown = ", ".join(f"{count} by {reason}" for reason, count in Counter(reasons).items())
    hint = (
        "relax that rule with --narrow 0 (Rules(narrow=0))"
        if narrow
        else "free some with --free PATTERN (Rules(free=…))"
    )
    raise NothingToChoose(
        f"nothing left to choose in {graph.model}: all {len(graph.layers)} layers are fixed, {shown}; {hint}"
    )


def check_feasible(budgets: Sequence[Budget], costs: Sequence[Costs], graph: Graph, problem: Problem) -> None:
    """Raise unless each budget alone can be met, saying the least that is possible and what would lower it."""
    for index, (budget, cost) in enumerate(zip(budgets, costs, strict=True)):
        least = int(problem.costs[index].min(axis=1).sum())
        if least <= problem.capacities[index]:
            continue
        whole = int(problem.costs[index, :, -1].sum())
        weights = sum(group.weights for group in graph.selectable)
        shown, floor = _in_unit(budget, least, whole, weights)
        raise BudgetError(
            f"budget {budget} cannot be met: with every layer at its lowest precision ({cost.choices[0]}) the "
            f"{cost.name} is {shown}. Raise the budget to at least {floor}, or add a precision below {cost.choices[0]}"
        )


def _in_unit(budget: Budget, least: int, whole: int, weights: int) -> tuple[str, str]:
    """The least possible cost as the budget is written, and rounded up so that it can be asked for."""
    if budget.unit == "%":
        tenths = -(-least * 1000 // whole)
        return f"{100 * least / whole:.1f}%", f"{tenths / 10:.1f}%"
    if budget.unit == "bpw":
        hundredths = -(-least * 100 // weights)
        return f"{least / weights:.2f}bpw", f"{hundredths / 100:.2f}bpw"
    return f"{least} units", str(least)

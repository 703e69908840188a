"""choose: the first half of the flow in one call, from a model to its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from bitplan.core.budget import Budget, BudgetLike
from bitplan.core.defaults import AUTO, CHOICES, COST
from bitplan.core.precision import PrecisionLike, parse_choices
from bitplan.core.rules import Rules
from bitplan.costs.base import price_for
from bitplan.forward.batches import filter_accepted
from bitplan.gains.base import Context, Gain, estimate
from bitplan.gains.start_network import add_data
from bitplan.graph.trace import trace
from bitplan.selection.base import select
from bitplan.selection.budget_constraint import BudgetConstraint

if TYPE_CHECKING:
    from bitplan.core.records import Plan


def choose(
    model: nn.Module | str | Path,
    example: Any = None,
    *,
    budget: BudgetLike | Sequence[BudgetLike],
    gain: str | Gain = AUTO,
    cost: str = COST,
    choices: str | Iterable[PrecisionLike] = CHOICES,
    rules: Rules | None = None,
    batches: Any = None,
) -> Plan:
    """Choose a precision for every layer of a model within a budget: trace, estimate, price and select in one go.

    `model` and `example` are those of `trace`: a network and an input for it, or a file of weights. `batches`, such as
    a DataLoader, let methods see data, and give the example where there is none. What was left to bitplan, above all
    which method `auto` took and what would be better, stands in the plan's notes.
    """
    precisions = parse_choices(choices)
    context = add_data(Context(), batches, None)
    shown = context.task.example() if example is None and context.task is not None else example
    if example is None and isinstance(shown, dict) and isinstance(model, nn.Module):
        shown = filter_accepted(model, shown)
    graph = trace(model, shown, rules=(rules or Rules()).for_choices(precisions))
    written = [budget] if isinstance(budget, str | float | int | Budget) else list(budget)
    costs = price_for([Budget.parse(one) for one in written], [cost], graph, precisions)
    aimed = replace(context, aim=BudgetConstraint.of(graph, precisions, costs, written))
    gains = estimate(gain, model, graph, choices=precisions, context=aimed)
    return select(graph, gains, costs, budget=written)

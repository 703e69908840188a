"""The aim of a method that chooses within a budget, from what users write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bitplan.core.budget import Budget, BudgetLike
from bitplan.core.defaults import COST
from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import EPOCH, PassMeter
from bitplan.costs.base import price_for
from bitplan.selection.budget_constraint import BudgetConstraint

if TYPE_CHECKING:
    from bitplan.gains.base import Context


def aim_within(
    graph: Graph, choices: tuple[Precision, ...], budget: BudgetLike | Sequence[BudgetLike], cost: str = COST
) -> BudgetConstraint:
    """What a budget, or several at once, allows by the cost of that name, or those that budgets name themselves."""
    written = [budget] if isinstance(budget, str | float | int | Budget) else list(budget)
    return BudgetConstraint.of(
        graph, choices, price_for([Budget.parse(one) for one in written], [cost], graph, choices), written
    )


def with_aim(
    context: Context, graph: Graph, choices: tuple[Precision, ...], budget: BudgetLike | Sequence[BudgetLike] | None
) -> Context:
    """The context with the aim that a budget makes; one of them is enough."""
    if budget is None:
        return context
    if context.aim is not None:
        raise InputError("there are a budget and an aim in the context: give one of them")
    return replace(context, aim=aim_within(graph, choices, budget))


def check_spend(method: str, spend: float | None) -> None:
    """Refuse what is no number of passes."""
    if spend is not None and not 0 < spend < math.inf:
        raise InputError(f"{method}: spend is a number of passes above 0, not {spend}")


def meter_for(spend: float | None, context: Context, usual: float) -> PassMeter:
    """A meter of what a method may spend, in passes: as its options say, else the context's epochs, else as usual."""
    if spend is None and context.epochs is not None and context.task is not None:
        from bitplan.tasks.choosing import samples_per_epoch  # which loads torch, and EAGL of a file needs none

        epoch = EPOCH.passes * samples_per_epoch(context.task)
        return PassMeter(context.epochs * epoch, epoch=epoch)
    return PassMeter(usual if spend is None else spend)


def check_aim(
    aim: BudgetConstraint | None, method: str, graph: Graph, choices: tuple[Precision, ...]
) -> BudgetConstraint:
    """The aim, where there is one, for these groups and choices."""
    if aim is None:
        raise InputError(
            f"{method} chooses within a budget: say which, --budget 70% (in Python: estimate(…, budget='70%'))"
        )
    if aim.groups != tuple(group.name for group in graph.selectable) or aim.choices != choices:
        raise InputError(f"the aim of {method} is for other groups or choices than it is to choose for: make it again")
    return aim

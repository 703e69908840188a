"""The contract of selectors."""

from __future__ import annotations

from bitplan.core.errors import InputError
from bitplan.costs.base import price
from bitplan.gains.base import estimate
from bitplan.selection.base import checked, make_problem
from bitplan.selection.problem import Problem, Selection, Selector
from bitplan.testing.contract import Contract
from bitplan.testing.networks import hand_made_graph

_CHOICES = ("w2a2,w4a4", "w2a2,w3a3,w4a4,w8a8")
_SHARES = (0.0, 0.3, 0.7, 1.0)  # of the way from all at the lowest to all at the highest choice


def check_selector(selector: Selector) -> None:
    """Hold a selector to its contract: two budgets at once, from the least that can be met to more than is needed."""
    name = getattr(selector, "__name__", type(selector).__name__)
    contract = Contract(f"selector {name}")
    for choices in _CHOICES:
        for share in _SHARES:
            problem = _problem(choices, share)
            selection = _check(contract, selector, problem, name)
        top = (len(problem.choices) - 1,) * len(problem.groups)
        clause = "where the budget allows it every group has the highest choice"
        contract.clause(clause, tuple(selection.picks) == top, selection.picks)


def _problem(choices: str, share: float) -> Problem:
    graph = hand_made_graph()
    gains = estimate("random", None, graph, choices=choices)
    costs = [price(cost, graph, choices) for cost in ("bmac", "memory")]
    lowest = [sum(row[0] for row in cost.rows.values()) for cost in costs]
    highest = [sum(row[-1] for row in cost.rows.values()) for cost in costs]
    capacities = [int(low + share * (high - low)) for low, high in zip(lowest, highest, strict=True)]
    return make_problem(graph, gains, costs, capacities, None)


def _check(contract: Contract, selector: Selector, problem: Problem, name: str) -> Selection:
    before = [array.copy() for array in (problem.values, problem.costs, problem.capacities)]
    with contract.works("it solves every problem that can be met"):
        selection = selector(problem)
    after = problem.values, problem.costs, problem.capacities
    same = all((old == new).all() for old, new in zip(before, after, strict=True))
    contract.clause("the problem stays as it was", same)
    contract.clause("it gives a Selection", isinstance(selection, Selection), type(selection).__name__)
    try:
        checked(selection, problem, name)
    except InputError as error:
        contract.clause("one choice for each group, within every budget", False, error)
    gap = selection.gap
    contract.clause("the gap is a whole number from 0, or None", gap is None or gap >= 0, gap)
    again = selector(problem)
    contract.clause(
        "the same problem has the same answer", again == selection, f"{selection.picks}, then {again.picks}"
    )
    return selection

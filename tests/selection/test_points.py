"""Points of one posed problem are the plans that `select` makes for each capacity."""

import random

import pytest

import bitplan
from bitplan.core.errors import BudgetError
from bitplan.core.precision import parse_choices
from bitplan.core.records import Gains, Graph, Layer
from bitplan.selection.frontier import Points

CHOICES = parse_choices("w2a2,w3a3,w4a4")


def network(seed, layers=9):
    draw = random.Random(seed)
    sizes = [(draw.randrange(1, 10**6), draw.randrange(1, 10**4)) for _ in range(layers)]
    graph = Graph(
        model="drawn",
        layers=tuple(
            Layer(name=f"layer{n}", kind="linear", macs=macs, weights=weights, in_features=512)
            for n, (macs, weights) in enumerate(sizes)
        ),
    )
    rows = {group.name: (0.0, *sorted((draw.random(), draw.random()))) for group in graph.selectable}
    return graph, Gains(method="drawn", choices=CHOICES, rows=rows, graph=graph.id)


@pytest.mark.parametrize("selector", ["exact", "greedy"])
@pytest.mark.parametrize("others", [(), ("memory=70%",), ("memory=55%", "bops=80%")])
def test_every_point_is_the_plan_of_its_capacity(selector, others):
    for seed in range(3):
        graph, gains = network(seed)
        costs = [bitplan.price(name, graph, choices=CHOICES) for name in ("bmac", "memory", "bops")]
        highest = sum(row[-1] for row in costs[0].rows.values())
        points = Points.of(graph, gains, costs, [str(highest), *others], selector)
        for capacity in range(highest * 45 // 100, highest + 1, highest // 17):
            found = points.at(capacity)
            try:
                plan = bitplan.select(graph, gains, costs, budget=[str(capacity), *others], selector=selector)
            except BudgetError:
                assert found is None
                continue
            picks = tuple(CHOICES.index(plan.precisions[group.name]) for group in graph.selectable)
            limit = plan.limits[0]
            assert (found.picks, found.cost, found.gain) == (picks, limit.cost, plan.gain)
            assert found.shadow_price == limit.shadow_price


def test_other_budgets_that_cannot_be_met_are_refused_at_once():
    graph, gains = network(0)
    costs = [bitplan.price(name, graph, choices=CHOICES) for name in ("bmac", "memory")]
    with pytest.raises(BudgetError, match="memory=20%"):
        Points.of(graph, gains, costs, ["100%", "memory=20%"], "exact")

import pytest

import bitplan


def lowered(graph, method, budget):
    plan = bitplan.select(graph, bitplan.estimate(method, None, graph), bitplan.price("bmac", graph), budget=budget)
    assert plan.selector == "greedy"
    assert plan.gap is None
    return [group.name for group in graph.selectable if str(plan.precisions[group.name]) == "w2a2"]


@pytest.mark.parametrize(
    ("budget", "first", "last"),
    [
        ("100%", [], []),
        ("99%", ["a"], ["c"]),
        ("85%", ["a", "b"][:2] if 1 - 160 / 540 / 2 > 0.85 else ["a"], ["b", "c"]),
        ("60%", ["a", "b"], ["a", "b", "c"]),
        ("50%", ["a", "b", "c"], ["a", "b", "c"]),
    ],
)
def test_layers_are_lowered_in_order_until_the_budget_is_just_met(graph, budget, first, last):
    assert lowered(graph, "first_to_last", budget) == first
    assert lowered(graph, "last_to_first", budget) == last


def test_with_more_choices_a_layer_goes_down_step_by_step(graph):
    choices = "w2a2,w4a4,w8a8"
    gains = bitplan.estimate("first_to_last", None, graph, choices=choices)
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph, choices), budget="90%")
    assert [str(plan.precisions[name]) for name in "abc"] == ["w4a4", "w8a8", "w8a8"]

"""What every registered entry must do; a new one is tested by existing."""

from itertools import pairwise

import pytest
import torch

import bitplan
from bitplan.core.precision import parse_choices
from bitplan.core.registry import COSTS, GAINS, MODELS, SELECTORS
from bitplan.gains.base import Context, looks_at_model
from bitplan.models.zoo import load_model
from bitplan.plan.base import checked, make_problem
from bitplan.plan.problem import Selection

CHOICES = ["w2a2,w4a4", "w2a2,w3a3,w4a4,w8a8"]
OPTIONS = {"table": {"path": "gains.csv"}}


@pytest.fixture(autouse=True)
def a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    columns = "layer,w2a2,w3a3,w4a4,w8a8"
    (tmp_path / "gains.csv").write_text("\n".join([columns, "a,0,1,2,3", "b,0,1,2,3", "c,0,2,3,4"]))


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("name", [name for name in GAINS if not looks_at_model(GAINS.get(name))])
def test_gains_cover_every_group_and_repeat(graph, name, choices):
    first, second = (
        bitplan.estimate(name, None, graph, choices=choices, context=Context(seed=3), **OPTIONS.get(name, {}))
        for _ in range(2)
    )
    assert first.id == second.id
    assert list(first.rows) == [group.name for group in graph.selectable]
    assert bitplan.Gains.from_json(first.to_json()) == first


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("name", list(COSTS))
def test_costs_are_whole_and_do_not_fall(graph, name, choices):
    costs = bitplan.price(name, graph, choices)
    for row in costs.rows.values():
        assert all(low <= high for low, high in pairwise(row))
        assert row[-1] > 0
    assert set(costs.fixed) == {layer.name for layer in graph.layers if layer.fixed}
    assert costs.unit


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("name", list(SELECTORS))
def test_selectors_stay_within_every_budget(graph, name, choices):
    gains = bitplan.estimate("random", None, graph, choices=choices)
    costs = [bitplan.price(cost, graph, choices) for cost in ("bmac", "memory")]
    lowest = [sum(row[0] for row in cost.rows.values()) for cost in costs]
    highest = [sum(row[-1] for row in cost.rows.values()) for cost in costs]
    for share in (0.0, 0.3, 0.7, 1.0):
        capacities = [int(low + share * (high - low)) for low, high in zip(lowest, highest, strict=True)]
        problem = make_problem(graph, gains, costs, capacities, None)
        selection = SELECTORS.get(name)(problem)
        assert isinstance(selection, Selection)
        assert checked(selection, problem, name)
        assert SELECTORS.get(name)(problem) == selection
    assert selection.picks == (len(parse_choices(choices)) - 1,) * 3


@pytest.mark.parametrize("name", list(MODELS))
def test_models_are_built_and_traced(name):
    model, example = load_model(name, weightless=True)
    assert isinstance(model, torch.nn.Module)
    graph = bitplan.trace(model, example, name=name)
    assert graph.layers[0].why == "first layer"
    assert graph == bitplan.trace(model, example, name=name)

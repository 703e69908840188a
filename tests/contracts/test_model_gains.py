"""What every method that looks at a model must do, on a small quantized network."""

import copy

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.registry import GAINS
from bitplan.gains.base import Context, looks_at_model

METHODS = [name for name in GAINS if looks_at_model(GAINS.get(name))]
RULES = bitplan.Rules(narrow=0)
OPTIONS = {
    "alps": {"steps": 2},
    "alps_racing": {"steps": 2, "rounds": 2, "budgets": "70%", "samples": 32, "batch_size": 16},
    "drop": {"samples": 32, "batch_size": 16},
    "hawq": {"probes": 3, "min_probes": 2},
    "hawq_v1": {"iterations": 3},
    "hawq_v2": {"probes": 3, "min_probes": 2},
    "regression": {"steps": 1},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.middle, self.head = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.middle((self.left(x) + self.right(x)).relu()).relu()
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def start():
    torch.manual_seed(0)
    images = torch.rand(4, 1, 8, 8)
    model = Net()
    graph = bitplan.trace(model, images, rules=RULES)
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [images])
    return quantized, graph


@pytest.mark.parametrize("choices", ["w2a2,w4a4", "w2a2,w3a3,w4a4"])
@pytest.mark.parametrize("name", METHODS)
def test_every_group_gets_finite_values_that_repeat_and_the_model_stays_bit_identical(start, name, choices):
    model, graph = start
    before, mode = copy.deepcopy(model.state_dict()), model.training
    recipe = bitplan.Recipe(steps=2, batch_size=16)
    context = Context(task=bitplan.load_task("digits"), recipe=recipe, seed=1)
    first, second = (
        bitplan.estimate(name, model, graph, choices=choices, context=context, **OPTIONS.get(name, {}))
        for _ in range(2)
    )
    assert first.id == second.id
    assert list(first.rows) == [group.name for group in graph.selectable] == ["left", "middle"]
    assert bitplan.Gains.from_json(first.to_json()) == first
    assert model.training == mode
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())

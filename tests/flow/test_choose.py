"""The quick start works for whatever network a newcomer pastes in."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bitplan
from bitplan.core.errors import InputError, NothingToChoose


class Small(nn.Sequential):
    """A network of 8 to 128 channels."""

    def __init__(self):
        widths = (3, 8, 32, 64, 128)
        parts = [
            part
            for one, two in itertools.pairwise(widths)
            for part in (nn.Conv2d(one, two, 3, padding=1), nn.BatchNorm2d(two), nn.ReLU())
        ]
        super().__init__(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Encoder(nn.Module):
    """Two layers of torch's own transformer over tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)).mean(1))


def perceptron():
    widths = (64, 48, 32, 10)
    return nn.Sequential(*(nn.Linear(one, two) for one, two in itertools.pairwise(widths)))


PASTED = {
    "small CNN": lambda: (Small(), torch.randn(2, 3, 16, 16)),
    "MLP": lambda: (perceptron(), torch.randn(2, 64)),
    "transformer": lambda: (Encoder(), torch.randint(50, (2, 12))),
    "timm": lambda: bitplan.load_model("timm/resnet10t"),
    "zoo": lambda: bitplan.load_model("digits_resnet"),
}


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("name", PASTED)
def test_the_quick_start_works_for_what_is_pasted_in(name):
    model, example = PASTED[name]()
    plan = bitplan.choose(model, example, budget="70%")
    quantized = bitplan.quantize(model, plan)
    assert plan.method == "eagl"
    assert any(note.startswith("gains: auto takes eagl") for note in plan.notes)
    assert plan.limits[0].cost <= plan.limits[0].capacity
    assert bitplan.plan_of(quantized) == plan
    data = torch.randn(example.shape) if example.is_meta or example.is_floating_point() else example
    bitplan.calibrate_(quantized, [data])
    assert quantized.eval()(data).isfinite().all()


def test_it_is_the_four_arrows():
    model, example = PASTED["small CNN"]()
    graph = bitplan.trace(model, example)
    gains = bitplan.estimate("auto", model, graph)
    costs = [bitplan.price(name, graph) for name in ("bmac", "memory")]
    budgets = ["70%", "memory=80%"]
    assert bitplan.choose(model, example, budget=budgets) == bitplan.select(graph, gains, costs, budget=budgets)


def test_with_batches_it_takes_drift_and_the_example_from_them():
    model, _ = PASTED["small CNN"]()
    loader = DataLoader(TensorDataset(torch.randn(16, 3, 16, 16), torch.zeros(16).long()), 4)
    plan = bitplan.choose(model, batches=loader, budget="70%")
    assert plan.method == "drift"
    assert plan.model == "Small"


def test_a_file_of_weights_is_enough(tmp_path):
    torch.save(Small().state_dict(), tmp_path / "small.pth")
    plan = bitplan.choose(tmp_path / "small.pth", budget="3.2bpw", choices="w2a16,w3a16,w4a16")
    assert plan.method == "equal_bits"
    assert {precision.act_bits for precision in plan.precisions.values()} == {16}


def test_what_does_not_work_is_one_line():
    model, example = PASTED["small CNN"]()
    with pytest.raises(InputError, match=r"an example input is needed"):
        bitplan.choose(model, budget="70%")
    with pytest.raises(NothingToChoose, match=r"--rules narrow=0 \(Rules\(narrow=0\)\)"):
        bitplan.choose(model, example, budget="70%", rules=bitplan.Rules(narrow=128))
    two = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with pytest.raises(NothingToChoose, match=r"--rules first=free,last=free \(Rules\(first=None, last=None\)\)"):
        bitplan.choose(two, torch.zeros(1, 4), budget="70%")
    free = bitplan.Rules(first=None, last=None)
    assert bitplan.choose(two, torch.zeros(1, 4), budget="70%", rules=free).method == "eagl"

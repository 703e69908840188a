"""Networks whose norms are all that ONNX has no words for are not traced anew, and come out the same but for names."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.exporters import capture as capturing
from bitplan.exporters.capture import capture


class Residual(nn.Module):
    """Convolutions with norms, one without an affine part, a residual addition; `inplace` activations write."""

    def __init__(self, inplace=False):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False),
        )  # fmt: skip
        self.short = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, eps=1e-3, momentum=0.2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        """(B, 3, H, W) → (B, 4)."""
        return self.head(torch.relu(self.body(x) + self.short(x)).mean((2, 3)))


class EndsInNorm(nn.Module):
    """What its norm gives is the network's output."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        """(B, 6) → (B, 5)."""
        return self.norm(self.linear(x))


def quantized(network, x):
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    graph = bitplan.trace(network, x, rules=bitplan.Rules(narrow=0))
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [x])
    return model.eval()


def captured(model, x, monkeypatch, *, spared):
    """The graph, and how often it was taken apart by tracing."""
    real, traced = torch.export.ExportedProgram.run_decompositions, []

    def counted(self, *given, **options):
        traced.append(self)
        return real(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.export.ExportedProgram, "run_decompositions", counted)
        if not spared:
            patch.setattr(capturing, "_decompose_if_needed_", lambda exported: None)
        return canonical(capture(model, x, opset=21).graph), len(traced)


def canonical(graph):
    """All of a graph but what it calls its inner values, which tracing numbers by what else it went through."""
    numbers = {}

    def called(name):
        return f"value {numbers[name]}" if name in numbers else name

    nodes = []
    for node in graph.node:
        inputs = [called(name) for name in node.input]
        numbers |= {name: len(numbers) + place for place, name in enumerate(node.output) if name}
        attributes = sorted(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        nodes.append((node.domain, node.op_type, inputs, [called(name) for name in node.output], attributes))
    kinds = {called(value.name): value.type.SerializeToString(deterministic=True) for value in graph.value_info}
    kept = [value.SerializeToString(deterministic=True) for value in graph.initializer]
    ends = [value.SerializeToString(deterministic=True) for value in (*graph.input, *graph.output)]
    return nodes, kinds, kept, ends


@pytest.mark.parametrize(
    ("network", "shape", "times"),
    [(Residual(), (2, 3, 6, 6), 0), (Residual(inplace=True), (2, 3, 6, 6), 1), (EndsInNorm(), (2, 6), 1)],
    ids=["residual", "writes", "ends in a norm"],
)
def test_a_network_is_taken_apart_only_where_needed_and_its_graph_is_the_same(network, shape, times, monkeypatch):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    model = quantized(network, x)
    expected, once = captured(model, x, monkeypatch, spared=False)
    found, traced = captured(model, x, monkeypatch, spared=True)
    assert (once, traced) == (1, times)
    assert found == expected

"""What every exporter must do, on random small networks and plans: read back equal to the plan and the model."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import EXPORTERS

PRECISIONS = ["w2a2", "w4a4", "w3a3", "w8a8", "w4a16", "w2a8"]
WIDTH = 8


class Net(nn.Module):
    """Random layers one after the other, the last of them twice on one tensor, so that these two are linked."""

    def __init__(self, kinds, flat):
        super().__init__()
        self.parts = nn.ModuleList(self.part(kind, flat) for kind in kinds)
        self.left, self.right = self.part("plain", flat), self.part("plain", flat)

    @staticmethod
    def part(kind, flat):
        if flat:
            return nn.Linear(WIDTH, WIDTH, bias=kind != "wide")
        groups = WIDTH if kind == "each" else 1
        return nn.Conv2d(WIDTH, WIDTH, 3 if kind == "wide" else 1, padding=int(kind == "wide"), groups=groups)

    def forward(self, x):
        for part in self.parts:
            x = part(x).relu()
        return self.left(x) + self.right(x)


@st.composite
def quantized(draw):
    flat = draw(st.booleans())
    net = Net(draw(st.lists(st.sampled_from(["plain", "wide", "each"]), min_size=1, max_size=3)), flat)
    example = torch.zeros(1, WIDTH) if flat else torch.zeros(1, WIDTH, 4, 4)
    graph = bitplan.trace(net, example, rules=bitplan.Rules(first=None, last=None, narrow=0), name="net")
    chosen = {group.name: bitplan.Precision.parse(draw(st.sampled_from(PRECISIONS))) for group in graph.groups}
    precisions = {layer.name: chosen[group.name] for group in graph.groups for layer in group.layers}
    links = tuple(link.layers for link in graph.links)
    plan = bitplan.Plan(model="net", precisions=precisions, links=links, method="random", selector="random")
    model = bitplan.quantize(net, plan, per_channel=draw(st.booleans())).eval()
    bitplan.calibrate_(model, [torch.randn(4, *example.shape[1:])])
    return model, graph, example


@pytest.mark.parametrize("name", list(EXPORTERS))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=quantized())
def test_what_was_written_reads_back_equal(tmp_path, name, made):
    model, graph, example = made
    factory = EXPORTERS.get(name)
    options = {field.name: True for field in dataclasses.fields(factory) if field.name == "widen"}
    exporter, plan = factory(**options), bitplan.plan_of(model)
    source = model if getattr(exporter, "needs_model", False) else plan
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    refusal = ""
    try:
        bitplan.export(source, path, exporter, graph=graph, example=example)
    except InputError as error:
        refusal = str(error)
    if refusal:  # a recipe may not know a kind of layer, but must say which
        assert source is plan, refusal
        assert "every layer" in refusal or any(layer in refusal for layer in plan.precisions)
        assert not path.exists()
        return
    found = exporter.read(path)
    if not options:
        assert {layer: found.precisions[layer] for layer in plan.precisions} == plan.precisions
    codes = bitplan.integer_weights(model)
    for layer in found.codes:
        assert torch.equal(found.codes[layer], codes[layer])
    if source is model:
        assert found.codes.keys() == codes.keys()
    with pytest.raises(InputError, match="exists"):
        bitplan.export(source, path, exporter, graph=graph, example=example)

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
WIDTH = 32
HOLDS = {
    "compressed-tensors": (range(2, 9), (8, 16)),
    "torchao": (range(2, 9), (8, 16)),
    "mlx": ((2, 3, 4, 5, 6, 8), (16,)),
    "llama.cpp": ((4, 5, 8), (16,)),  # k-quants want rows of 256
    "matmulnbits": (range(2, 16), (16,)),
}
"""Bits of weights and of inputs that an exporter which widens has for these networks' linear layers."""


class Net(nn.Module):
    """Random layers one after the other, then two on one tensor, which are linked, then a linear one.

    They are called as tensors of llama.cpp are, which knows no others.
    """

    def __init__(self, kinds, flat):
        super().__init__()
        self.blk = nn.ModuleList(nn.ModuleDict({"part": self.part(kind, flat)}) for kind in kinds)
        both = {"left": self.part("plain", flat), "right": self.part("plain", flat)}
        self.blk.append(nn.ModuleDict({**both, "head": nn.Linear(WIDTH, WIDTH)}))

    @staticmethod
    def part(kind, flat):
        if flat:
            return nn.Linear(WIDTH, WIDTH, bias=kind != "wide")
        groups = WIDTH if kind == "each" else 1
        return nn.Conv2d(WIDTH, WIDTH, 3 if kind == "wide" else 1, padding=int(kind == "wide"), groups=groups)

    def forward(self, x):
        *parts, last = self.blk
        for part in parts:
            x = part["part"](x).relu()
        x = last["left"](x) + last["right"](x)
        return last["head"](x.flatten(2).mean(2) if x.dim() > 2 else x)


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


def widened(found, plan):
    """The layers that the file has at a higher precision than the plan; none may be lower."""
    for layer, planned in plan.precisions.items():
        assert found.precisions[layer].weight_bits >= planned.weight_bits, layer
        assert found.precisions[layer].act_bits >= planned.act_bits, layer
    return {layer for layer, planned in plan.precisions.items() if found.precisions[layer] != planned}


def unheld(name, plan, graph):
    """The layers that a target of ours does not have; those of a link count together, but here they are equal."""
    weights, inputs = HOLDS[name]
    kinds = {layer.name: layer.kind for layer in graph.layers}
    known = ("linear", "conv2d") if name == "matmulnbits" else ("linear",)
    return {
        layer
        for layer, planned in plan.precisions.items()
        if kinds[layer] not in known or planned.weight_bits not in weights or planned.act_bits not in inputs
    }


def check_widened(name, source, plan, found, rest):
    """What was widened is what the target lacks; without `widen` that is refused by name, and nothing else is."""
    lifted = widened(found, plan)
    if name in HOLDS:
        assert lifted == unheld(name, plan, rest["graph"])
    path = rest.pop("path")
    if not lifted:
        assert bitplan.export(source, path, name, **rest).is_file()
        return
    with pytest.raises(InputError, match="widen") as refusal:
        bitplan.export(source, path, name, **rest)
    assert any(layer in str(refusal.value) for layer in lifted)
    assert not path.exists()


@pytest.mark.parametrize("name", list(EXPORTERS))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=quantized())
def test_what_was_written_reads_back_equal(tmp_path, name, made):
    model, graph, example = made
    factory = EXPORTERS.get(name)
    options = {field.name: True for field in dataclasses.fields(factory) if field.name == "widen"}
    exporter, plan = factory(**options), bitplan.plan_of(model)
    source = model if getattr(exporter, "needs_model", False) else plan
    path, other = tmp_path / "file", tmp_path / "other"
    path.unlink(missing_ok=True)
    other.unlink(missing_ok=True)
    refusal = ""
    try:
        bitplan.export(source, path, exporter, graph=graph, example=example)
    except InputError as error:
        refusal = str(error)
    if refusal:  # there is nothing in the plan that a recipe could say
        assert source is plan, refusal
        assert "every layer" in refusal
        assert unheld(name, plan, graph) == plan.precisions.keys() if name in HOLDS else True
        assert not path.exists()
        return
    found = exporter.read(path)
    if options:
        check_widened(name, source, plan, found, {"path": other, "graph": graph, "example": example})
    else:
        assert {layer: found.precisions[layer] for layer in plan.precisions} == plan.precisions
    codes = bitplan.integer_weights(model)
    for layer in found.codes:
        assert torch.equal(found.codes[layer], codes[layer])
    if source is model:
        assert found.codes.keys() == codes.keys()
    with pytest.raises(InputError, match="exists"):
        bitplan.export(source, path, exporter, graph=graph, example=example)


def test_of_our_own_exporters_it_is_said_what_they_hold():
    own = {name: EXPORTERS.get(name) for name in EXPORTERS if EXPORTERS.get(name).__module__.startswith("bitplan.")}
    assert HOLDS.keys() == {name for name, one in own.items() if "widen" in {f.name for f in dataclasses.fields(one)}}

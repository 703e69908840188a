"""Additions of activations and norms after convolutions, found by what a network does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.models.zoo import load_model
from nets import Net

X = torch.empty(1, 4, 8, 8, device="meta")
FREE = bitplan.Rules(first=None, last=None, narrow=0)


def conv(inputs=4, outputs=4):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def found(forward, **parts):
    return bitplan.trace(Net(forward, **parts), X, rules=FREE).integers


def added(integers):
    return {one.name: (one.left, one.right, one.layers) for one in integers.additions}


class Named(Net):
    """One whose forward names its argument."""

    def forward(self, x):
        return self._forward(self, x)


class Block(nn.Module):
    """x + its convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)) + x)


@pytest.mark.parametrize(
    ("name", "count"), [("resnet18", 8), ("resnet50", 16), ("mobilenet_v2", 10), ("resnet20", 9), ("timm/resnet18", 8)]
)
def test_residual_additions_of_known_networks_are_counted(name, count):
    model, example = load_model(name, weightless=True)
    integers = bitplan.trace(model, example).integers
    assert len(integers.additions) == count
    assert not integers.floats
    convolutions = [layer.name for layer in bitplan.trace(model, example).layers if layer.kind.startswith("conv")]
    assert list(integers.norms) == convolutions


def test_the_operand_that_a_block_is_given_is_told():
    model, example = load_model("resnet18", weightless=True)
    names = added(bitplan.trace(model, example).integers)
    assert names["layer1.0.add"] == ("", "x", ("layer1.0.conv2", "conv1"))  # pooled, and nothing else
    assert names["layer1.1.add"] == ("", "x", ("layer1.1.conv2",))  # a sum is no convolution's
    assert names["layer2.0.add"] == ("", "", ("layer2.0.conv2", "layer2.0.downsample.0"))
    model, example = load_model("mobilenet_v2", weightless=True)
    found = added(bitplan.trace(model, example).integers)["features.3.add"]
    assert found == ("x", "", ("features.3.conv.2", "features.2.conv.2"))


def test_layers_are_told_whose_convolution_they_read():
    model, example = load_model("resnet18", weightless=True)
    feeds = bitplan.trace(model, example).integers.feeds
    assert feeds["layer1.0.conv1"] == "conv1"  # behind a norm, ReLU and max pooling
    assert feeds["layer3.1.conv2"] == "layer3.1.conv1"
    assert not {"layer3.1.conv1", "conv1", "fc"} & feeds.keys()  # a sum, the input, an average


def test_additions_are_numbered_within_one_run_of_their_module():
    def forward(net, x):
        y = net.one(x) + x
        y += net.two(y) * 2  # no convolution makes that
        return torch.add(net.three(y), y + 1)

    integers = found(lambda net, x: net.inner(x), inner=Named(forward, one=conv(), two=conv(), three=conv()))
    assert added(integers) == {"inner.add": ("", "x", ("inner.one",)), "inner.add_2": ("", "", ("inner.three",))}
    assert integers.floats == ("inner.add_1",)


def test_a_block_that_is_called_twice_adds_in_one_place():
    integers = found(lambda net, x: net.block(net.block(x)), block=Block())
    assert added(integers) == {"block.add": ("", "x", ("block.conv",))}
    assert integers.norms == {"block.conv": "block.bn"}


def test_blocks_inside_others_add_for_themselves():
    inner = nn.Sequential(Block(), Block())
    integers = found(lambda net, x: net.inner(x) + net.last(x), inner=inner, last=conv())
    assert list(added(integers)) == ["inner.0.add", "inner.1.add", "add"]


def test_functions_on_bare_parameters_are_seen_too():
    weight = nn.Parameter(torch.randn(4, 4, 3, 3))
    integers = found(lambda net, x: F.conv2d(x, net.w, padding=1) + x, w=weight)
    assert added(integers) == {"add": ("", "", ("w",))}


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: net.conv(x) + net.bias,
        lambda net, x: net.conv(x) + 1.0,
        lambda net, x: net.conv(x) + net.conv(x).mean((2, 3), keepdim=True),
        lambda net, x: torch.add(net.conv(x), x, alpha=2),
    ],
)
def test_what_adds_something_else_is_no_addition_of_activations(forward):
    assert not found(forward, conv=conv(), bias=nn.Parameter(torch.randn(4, 8, 8))).additions


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: (lambda y: net.bn(y) + y)(net.conv(x)),  # read twice
        lambda net, x: (lambda y: (net.bn(y), y))(net.conv(x)),  # given away
        lambda net, x: net.bn(F.relu(net.conv(x))),
        lambda net, x: net.bn(net.conv(x)) + net.bn(net.other(x)),  # a norm of two
        lambda net, x: net.bn(net.conv(x)) + net.bn2(net.conv(x + 1)),  # two norms
        lambda net, x: net.bn(net.conv(x)) + net.conv(x + 1),  # once without
        lambda net, x: net.plain(net.conv(x)),
    ],
)
def test_norms_that_cannot_be_folded_are_not_told(forward):
    parts = {"bn": nn.BatchNorm2d(4), "bn2": nn.BatchNorm2d(4), "plain": nn.BatchNorm2d(4, affine=False)}
    assert found(forward, conv=conv(), other=conv(), **parts).norms == {}


def test_norms_are_found_whatever_their_module_is():
    class Both(nn.BatchNorm2d):
        def forward(self, x):
            return F.silu(super().forward(x))

    assert found(lambda net, x: net.both(net.conv(x)), conv=conv(), both=Both(4)).norms == {"conv": "both"}


def test_transformers_keep_their_residual_stream_in_float():
    model, example = load_model("digits_transformer", weightless=True)
    integers = bitplan.trace(model, example).integers
    assert not integers.additions
    assert len(integers.floats) == 4


def test_what_a_recurrent_layer_adds_is_its_own():
    model = nn.LSTM(4, 4)
    graph = bitplan.trace(model, torch.empty(3, 1, 4, device="meta"), rules=FREE)
    assert not graph.integers.floats
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    assert bitplan.trace(quantized, torch.empty(3, 1, 4, device="meta"), rules=FREE) == graph


def test_plans_carry_what_was_found_and_their_ids_do_not():
    graph = bitplan.trace(Block(), X, rules=FREE)
    plan = bitplan.Plan.uniform(graph, "w4a4")
    assert plan.integers == graph.integers
    assert bitplan.Plan.from_json(plan.to_json()) == plan
    assert bitplan.Graph.from_json(graph.to_json()) == graph
    bare = plan.model_copy(update={"integers": None})
    assert bitplan.Plan.from_json(bare.to_json()).id == plan.id
    assert bitplan.Plan.from_json(bare.to_json()).integers is None

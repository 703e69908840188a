"""A layer type of one's own, registered in one place, goes the whole way: no other line of bitplan knows it."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import LAYERS
from bitplan.quant.layers import Channels, LayerType, type_for_class, type_for_forward
from nets import Folded, FoldedType, Gated, GatedType, QuantizedGated

RULES = bitplan.Rules(first=None, last=None, narrow=0)
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Linear(8, 8), Gated(8, 12), nn.ReLU(), Folded(12), nn.Linear(12, 4))


@pytest.fixture(autouse=True)
def _registered():
    with LAYERS.registered("gated", GatedType), LAYERS.registered("folded", FoldedType):
        yield


@pytest.fixture
def network():
    return build()


def made(network, precision="w4a4", **options):
    graph = bitplan.trace(network, X, rules=RULES)
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, precision), **options)
    bitplan.calibrate_(model, [X])
    return model, graph


def test_it_is_recognized_by_the_forward_that_runs():
    class Loud(Gated):
        def forward(self, x):
            return super().forward(x) + 1

    assert isinstance(type_for_forward(Gated(2, 2)), GatedType)
    assert isinstance(type_for_forward(type("Plain", (Gated,), {})(2, 2)), GatedType)
    assert type_for_forward(Loud(2, 2)) is None
    assert isinstance(type_for_class(Loud(2, 2)), GatedType)


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_is_quantized_calibrated_and_trained(network, per_channel):
    model, _ = made(network, per_channel=per_channel)
    assert type(model[1]).__bases__ == (QuantizedGated, Gated)
    steps = {name: step.numel() for name, step in bitplan.quant.convert.weight_steps(model).items()}
    each = {"0": 8, "1": 12, "3.up": 16, "3.down": 12, "4": 4}
    assert steps == (each if per_channel else dict.fromkeys(each, 1))
    optimizer = torch.optim.SGD(bitplan.parameter_groups(model, lr=0.1), lr=0.1)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model(X).square().mean().backward()
    optimizer.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}
    assert {"1.weight", "1.gate", "1.weight_quantizer.step", "1.input_quantizer.step"} <= moved
    assert {
        "3.down",
        "3.call_quantizers.up.weight_quantizer.step",
        "3.call_quantizers.down.input_quantizer.step",
    } <= moved


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_multiplies_what_the_plain_layer_would_multiply(network, per_channel):
    model, _ = made(network, per_channel=per_channel)
    codes, steps = bitplan.integer_weights(model), bitplan.quant.convert.weight_steps(model)
    plain = {name: value.detach() for name, value in network[1].named_parameters()}
    quantized = model[1].input_quantizer(X).detach()
    expected = torch.func.functional_call(network[1], plain | {"weight": codes["1"] * steps["1"]}, (quantized,))
    assert torch.allclose(model[1](X), expected, atol=1e-6)


def test_eagl_counts_its_weights_as_they_lie(network):
    model, graph = made(network, per_channel=True)
    gains = bitplan.estimate("eagl", model, graph)
    assert set(gains.rows) == {"0", "1", "3.up", "3.down", "4"}
    codes = bitplan.integer_weights(model)["1"]
    counts = torch.bincount(codes.flatten().long() + 8, minlength=16)
    assert gains.histograms["1"] == tuple(counts.tolist())
    linear = nn.Linear(8, 12)  # the same weights, (out, in)
    linear.weight.data = network[1].weight.data.T.contiguous()
    rows = [
        bitplan.estimate("eagl", part, bitplan.trace(part, X, rules=RULES), steps="absmax", per="channel").rows
        for part in (network[:2], nn.Sequential(network[0], linear))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_is_saved_packed_and_verified_as_onnx(network, per_channel, tmp_path):
    model = made(network, per_channel=per_channel)[0].eval()
    loaded = bitplan.load_checkpoint(bitplan.save_checkpoint(model, tmp_path / "net"), build()).eval()
    assert torch.equal(loaded(X), model(X))
    packed = bitplan.export(model, tmp_path / "net.safetensors", "packed")
    assert torch.equal(bitplan.load_packed(packed, build()).eval()(X), model(X))
    path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=X)
    assert bitplan.verify(path, model, [X]).passed


def test_another_plan_keeps_its_steps_and_a_weight_left_alone_is_alone(network):
    model, graph = made(network)
    lower = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w2a2"))
    assert lower[1].weight_quantizer.step == 4 * model[1].weight_quantizer.step
    ups = [net[3].call_quantizers["up"].weight_quantizer.step for net in (model, lower)]
    assert ups[1] == 4 * ups[0]
    plan = bitplan.Plan(model="net", precisions={"3.down": "w4a4"}, method="by hand", selector="none")
    alone = bitplan.quantize(network, plan)
    alone(X)
    assert set(bitplan.integer_weights(alone)) == {"3.down"}


def test_what_cannot_be_a_layer_type_is_one_line(network):
    class Again(GatedType):
        pass

    class Silent(LayerType):
        pass

    for thing, said in (
        (Again, "the layer types 'gated' and 'mine' both quantize Gated: keep one"),
        (Silent, "the layer type 'mine' cannot be made: .*example"),
        (QuantizedGated, "the layer type 'mine' is not derived from bitplan.LayerType"),
    ):
        with LAYERS.registered("mine", thing), pytest.raises(InputError, match=said):
            type_for_forward(network[0])


def test_without_the_entry_points_of_the_package_nothing_is_guessed(network, monkeypatch):
    monkeypatch.setitem(LAYERS.__dict__, "_installed", {})
    with pytest.raises(InputError, match="own layer types are not installed"):
        type_for_forward(network[0])


def test_groups_are_numbered_within_themselves():
    layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    assert type_for_class(layer).channels(layer) == Channels((0, 2), 2)
    assert type_for_class(nn.ConvTranspose1d(4, 6, 3)).channels(nn.ConvTranspose1d(4, 6, 3)) == Channels((1,))

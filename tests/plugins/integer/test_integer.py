import copy
import logging
import os
import pickle
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.rules import Rules
from bitplan.models.digits import digits_resnet, digits_transformer
from bitplan.models.resnet import resnet20
from bitplan.plugins.integer import IntegerLayers, integer, integer_layers
from bitplan.plugins.integer.integer_copy import IntegerLayer
from bitplan.plugins.integer.kernels import why_not_here
from bitplan.quant import numba_loops
from bitplan.quant.convert import quantizers_of, without_quantizers
from bitplan.quant.layer_types import Conv1D
from bitplan.quant.lsq import codes
from bitplan.tasks.digits import Digits
from bitplan.testing.networks import plan_for
from nets import Net, dynamo

ALL = Rules(first=None, last=None, narrow=0, embeddings=None)


def quantized(model, x, precision="w4a4", **options):
    """Every layer at one precision, calibrated, in inference mode."""
    graph = bitplan.trace(model, x, rules=ALL, name="test")
    made = bitplan.quantize(model, plan_for(graph, {layer.name: precision for layer in graph.layers}), **options)
    bitplan.calibrate_(made, [x])
    return made.eval()


def on_powers_of_two(model):
    """The same with steps and biases by which nothing is ever rounded in float32."""
    for both in quantizers_of(model).values():
        for quantizer in (both.weight, *both.inputs):
            quantizer.step.data = torch.exp2(torch.log2(quantizer.step.data).round())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = (parameter.data * 64).round() / 64
    return model


LAYERS = {
    "linear": (nn.Linear(37, 19), (2, 3, 5, 37)),
    "linear, one sample": (nn.Linear(6, 5, bias=False), (6,)),
    "linear, nothing": (nn.Linear(6, 5), (2, 0, 6)),
    "transformers": (Conv1D(5, 6), (2, 3, 6)),
    "convolution": (nn.Conv2d(7, 9, 3, padding=1), (2, 7, 8, 9)),
    "one sample": (nn.Conv2d(7, 9, 3, padding=1), (7, 8, 9)),
    "pointwise": (nn.Conv2d(16, 32, 1, bias=False), (2, 16, 7, 7)),
    "depthwise": (nn.Conv2d(12, 12, 3, stride=2, padding=1, groups=12), (2, 12, 9, 9)),
    "groups": (nn.Conv2d(8, 12, (3, 5), stride=(2, 1), padding=(0, 2), dilation=(2, 1), groups=4), (2, 8, 11, 9)),
    "same": (nn.Conv2d(4, 6, 4, padding="same", dilation=2), (2, 4, 9, 9)),
    "reflected": (nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 9, 9)),
    "around": (nn.Conv1d(4, 6, 5, padding=2, padding_mode="circular"), (2, 4, 9)),
    "one dimension": (nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=2), (3, 6, 17)),
    "three dimensions": (nn.Conv3d(3, 5, 3, padding=1, stride=(1, 2, 1)), (2, 3, 6, 5, 4)),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_exact_arithmetic_computes(name, signed, per_channel, bits):
    layer, shape = LAYERS[name]
    example = torch.randn(*[max(size, 1) for size in shape])
    model = nn.Sequential(copy.deepcopy(layer))
    model = quantized(model, example if signed else example.abs(), f"w{bits}a{bits}", per_channel=per_channel)
    model = on_powers_of_two(model)
    x = torch.randn(shape)
    exact = copy.deepcopy(model).double()(x.double())
    answer = integer(model)(x)
    assert answer.dtype == torch.float32
    assert torch.equal(answer.double(), exact)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_networks_give_equal_codes(data):
    """Every layer, on the same input, makes the codes of the next one that exact arithmetic makes."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    channels, layers = data.draw(st.sampled_from([4, 8])), []
    for _ in range(data.draw(st.integers(1, 4))):
        groups = data.draw(st.sampled_from([1, 2, channels]))
        size, norm = data.draw(st.sampled_from([1, 3])), data.draw(st.booleans())
        layers += [nn.Conv2d(channels, channels, size, padding=size // 2, groups=groups, bias=not norm)]
        layers += [nn.BatchNorm2d(channels)] if norm else []
        layers += [data.draw(st.sampled_from([nn.ReLU(), nn.Hardswish(), nn.Identity()]))]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 36, 5))
    x = torch.randn(2, channels, 6, 6)
    bits = data.draw(st.sampled_from(["w2a2", "w2a4", "w4a4", "w8a8", "w4a8"]))
    model = quantized(model, x, bits, per_channel=data.draw(st.booleans()))
    exact, made = copy.deepcopy(model).double(), integer(untold(model))  # each norm for itself
    names = [name for name, _ in model.named_children()]
    with torch.no_grad():
        for place, name in enumerate(names):
            ours, theirs = made[place](x), exact[place](x.double())
            later = [made.get_submodule(other) for other in names[place + 1 :]]
            quantizer = next((layer.input_quantizer for layer in later if isinstance(layer, IntegerLayer)), None)
            if isinstance(made.get_submodule(name), IntegerLayer) and quantizer is not None:
                assert torch.equal(quantizer(ours), quantizer(theirs.float()))
            x = theirs.float()


class Depthwise(nn.Module):
    """A residual network of separable convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.spatial = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.mixed = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.mixed(F.relu6(self.spatial(x)))
        return self.head(x.mean((2, 3)))


def depthwise():
    return Depthwise(), torch.empty(1, 1, 8, 8)


def shaken(model):
    """The same with batch normalizations that do something, scales of both signs among it."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.normal_(0.6, 0.5)
            module.bias.data.normal_(0, 0.2)
    return model


def untold(model):
    """The same network by a plan that does not say which norms follow convolutions."""
    return bitplan.quantize(model, bitplan.plan_of(model).model_copy(update={"integers": None})).eval()


@pytest.mark.parametrize("told_by", ["the plan", "an example", "nobody"])
@pytest.mark.parametrize("precision", ["w4a4", "w8a8"])
@pytest.mark.parametrize("make", [digits_resnet, digits_transformer, resnet20, depthwise])
def test_a_network_predicts_the_same(make, precision, told_by):
    model, example = make()
    x = torch.randn(64, *example.shape[1:])
    model = shaken(model).eval()
    model = quantized(model, x, precision)
    if told_by != "the plan":
        model = untold(model)
    made = integer(model, example if told_by == "an example" else None)
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(integer_layers(made).norms) == (set() if told_by == "nobody" else norms)
    assert_alike(model, made, x)


@pytest.mark.parametrize("make", [digits_resnet, resnet20, depthwise])
def test_a_network_made_for_integers_predicts_the_same(make):
    model, example = make()
    x = torch.randn(64, *example.shape[1:])
    plan = bitplan.Plan.uniform(bitplan.trace(shaken(model).eval(), example, rules=ALL), "w4a4")
    model = bitplan.quantize(model, plan, integer=True, per_channel=True)
    bitplan.calibrate_(model, [x])
    made = integer(model.eval())
    assert integer_layers(made).norms
    assert_alike(model, made, x)


def assert_alike(model, made, x):
    with torch.inference_mode():
        ours, theirs = made(x), model(x)
    assert (ours.argmax(1) == theirs.argmax(1)).float().mean() > 0.98  # random weights: codes at ties turn answers
    assert (ours - theirs).abs().mean() < 0.01 * theirs.abs().mean()


def test_a_trained_network_scores_the_same():
    task = Digits()
    model, example = digits_resnet()
    graph = bitplan.trace(model, example, rules=ALL, name="test")
    model = bitplan.quantize(model, plan_for(graph, {layer.name: "w4a4" for layer in graph.layers}))
    bitplan.finetune_(model, task, bitplan.Recipe(epochs=1, lr=0.01))
    score = bitplan.evaluate(model, task)
    assert bitplan.evaluate(integer(model), task) == score
    assert bitplan.evaluate(integer(model, example), task) == score


def test_the_given_model_stays_and_the_copy_has_its_state(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    model = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)), x).train()
    before = copy.deepcopy(model.state_dict())
    made = integer(model)
    assert model.training
    assert not made.training
    assert not any(isinstance(module, IntegerLayer) for module in model.modules())
    assert all(isinstance(made.get_submodule(name), IntegerLayer) for name in ("0", "3"))
    for state in (model.state_dict(), made.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert bitplan.plan_of(made) == bitplan.plan_of(model)
    assert integer_layers(made) == IntegerLayers(("0", "3"), {})
    bitplan.save_checkpoint(made, tmp_path / "kept")
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(again(x), made(x))


def test_the_copy_is_seen_as_the_network_it_was(tmp_path):
    """A trace, a proof, an export and another plan look at it without data."""
    x = torch.randn(2, 3, 8, 8)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    model = quantized(shaken(network), x)
    made = integer(model, x)
    assert integer_layers(made).norms == ("1",)
    assert bitplan.prove(made, x).quantized == {"0": 1, "4": 1}
    with without_quantizers(made), without_quantizers(model):
        torch.testing.assert_close(made(x), model(x))
    assert bitplan.trace(made, x, rules=ALL, name="test") == bitplan.trace(model, x, rules=ALL, name="test")
    bitplan.export(made, tmp_path / "made.onnx", "onnx", example=x)
    bitplan.export(model, tmp_path / "model.onnx", "onnx", example=x)
    assert (tmp_path / "made.onnx").stat().st_size == (tmp_path / "model.onnx").stat().st_size
    lower = bitplan.quantize(made, bitplan.plan_of(model)).train()
    lower(x).sum().backward()
    assert lower.get_submodule("0").weight.grad.any()
    lower.load_state_dict(model.state_dict())
    assert torch.equal(lower.eval()(x), model(x))


def conv_net(x):
    return quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), x)


def test_what_a_copy_cannot_do_is_one_line():
    x = torch.randn(2, 3, 8, 8)
    model = conv_net(x)
    made = integer(model)
    with pytest.raises(InputError, match="cannot be trained or calibrated"):
        copy.deepcopy(made).train()(x)
    with pytest.raises(InputError, match="cannot be trained or calibrated"):
        bitplan.calibrate_(copy.deepcopy(made), [x])
    with pytest.raises(InputError, match="has no gradient"):
        made(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(InputError, match="takes no other weights"):
        made.load_state_dict(model.state_dict())
    with pytest.raises(InputError, match="the input of layer '0' has NaN values"):
        made(torch.full_like(x, torch.nan))
    with pytest.raises(InputError, match="not quantized"):
        integer(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"make a copy that does, with integer\(model\)"):
        integer_layers(model)
    assert made(x).shape == (2, 8, 6, 6)


def test_layers_without_a_kernel_stay_and_say_why(caplog):
    def forward(net, x):
        x = net.up(net.wide(x)).flatten(1) + net.table(torch.zeros(len(x), dtype=torch.long))
        x = F.linear(x, net.lent.weight)
        x = net.huge(net.normed(x))
        return torch.matmul(x.unsqueeze(2), x.unsqueeze(1)).flatten(1) @ torch.eye(9)

    parts = {
        "wide": nn.Conv2d(1, 4, 3),
        "up": nn.ConvTranspose2d(4, 2, 2),
        "table": nn.Embedding(3, 18),
        "lent": nn.Linear(18, 4),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 70000)),
        "huge": nn.Linear(70000, 3),
    }
    x = torch.randn(2, 1, 4, 4)
    model = Net(forward, **parts)
    graph = bitplan.trace(model, x, rules=ALL, name="test")
    plan = plan_for(graph, {name: "w16a8" if name == "wide" else "w8a8" for name in (y.name for y in graph.layers)})
    model = bitplan.quantize(model, plan)
    bitplan.calibrate_(model, [x])
    model.huge.weight_quantizer.step.data.fill_(1e-6)  # every code is the lowest or the highest
    with caplog.at_level(logging.WARNING):
        made = integer(model.eval())
    record = integer_layers(made)
    assert record.computed == ()
    assert record.left["wide"] == "its weight is not quantized"
    assert record.left["up"] == "PyTorch has no integer kernel for ConvTranspose2d"
    assert record.left["table"] == "its input is not quantized"
    assert record.left["lent"] == "a function is given its weight"
    assert record.left["normed"] == "its weight is computed as it runs"
    assert record.left["huge"] == "sums of 70000 products may not fit 32 bits"
    assert record.left["matmul"] == "both of its operands are activations"
    assert "not in integers: layer up (PyTorch has no integer kernel for ConvTranspose2d)" in caplog.text
    with torch.no_grad():
        assert torch.equal(made(x), model(x))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: model.bfloat16(), "it computes in bfloat16"),
        (lambda model: model.to("meta"), "it is on meta"),
    ],
)
def test_what_is_not_float32_on_a_cpu_stays(change, why):
    model = conv_net(torch.randn(2, 3, 8, 8))
    assert integer_layers(integer(change(model))).left == {"0": why}


def test_more_than_8_bits_and_unset_steps_stay():
    model = bitplan.quantize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        bitplan.Plan(model="test", precisions={"0": "w8a12", "1": "w4a4"}, method="by hand", selector="none"),
    )
    left = integer_layers(integer(model)).left
    assert left == {
        "0": "12 bits are more than the 8 of integer kernels",
        "1": "its input step is not set: calibrate_ the model first",
    }


ELSEWHERE = """
import torch, bitplan
from torch import nn
from bitplan.plugins.integer import integer, integer_layers
from bitplan.core.records import Plan
torch.set_num_threads(1)
plan = Plan(model="test", precisions={"0": "w8a8"}, method="by hand", selector="none")
model = bitplan.quantize(nn.Sequential(nn.Conv2d(8, 8, 3)), plan)
x = torch.randn(2, 8, 9, 9)
bitplan.calibrate_(model, [x])
made = integer(model.eval())
assert torch.equal(made(x), model(x))
print(dict(integer_layers(made).left))
"""


def test_a_cpu_without_the_instructions_keeps_the_network_as_it_is():
    """oneDNN is told to use none that this CPU has beyond AVX2: its sums then overflow, which is found out."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], env=environment, capture_output=True, text=True)
    assert "adds 8-bit products up in 16 bits (no VNNI, no AMX)" in done.stdout, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_cpu_can_do_does_not_depend_on_the_defaults(dtype, device):
    before, expected = torch.get_default_dtype(), why_not_here()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            assert why_not_here.__wrapped__() == expected
    finally:
        torch.set_default_dtype(before)


def test_a_network_that_needs_contiguous_tensors_gets_them():
    x = torch.randn(2, 3, 8, 8)
    net = Net(lambda net, x: net.head(net.conv(x).view(len(x), -1)), conv=nn.Conv2d(3, 4, 3), head=nn.Linear(144, 5))
    model = quantized(net, x)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            integer(model)(x)
        torch.testing.assert_close(integer(model, channels_last=False)(x), model(x))


FOLDED = {
    "plainly": (lambda net, x: net.norm(net.conv(x)).relu(), True),
    "twice": (lambda net, x: net.norm(net.conv(net.norm(net.conv(x)))), True),
    "again, behind what changes it": (lambda net, x: net.norm(net.norm(net.conv(x)).relu_()), True),
    "also read elsewhere": (lambda net, x: net.norm(y := net.conv(x)) + y, False),
    "also given out": (lambda net, x: (net.norm(y := net.conv(x)), y), False),
    "after something else": (lambda net, x: net.norm(net.conv(x).relu()), False),
    "changed in place": (lambda net, x: net.norm(net.conv(x).mul_(2)), False),
    "with another norm": (lambda net, x: net.norm(net.conv(x)) + net.other(net.conv(x)), False),
    "after two": (lambda net, x: net.norm(net.conv(x)) + net.norm(net.second(x)), False),
    "once without": (lambda net, x: net.norm(net.conv(x)) + net.conv(x), False),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_norm_is_folded_only_where_it_alone_reads_a_convolution(name):
    forward, folds = FOLDED[name]
    parts = {"conv": nn.Conv2d(3, 3, 3, padding=1), "second": nn.Conv2d(3, 3, 3, padding=1)}
    norms = {"norm": nn.BatchNorm2d(3), "other": nn.BatchNorm2d(3)}
    x = torch.randn(2, 3, 6, 6)
    network = shaken(Net(forward, **parts, **norms)).eval()
    model = quantized(network, x, "w8a8")
    made = integer(model, x)
    assert integer_layers(made).norms == (("norm",) if folds else ())
    with torch.no_grad():
        for ours, theirs in zip(made(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_norm_whose_convolution_somebody_watches_is_not_folded():
    x = torch.randn(2, 3, 8, 8)
    model = conv_net(x)
    model[0].register_forward_hook(lambda *_: None)
    assert integer_layers(integer(model, x)).norms == ()


def test_a_norm_with_a_forward_of_its_own_is_not_folded():
    x = torch.randn(2, 3, 8, 8)
    model = conv_net(x)
    model[1].forward = lambda x: x
    assert integer_layers(integer(model, x)).norms == ()


def test_a_model_that_decides_by_values_is_folded_by_a_run():
    x = torch.randn(2, 3, 8, 8)
    parts = {"conv": nn.Conv2d(3, 3, 3), "norm": nn.BatchNorm2d(3)}
    model = quantized(Net(lambda net, x: net.norm(net.conv(x)), **parts).eval(), x)
    model._forward = lambda net, x: net.norm(net.conv(x)) if x.sum() < torch.inf else x
    assert integer_layers(integer(model, x)).norms == ("norm",)


def separable():
    """Norms and what cuts off behind convolutions, in a sequence and in sequences inside it."""
    inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
        inner,
        nn.Conv2d(8, 4, 1),
        nn.Hardtanh(-0.1, 0.2),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 5),
    )


def one_by_one(module, x):
    """What a sequence is, each of its modules called by itself."""
    if not isinstance(module, nn.Sequential):
        return module(x)
    for child in module:
        x = one_by_one(child, x)
    return x


class Operations(TorchDispatchMode):
    """The names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def made_separable():
    x = 10 * torch.randn(2, 3, 8, 8)
    return integer(quantized(shaken(separable()).eval(), x, "w8a8"), x), x


@pytest.mark.parametrize("copied", [lambda made: made, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_convolutions_of_a_sequence_do_the_work_of_what_is_behind_them(dtype, copied):
    made, x = made_separable()
    made(x)
    made, x = copied(made), x.to(dtype)
    assert len(integer_layers(made).norms) == 3
    with Operations() as seen:
        out = made(x)
    assert out.dtype == dtype
    assert torch.equal(out, one_by_one(made, x))
    cut = {"relu", "hardtanh", "hardtanh_", "native_batch_norm", "_native_batch_norm_legit_no_training"}
    assert dtype != torch.float32 or not cut & set(seen.names)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", ["0", "0.1", "0.2", "1", "1.0", "3"])
@torch.no_grad()
def test_who_watches_a_module_of_a_sequence_sees_it(name, replaced):
    made, x = made_separable()
    expected, seen = made(x), []
    watched = made.get_submodule(name)
    if replaced:  # as those do who take all hooks off
        watched._forward_hooks = OrderedDict()
    watched.register_forward_hook(lambda module, args, out: seen.append(out.clone()))
    assert torch.equal(made(x), expected)
    one_by_one(made, x)
    assert len(seen) == (2 if "." in name or name == "3" else 1)
    assert torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("name", ["0.2", "1", "1.1", "1.2", "3"])
@torch.no_grad()
def test_a_module_that_is_put_into_a_sequence_runs(name):
    made, x = made_separable()
    before = made(x)
    made.set_submodule(name, nn.Softplus())
    assert not torch.equal(made(x), before)
    assert torch.equal(made(x), one_by_one(made, x))


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", ["0", "0.0", "0.1", "0.2", "1", "3"])
@torch.no_grad()
def test_a_module_of_a_sequence_runs_its_own_forward(name, ran):
    made, x = made_separable()
    expected, module = made(x) if ran else copy.deepcopy(made)(x), made.get_submodule(name)
    seen = []

    def forward(x):
        seen.append(x)
        return type(module).forward(module, x)

    module.forward = forward
    assert torch.equal(made(x), expected)
    assert len(seen) == 1


@torch.no_grad()
def test_a_folded_norm_keeps_the_memory_layout():
    x = torch.randn(1, 3, 8, 8)  # a view may be given another stride for one sample
    made = integer(conv_net(x), x)
    convolved = made[0](x)
    assert made[1](convolved).stride() == convolved.stride()


@torch.no_grad()
def test_limits_may_change():
    made, x = made_separable()
    before = made(x)
    made[3].max_val = 0.05
    assert not torch.equal(made(x), before)
    assert torch.equal(made(x), one_by_one(made, x))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardtanh(-2, 2)])
@torch.no_grad()
def test_a_norm_of_a_sequence_normalizes_again_what_was_cut_off(act):
    x, norm = torch.randn(2, 3, 8, 8), nn.BatchNorm2d(8)
    network = shaken(nn.Sequential(nn.Conv2d(3, 8, 3), norm, act, norm, nn.Conv2d(8, 4, 1)))
    model = quantized(network.eval(), x, "w8a8")
    made = integer(model, x)
    assert integer_layers(made).norms == ("1",)
    torch.testing.assert_close(made(x), model(x))
    torch.testing.assert_close(one_by_one(made, x), model(x))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-2, 2)])
@torch.no_grad()
def test_nothing_makes_a_number_of_nan(act):
    x = torch.randn(2, 3, 8, 8)
    model = quantized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act), x, "w8a8")
    model.state_dict()["1.running_var"][3] = -1  # of which there is no root
    made = integer(model, x)
    assert integer_layers(made).norms == ("1",)
    assert torch.equal(made(x).isnan(), model(x).isnan())
    assert made(x)[:, 3].isnan().all()


def test_a_copy_that_is_quantized_again_keeps_nothing_of_its_integers():
    made, x = made_separable()
    made(x)
    model = bitplan.quantize(made, bitplan.plan_of(made))
    expected = bitplan.quantize(shaken(separable()), bitplan.plan_of(made))
    held = [{name: vars(module).keys() for name, module in each.named_modules()} for each in (model, expected)]
    assert held[0] == held[1]


@torch.no_grad()
def test_a_copy_of_a_copy_that_was_quantized_again_has_its_own_weights():
    made, x = made_separable()
    before = made(x)
    again = bitplan.quantize(made, bitplan.plan_of(made))
    for parameter in again.parameters():
        parameter.mul_(1.5)
    again = integer(again.eval())
    assert not torch.equal(again(x), before)
    assert torch.equal(again(x), one_by_one(again, x))


@pytest.mark.parametrize(("low", "high", "zero_point"), [(0, 3, 0), (0, 255, 0), (-2, 1, 128), (-128, 127, 128)])
@pytest.mark.parametrize("step", [0.5, 0.37, 1e-3])
def test_codes_are_those_of_the_quantizer(low, high, zero_point, step):
    ties = torch.arange(-300, 300) + 0.5
    x = torch.cat([ties * step, torch.randn(1000) * step * high, torch.tensor([torch.inf, -torch.inf, -0.0, 1e-42])])
    encoded, has_nan = numba_loops.encode(x, step, low, high, zero_point)
    assert not has_nan
    assert torch.equal(encoded.float() - zero_point, codes(x, torch.tensor(step), low, high))
    for place in (0, 700, len(x) - 1):
        x_with = x.clone()
        x_with[place] = torch.nan
        assert numba_loops.encode(x_with, step, low, high, zero_point)[1]


@dynamo
def test_a_compiled_copy_gives_the_same():
    x = torch.randn(2, 3, 8, 8)
    made = integer(conv_net(x))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(made, backend="eager")(x), made(x))


@pytest.mark.parametrize("name", ["0.bias", "1.running_var", "3.weight"])
def test_values_that_are_not_finite_are_refused_by_name(name):
    x = torch.randn(2, 3, 8, 8)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = quantized(network, x)
    with torch.no_grad():
        dict([*model.named_parameters(), *model.named_buffers()])[name].view(-1)[0] = torch.inf
    with pytest.raises(InputError, match=rf"layer '{name[0]}': 1 of \d+ values of {name} "):
        integer(model)

"""Integer kernels: what both runtimes compute is exact integer arithmetic, and they do compute in integers."""

import logging

import networks
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import IMAGES, batch_like, made
from torch import nn

import bitplan
from bitplan.adapters.onnxruntime import Session
from bitplan.plugins.runtimes.openvino import OpenVinoSession
from bitplan.quant.convert import quantizers_of
from bitplan.quant.quantizers import InputQuantizer

RUNTIMES = {"onnx": Session, "openvino": OpenVinoSession}
LAYERS = {
    "plain": lambda bias: nn.Conv2d(16, 16, 3, padding=1, bias=bias),
    "pointwise": lambda bias: nn.Conv2d(16, 16, 1, bias=bias),
    "strided": lambda bias: nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=bias),
    "dilated": lambda bias: nn.Conv2d(16, 16, 3, dilation=2, bias=bias),
    "grouped": lambda bias: nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=bias),
    "depthwise": lambda bias: nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=bias),
    "transposed": lambda bias: nn.ConvTranspose2d(16, 16, 2, stride=2, bias=bias),
    "one axis": lambda bias: nn.Conv1d(16, 16, 3, padding=1, bias=bias),
    "linear": lambda bias: nn.Linear(16, 16, bias=bias),
    "linear of words": lambda bias: nn.Linear(16, 16, bias=bias),
}
PRECISIONS = {"none": {0: "w4a4", 3: "w2a2"}, "on the grid": {1: "w4a4", 2: "w8a8"}, "any": {3: "w3a5"}}  # by seed
SHAPES = {"one axis": (16, 9), "linear": (16,), "linear of words": (5, 16)}


class Between(nn.Module):
    """One layer, and a quantizer behind it whose codes are looked at."""

    def __init__(self, layer, bits):
        super().__init__()
        self.layer, self.behind = layer, InputQuantizer(bits, "behind")

    def forward(self, x):
        return self.behind(self.layer(x).relu()) * 2


def codes_after(path, runtime, batch, name="behind"):
    """The codes that the file gives the quantizer of that name."""
    proto = onnx.load(path)
    node = next(node for node in proto.graph.node if node.name == f"{name}.dequantize")
    proto.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))
    step = next(onnx.numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == node.input[1])
    values = runtime(proto.SerializeToString()).run([batch.numpy()])[-1]
    return np.round(values / np.float64(step)).astype(np.int64)


def exact(model, kind, whole):
    """(integer codes of the input, clipped) → the codes behind the layer, in 64-bit integers and double steps."""
    layer, quantizers = model.layer, quantizers_of(model)["layer"]
    low, high = quantizers.inputs[0].range
    codes = whole.clamp(low, high).double()
    about = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups") if hasattr(layer, name)}
    function = {"transposed": F.conv_transpose2d, "one axis": F.conv1d}.get(kind, F.conv2d)
    function = F.linear if kind.startswith("linear") else function
    sums = function(codes, bitplan.integer_weights(model)["layer"].double(), **about)  # whole numbers below 2^53
    assert torch.equal(sums, sums.round())
    steps = quantizers.weight.steps_for(layer.weight).detach().double().flatten() * quantizers.inputs[0].step.double()
    spread = (-1,) if kind.startswith("linear") else (-1, *[1] * (sums.dim() - 2))
    values = sums * steps.view(spread)
    if layer.bias is not None:
        values = values + layer.bias.double().view(spread)
    ratios = values.clamp_min(0) / model.behind.step.double()
    return ratios.round().clamp(*model.behind.range).long().numpy()


def on_grid_(model):
    """Round a layer's bias to multiples of both steps, as a network that is trained for integers has it."""
    quantizers = quantizers_of(model)["layer"]
    steps = (
        quantizers.weight.steps_for(model.layer.weight).detach().double().flatten() * quantizers.inputs[0].step.double()
    )
    with torch.no_grad():
        model.layer.bias.copy_((model.layer.bias.double() / steps).round() * steps)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("bias", ["none", "on the grid", "any"])
@pytest.mark.parametrize("kind", LAYERS)
def test_codes_are_those_of_exact_integer_arithmetic(tmp_path, kind, bias, to):
    """0 of them differ. ONNX Runtime adds other biases in floats: there a sum may fall to the other side of a tie."""
    generator = torch.Generator().manual_seed(3)
    shape = (4, *SHAPES.get(kind, (16, 9, 9)))
    for number, precision in PRECISIONS[bias].items():
        torch.manual_seed(number)
        data = torch.randn(8, *shape[1:]) if number % 2 else torch.rand(8, *shape[1:])
        per_channel = number > 1 and kind != "transposed"
        net = Between(LAYERS[kind](bias != "none"), 4)
        model = made(net, torch.empty(1, *shape[1:]), {"layer": precision}, data=data, per_channel=per_channel)
        if bias == "on the grid":
            on_grid_(model)
        quantizer = quantizers_of(model)["layer"].inputs[0]
        low, high = quantizer.range
        whole = torch.randint(low - 2, high + 3, shape, generator=generator)
        batch = whole * quantizer.step.detach()
        path = bitplan.export(model, tmp_path / f"{number}.onnx", to, example=batch[:1])
        differ = (codes_after(path, RUNTIMES[to], batch) != exact(model, kind, whole)).sum()
        assert differ <= (2 if to == "onnx" and bias == "any" else 0), precision


class Attends(nn.Module):
    """torch's attention between its two products."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(F.scaled_dot_product_attention(x, x.flip(2), x * 0.5))


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_products_of_two_activations_are_exact(tmp_path, to):
    model = made(Attends(), torch.empty(1, 2, 6, 8), "w8a8")
    quantizers = dict(model.named_modules())
    query, key, scores = (
        quantizers[f"call_quantizers.scaled_dot_product_attention.{name}"] for name in ("query", "key", "scores")
    )
    batch = torch.randint(-100, 100, (4, 2, 6, 8), generator=torch.Generator().manual_seed(0)) * query.step.detach()
    path = bitplan.export(model, tmp_path / "net.onnx", to, example=batch[:1])
    left = (batch / query.step).round().double()
    right = (batch.flip(2) / key.step).round().clamp(*key.range).double()
    ratios = (left @ right.mT) * (query.step * key.step).double() * 8**-0.5 / scores.step.double()
    expected = ratios.round().clamp(*scores.range).long().detach().numpy()
    found = codes_after(path, RUNTIMES[to], batch, "call_quantizers.scaled_dot_product_attention.scores")
    assert np.abs(expected).max() > 3
    assert (found != expected).sum() == 0


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_embedding_of_any_bits_looks_up_bytes(tmp_path, to, bits):
    net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4))
    ids = torch.randint(0, 20, (8, 6))
    model = made(net, ids[:1], {"0": f"w{bits}a16"}, data=ids)
    path = bitplan.export(model, tmp_path / "net.onnx", to, example=ids[:1])
    graph = onnx.load(path).graph
    gather = next(node for node in graph.node if node.op_type == "Gather")
    assert [node.op_type for node in graph.node if gather.output[0] in node.input] == ["DequantizeLinear"]
    quantizer = quantizers_of(model)["1"].inputs[0]
    values = (bitplan.integer_weights(model)["0"].double() * quantizers_of(model)["0"].weight.step.double())[ids]
    expected = (values / quantizer.step.double()).round().clamp(*quantizer.range).long().detach().numpy()
    assert (codes_after(path, RUNTIMES[to], ids, "1.input_quantizer") != expected).sum() == 0


class Residual(nn.Module):
    """Two convolutions around an addition whose operands have 8-bit quantizers, and a pooling."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(16, 16, 3, padding=1)
        self.next = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.last = nn.Conv2d(16, 16, 1, bias=False)
        self.one, self.two = InputQuantizer(8, "one"), InputQuantizer(8, "two")
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x):
        x = self.one(self.pool(self.layer(x).relu()))
        return self.last((x + self.two(self.next(x))).relu())


def kernels(path, tmp_path):
    """The operators of ONNX Runtime's own, optimized graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]


@pytest.mark.parametrize("grid", [True, False])
def test_onnx_runtime_makes_integer_operations_where_biases_are_on_the_grid(tmp_path, caplog, grid):
    model = made(Residual(), torch.empty(1, 16, 12, 12), {"layer": "w4a4", "next": "w2a4"})
    if grid:
        on_grid_(model)
    with caplog.at_level(logging.WARNING):
        path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=torch.empty(1, 16, 12, 12))
    found = kernels(path, tmp_path)
    assert found.count("QLinearConv") == (2 if grid else 1)
    assert found.count("MatMulIntegerToFloat") == 1  # the last one, of points, has no quantizer behind it
    assert found.count("QLinearAdd") == 1
    said = "ONNX Runtime multiplies layer in floats: a bias is no multiple of both steps"
    assert (said in caplog.text) != grid
    assert bitplan.verify(path, model, [batch_like(torch.empty(1, 16, 12, 12), 8)]).passed


@pytest.mark.parametrize("per_channel", [False, True])
def test_points_and_classifiers_are_multiplied_as_bytes_with_any_bias(tmp_path, per_channel):
    net = nn.Sequential(nn.Conv2d(16, 8, 1), nn.GELU(), nn.Conv2d(8, 12, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.append(nn.Linear(12, 5))
    example = torch.empty(1, 16, 6, 6)
    model = made(net, example, {"0": "w2a4", "2": "w4a8", "5": "w8a8"}, per_channel=per_channel)
    path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=example)
    found = kernels(path, tmp_path)
    assert (found.count("MatMulIntegerToFloat"), found.count("QGemm")) == (2, 1)
    assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(found)
    verdict = bitplan.verify(path, model, [batch_like(example, 20)])
    assert verdict.close == verdict.samples, verdict


def test_onnx_runtime_multiplies_bytes_in_a_transformer(tmp_path):
    net, example = networks.bert()
    path = bitplan.export(made(net, example, "mixed"), tmp_path / "net.onnx", "onnx", example=example)
    found = kernels(path, tmp_path)
    assert found.count("MatMulIntegerToFloat") + found.count("QLinearMatMul") == 9
    assert not {"MatMul", "Gemm"} & set(found)


@pytest.mark.parametrize(
    ("to", "precisions", "said"),
    [
        ("onnx", "w4a4", "ONNX Runtime multiplies up in floats: it has no integer kernel for ConvTranspose"),
        ("onnx", {"head": "w8a16"}, "ONNX Runtime multiplies head in floats: the input is not quantized"),
        ("onnx", {"point": "w4a12"}, "ONNX Runtime multiplies point in floats: integer kernels take 8 bits"),
        ("openvino", {"point": "w12a4"}, "OpenVINO multiplies point in floats: integer kernels take 8 bits"),
    ],
)
def test_layers_without_an_integer_kernel_are_named(tmp_path, caplog, to, precisions, said):
    model = made(networks.Mixed(), IMAGES, precisions)
    with caplog.at_level(logging.WARNING):
        bitplan.export(model, tmp_path / "net.onnx", to, example=IMAGES)
    assert said in caplog.text


@st.composite
def networks_and_plans(draw):
    """A few layers after each other, some with norms, activations, pooling or a way around; any bits."""
    parts, precisions = [], {}
    for place in range(draw(st.integers(1, 3))):
        groups, size = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 3]))
        bias = draw(st.booleans())
        inner = [nn.Conv2d(8, 8, size, padding=size // 2, groups=groups, bias=bias)]
        inner += [nn.BatchNorm2d(8)] if draw(st.booleans()) else []
        inner += draw(st.sampled_from([[], [nn.ReLU()], [nn.ReLU6()], [nn.ReLU(), nn.MaxPool2d(3, 1, 1)], [nn.GELU()]]))
        block = nn.Sequential(*inner)
        parts.append(Around(block) if draw(st.booleans()) else block)
        name = f"{place}.inner.0" if isinstance(parts[-1], Around) else f"{place}.0"
        precisions[name] = f"w{draw(st.integers(2, 8))}a{draw(st.integers(2, 8))}"
    net = nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 36, 5))
    options = {"per_channel": draw(st.booleans()), "integer": draw(st.booleans())}
    return net, precisions, options, draw(st.integers(0, 999))


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.parametrize(
    "form", [("onnx", {}), ("onnx", {"kernels": "float"}), ("onnx", {"opset": 21}), ("openvino", {})]
)
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=networks_and_plans())
def test_random_networks_and_plans_agree_in_every_form(tmp_path, form, drawn):
    net, precisions, kind, seed = drawn
    to, options = form
    example = torch.empty(1, 8, 6, 6)
    model = made(net, example, precisions, seed=seed, **kind)
    path = bitplan.export(model, tmp_path / "net.onnx", to, example=example, force=True, **options)
    verdict = bitplan.verify(path, model, [batch_like(example, 6, seed=seed)])
    assert verdict.codes_equal
    assert not verdict.unexplained


@pytest.mark.parametrize("kernels", ["integer", "float"])
@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("precision", ["w16a8", "w16a4"])
def test_float_weights_behind_quantized_inputs_stay_float(precision, channels, kernels, tmp_path):
    """ONNX Runtime rounds them to 8 bits by itself where it can."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(4 * 49, 5), nn.Linear(5, 5),
    ).eval()  # fmt: skip
    batch = torch.randn(4, channels, 8, 8)
    graph = bitplan.trace(network, batch, rules=bitplan.Rules(first=None, last=None, narrow=0))
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, precision)).eval()
    bitplan.calibrate_(model, [batch])
    path = bitplan.export(model, tmp_path / "x.onnx", "onnx", example=batch, kernels=kernels)
    (out,) = Session(path).run([batch.numpy()])
    np.testing.assert_allclose(out, model(batch).detach().numpy(), rtol=0, atol=1e-6)


def test_an_integer_convolution_before_a_float_layer_stays_one(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4 * 49, 3),
    ).eval()  # fmt: skip
    batch = torch.randn(2, 3, 20, 20)
    graph = bitplan.trace(network, batch, rules=bitplan.Rules(first=None, last=None, narrow=0))
    assert graph.integers.feeds == {"4": "0", "6": "4", "8": "6"}
    plan = bitplan.Plan.uniform(graph, "w4a4")
    plan = plan.model_copy(update={"precisions": plan.precisions | {"4": bitplan.Precision.parse("w16a16")}})
    model = bitplan.quantize(network, plan, integer=True).eval()
    assert {layer: str(one) for layer, one in bitplan.plan_of(model).precisions.items()} == {
        "0": "w4a4", "4": "w16a8", "6": "w4a4", "8": "w4a4"
    }  # fmt: skip
    assert bitplan.plan_of(bitplan.quantize(network, plan)) == plan
    bitplan.calibrate_(model, [batch])
    path = bitplan.export(model, tmp_path / "x.onnx", "onnx", example=batch)
    optimized = tmp_path / "optimized.onnx"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(optimized), 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(optimized).graph.node]
    assert kinds.count("Conv") + kinds.count("FusedConv") == 1, "the one that the plan leaves float"
    assert "QLinearConv" in kinds
    (out,) = Session(path).run([batch.numpy()])
    np.testing.assert_allclose(out, model(batch).detach().numpy(), rtol=0, atol=1e-5)

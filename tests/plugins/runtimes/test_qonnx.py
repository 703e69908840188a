"""QONNX: the qonnx package runs what we write, with the answers of the PyTorch network."""

import numpy as np
import onnx
import pytest
import torch
from networks import IDS, IMAGES, Mixed, Words, made
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.custom_op.registry import getCustomOp
from qonnx.util.cleanup import cleanup_model
from torch import nn

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.plugins.runtimes.qonnx import Qonnx

LAYERS = {
    "Mixed": {"left": "w2a4", "right": "w2a4", "each": "w3a5", "head": "w8a7", "point": "w16a16", "up": "w4a16"},
    "Words": {"linear": "w2a2", "attention.in_proj": "w3a5", "attention.out_proj": "w5a16"},
}
NETWORKS = {"Mixed": (Mixed, IMAGES, {}), "Words": (Words, IDS, {"per_channel": True})}


@pytest.fixture(autouse=True)
def an_ir_that_onnx_runtime_knows(monkeypatch):
    """qonnx runs each node in ONNX Runtime under the newest IR of onnx, which is ahead of the runtime's."""
    monkeypatch.setattr(onnx, "IR_VERSION", 10)


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def written(request, tmp_path_factory):
    """A network with several precisions, and its file."""
    kind, example, options = NETWORKS[request.param]
    chosen = {name: Precision.parse(precision) for name, precision in LAYERS[request.param].items()}
    model = made(kind(), example, chosen, **options)
    path = bitplan.export(model, tmp_path_factory.mktemp("qonnx") / "net.onnx", "qonnx", example=example)
    return request.param, model, path


def quants(path):
    """Name → (bits, signed) of every Quant, read without bitplan."""
    wrapper = ModelWrapper(str(path))
    return {
        node.name: (int(wrapper.get_initializer(node.input[3])), getCustomOp(node).get_nodeattr("signed"))
        for node in wrapper.graph.node
        if (node.domain, node.op_type) == ("qonnx.custom_op.general", "Quant")
    }


def test_qonnx_runs_it_with_our_answers(written):
    name, model, path = written
    wrapper = cleanup_model(ModelWrapper(str(path)))
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(1, 3, 8, 8) if name == "Mixed" else torch.randint(0, 20, (1, 6))
        (answer,) = execute_onnx(wrapper, {wrapper.graph.input[0].name: x.numpy()}).values()
        with torch.no_grad():
            expected = model(x).numpy()
        assert np.ptp(expected) > 0.01
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


def test_every_quantizer_has_its_own_bits(written):
    name, model, path = written
    found = quants(path)
    weights = {name.removesuffix(".weight_quant"): it for name, it in found.items() if name.endswith("weight_quant")}
    planned = bitplan.plan_of(model).precisions
    assert weights == {layer: (planned[layer].weight_bits, 1) for layer in bitplan.integer_weights(model)}
    if name == "Mixed":
        inputs = {name.removesuffix(".input_quantizer"): it for name, it in found.items() if "weight" not in name}
        # left and right are linked and share theirs; what comes from a ReLU has no sign
        assert inputs == {"stem": (8, 1), "left": (4, 0), "each": (5, 1), "head": (7, 1)}


def test_read_back_equals_plan_and_model(written):
    _, model, path = written
    read = Qonnx().read(path)
    codes = bitplan.integer_weights(model)
    assert read.precisions == bitplan.plan_of(model).precisions
    assert read.codes.keys() == codes.keys()
    assert all(torch.equal(read.codes[layer], codes[layer].int()) for layer in codes)


def test_a_changed_bit_width_is_noticed(written, tmp_path):
    name, _, path = written
    layer = "left" if name == "Mixed" else "linear"
    proto = onnx.load(path)
    bits = next(tensor for tensor in proto.graph.initializer if tensor.name == f"{layer}.weight_quant.bits")
    bits.CopyFrom(onnx.numpy_helper.from_array(np.float32(6), bits.name))
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(FileError, match=f"{layer}.weight_quant has 6 bits, the plan says w2a"):
        Qonnx().read(tmp_path / "net.onnx")
    del proto.graph.initializer[:]
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(FileError, match="net.onnx"):
        Qonnx().read(tmp_path / "net.onnx")


@pytest.mark.parametrize("batch", [3, 0])
def test_the_batch_is_fixed_unless_told(tmp_path, batch):
    example = torch.zeros(1, 8)
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), example)
    path = bitplan.export(model, tmp_path / "net.onnx", "qonnx", example=example, batch=batch)
    graph = ModelWrapper(str(path)).graph
    for value in (graph.input[0], graph.output[0]):
        first = value.type.tensor_type.shape.dim[0]
        assert (first.dim_value, bool(first.dim_param)) == (batch, batch == 0)


def test_what_cannot_be_written(tmp_path):
    example = torch.zeros(1, 8)
    model = made(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), example)
    with pytest.raises(InputError, match="give the quantized model"):
        bitplan.export(bitplan.plan_of(model), tmp_path / "net.onnx", "qonnx", example=example)
    with pytest.raises(InputError, match="not -1"):
        bitplan.export(model, tmp_path / "net.onnx", "qonnx", example=example, batch=-1)
    with pytest.raises(InputError, match="give an example"):
        bitplan.export(model, tmp_path / "net.onnx", "qonnx")
    assert not list(tmp_path.iterdir())

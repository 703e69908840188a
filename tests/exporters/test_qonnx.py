"""QONNX: the qonnx package runs what we write, with the answers of the PyTorch network."""

import numpy as np
import onnx
import pytest
import torch
from networks import IDS, IMAGES, Mixed, Words, made
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.util.cleanup import cleanup_model

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.exporters.qonnx import Qonnx

NETWORKS = {"Mixed": (Mixed, IMAGES), "Words": (Words, IDS)}


@pytest.fixture(autouse=True)
def an_ir_that_onnx_runtime_knows(monkeypatch):
    """qonnx runs each node in ONNX Runtime under the newest IR of onnx, which is ahead of the runtime's."""
    monkeypatch.setattr(onnx, "IR_VERSION", 10)


def network(name, precisions, **options):
    kind, example = NETWORKS[name]
    return made(kind(), example, precisions, **options), example


def sample(example, seed=1):
    torch.manual_seed(seed)
    return (
        torch.randn(1, *example.shape[1:])
        if example.is_floating_point()
        else torch.randint(0, 20, (1, *example.shape[1:]))
    )


def exported(tmp_path, model, example, **options):
    return bitplan.export(model, tmp_path / "net.onnx", "qonnx", example=example, force=True, **options)


def quants(path):
    """Name → (bits, signed) of every Quant, read without bitplan."""
    wrapper = ModelWrapper(str(path))
    return {
        node.name: (int(wrapper.get_initializer(node.input[3])), node.attribute[0].i)
        for node in wrapper.graph.node
        if (node.domain, node.op_type) == ("qonnx.custom_op.general", "Quant")
    }


@pytest.mark.parametrize("options", [{}, {"per_channel": True}])
@pytest.mark.parametrize("precisions", ["w2a2", "w4a4", "w3a5", "w8a16"])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_qonnx_runs_it_with_our_answers(tmp_path, name, precisions, options):
    model, example = network(name, precisions, **options)
    path = exported(tmp_path, model, example)
    wrapper = cleanup_model(ModelWrapper(str(path)))
    x = sample(example)
    (answer,) = execute_onnx(wrapper, {wrapper.graph.input[0].name: x.numpy()}).values()
    with torch.no_grad():
        expected = model(x).numpy()
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


def test_every_quantizer_has_its_own_bits(tmp_path):
    mixed = {"left": "w2a4", "right": "w2a4", "each": "w3a8", "head": "w8a7", "point": "w16a16", "up": "w4a16"}
    model, example = network("Mixed", {name: Precision.parse(it) for name, it in mixed.items()})
    found = quants(exported(tmp_path, model, example))
    weights = {name.removesuffix(".weight_quant"): bits for name, (bits, _) in found.items() if "weight" in name}
    assert weights == {"stem": 4, "left": 2, "right": 2, "each": 3, "head": 8, "up": 4}
    assert all(signed for name, (_, signed) in found.items() if "weight" in name)
    inputs = {name.removesuffix(".input_quantizer"): it for name, it in found.items() if "weight" not in name}
    assert inputs == {"stem": (4, 1), "left": (4, 0), "each": (8, 1), "head": (7, 1)}  # left and right share theirs


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_read_back_equals_plan_and_model(tmp_path, name):
    model, example = network(name, "w3a4", per_channel=True)
    read = Qonnx().read(exported(tmp_path, model, example))
    codes = bitplan.integer_weights(model)
    assert read.precisions == bitplan.plan_of(model).precisions
    assert read.codes.keys() == codes.keys()
    assert all(torch.equal(read.codes[layer], codes[layer].int()) for layer in codes)


def test_the_batch_is_fixed_unless_told(tmp_path):
    model, example = network("Mixed", "w4a4")
    for batch in (1, 3, 0):
        graph = ModelWrapper(str(exported(tmp_path, model, example, batch=batch))).graph
        first = graph.input[0].type.tensor_type.shape.dim[0]
        assert (first.dim_value, bool(first.dim_param)) == (batch, batch == 0)
    with pytest.raises(InputError, match="not -1"):
        exported(tmp_path, model, example, batch=-1)


def test_a_changed_bit_width_is_noticed(tmp_path):
    model, example = network("Mixed", "w4a4")
    path = exported(tmp_path, model, example)
    proto = onnx.load(path)
    bits = next(tensor for tensor in proto.graph.initializer if tensor.name == "left.weight_quant.bits")
    bits.CopyFrom(onnx.numpy_helper.from_array(np.float32(5), bits.name))
    onnx.save(proto, path)
    with pytest.raises(FileError, match="left.weight_quant has 5 bits, the plan says w4a4"):
        Qonnx().read(path)
    del proto.graph.initializer[:]
    onnx.save(proto, path)
    with pytest.raises(FileError, match="net.onnx"):
        Qonnx().read(path)


def test_a_plan_alone_is_not_enough(tmp_path):
    model, example = network("Mixed", "w4a4")
    with pytest.raises(InputError, match="give the quantized model"):
        bitplan.export(bitplan.plan_of(model), tmp_path / "net.onnx", "qonnx", example=example)

"""openvino: networks that OpenVINO runs with equal answers, what it cannot run, and speed beside float."""

import importlib.util
import logging

import networks
import numpy as np
import onnx
import pytest
import torch
from networks import IMAGES, batch_like, made
from torch import nn

import bitplan
from bitplan.adapters import torch as adapter
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import FileError, InputError, MissingExtra
from bitplan.core.verdicts import Verdict
from bitplan.plugins.runtimes.openvino import OpenVino, OpenVinoSession

ALL = ["mixed", "words", "digits_resnet", "digits_transformer", "pspnet", "bert", "vit", "mobilenet"]
EXAMPLE = torch.empty(1, 64)


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


@pytest.mark.parametrize("name", ALL)
def test_a_mixed_network_runs_in_openvino_with_equal_answers(tmp_path, name):
    net, example = getattr(networks, name)()
    model = made(net, example, "mixed")
    path = bitplan.export(model, tmp_path / "net.onnx", "openvino", example=example)
    assert all(
        torch.equal(codes, bitplan.integer_weights(model)[n]) for n, codes in OpenVino().read(path).codes.items()
    )
    verdict = bitplan.verify(path, model, [batch_like(example, 3, seed=5)])
    assert verdict.codes_equal
    assert not verdict.unexplained


class Shared(nn.Module):
    """A sum without a bias that a quantizer and something else read, which OpenVINO would multiply twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        return x * 0.5 + self.second(x)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_sum_that_two_read_is_multiplied_once(tmp_path, per_channel):
    example = torch.empty(1, 8, 6, 6)
    model = made(Shared(), example, "w4a4", per_channel=per_channel)
    path = bitplan.export(model, tmp_path / "net.onnx", "openvino", example=example)
    assert not bitplan.verify(path, model, [batch_like(example, 6)]).unexplained


class Residual(nn.Module):
    """Blocks around an addition, whose one operand nothing else reads: OpenVINO would leave its rounding out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x):
        x = self.first(x).relu()
        x = (self.second(x) + x).relu()
        return self.third(x)


@pytest.mark.parametrize("precision", ["w2a4", "w8a8"])
def test_what_is_rounded_before_an_addition_is_rounded_in_openvino(tmp_path, precision):
    example = torch.empty(1, 8, 6, 6)
    model = made(Residual(), example, precision, integer=True)
    path = bitplan.export(model, tmp_path / "net.onnx", "openvino", example=example)
    verdict = bitplan.verify(path, model, [batch_like(example, 20)])
    assert verdict.close == verdict.samples, verdict


def test_what_openvino_cannot_read_or_compute_is_one_line(tmp_path):
    model = made(mlp(), EXAMPLE, {"2": "w2a2"})
    narrow = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=EXAMPLE)
    with pytest.raises(FileError, match=r"reads no integers of 2 bits, such as 2.codes .* --format openvino"):
        OpenVinoSession(narrow)
    wider = bitplan.export(model, tmp_path / "wider.onnx", "onnx", example=EXAMPLE, opset=21)
    assert OpenVinoSession(wider).run([np.zeros((2, 64), np.float32)])[0].shape == (2, 3)
    with pytest.raises(InputError, match="OpenVINO cannot run the graph on these inputs"):
        OpenVinoSession(wider).run([np.zeros((2, 65), np.float32)])


@pytest.mark.parametrize("bits", [9, 12, 15])
def test_activations_of_more_than_8_bits_are_quantized_in_openvino_too(tmp_path, bits):
    model = made(networks.Mixed(), IMAGES, {"point": f"w4a{bits}", "left": f"w4a{bits}", "right": f"w4a{bits}"})
    path = bitplan.export(model, tmp_path / "net.onnx", "openvino", example=IMAGES)
    assert OpenVino().read(path).precisions["point"].act_bits == bits
    verdict = bitplan.verify(path, model, [batch_like(IMAGES, 20)])
    assert verdict.close == verdict.samples, verdict


def test_a_missing_openvino_is_one_line(tmp_path, monkeypatch):
    model = made(mlp(), EXAMPLE)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name))
    with pytest.raises(MissingExtra, match=r"running OpenVINO needs openvino, .* pip install 'bitplan\[openvino\]'"):
        bitplan.export(model, tmp_path / "net.onnx", "openvino", example=EXAMPLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("to", "options", "runtime"),
    [
        ("onnx", {}, Session),
        ("onnx", {"kernels": "float"}, Session),
        ("openvino", {}, OpenVinoSession),
        ("matmulnbits", {"widen": True}, Session),
    ],
)
def test_speed_is_measured_beside_the_float_network(tmp_path, to, options, runtime):
    model = made(mlp(), EXAMPLE, {"2": "w2a2"})
    path = bitplan.export(model, tmp_path / "net.onnx", to, example=EXAMPLE, **options)
    verdict = bitplan.verify(path, model, [batch_like(EXAMPLE, 6)], speed=True)
    assert verdict.speed.runtime == runtime.name
    assert (verdict.speed.batch, verdict.speed.threads) == (1, 1)
    assert verdict.speed.bytes == path.stat().st_size
    assert verdict.speed.float_bytes > 4 * sum(p.numel() for p in mlp().parameters())
    assert verdict.speed.smaller > 2
    assert verdict.speed.faster == verdict.speed.float_seconds / verdict.speed.seconds
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert bitplan.verify(path, model, [batch_like(EXAMPLE, 6)]).speed is None
    assert bitplan.measure_speed(path, model, EXAMPLE, batch=4, threads=2, rounds=1).batch == 4


def test_speed_takes_an_example_that_is_only_described(tmp_path):
    model = made(mlp(), EXAMPLE)
    path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=EXAMPLE)
    assert bitplan.measure_speed(path, model, EXAMPLE.to("meta"), batch=3, rounds=1).faster > 0


def test_speed_says_where_it_cannot_be(tmp_path, monkeypatch, caplog):
    model = made(mlp(), EXAMPLE)
    packed = bitplan.export(model, tmp_path / "net.safetensors", "packed")
    with pytest.raises(InputError, match="no float form in a runtime"):
        bitplan.measure_speed(packed, model, EXAMPLE)
    path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=EXAMPLE)
    known = {"architecture": "x86_64", "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    assert not adapter.multiplies_bytes()
    with caplog.at_level(logging.WARNING):
        bitplan.measure_speed(path, model, EXAMPLE, rounds=1)
    assert "no instructions for products of bytes (VNNI, AMX): integers will not be fast here" in caplog.text
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known | {"avx_vnni": True})
    assert adapter.multiplies_bytes()


@pytest.mark.parametrize(("bits", "inputs", "block"), [(2, 512, 128), (4, 512, 256), (8, 64, 64), (4, 100, 32)])
def test_blocks_are_as_large_as_is_fast_and_fits(tmp_path, bits, inputs, block):
    example = torch.empty(1, inputs)
    model = made(nn.Sequential(nn.Linear(inputs, 8)), example, {"0": f"w{bits}a16"})
    path = bitplan.export(model, tmp_path / "net.onnx", "matmulnbits", example=example)
    node = next(node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits")
    assert next(attribute.i for attribute in node.attribute if attribute.name == "block_size") == block
    assert bitplan.verify(path, model, [batch_like(example, 6)]).passed

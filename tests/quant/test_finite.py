"""NaN and infinite values never become codes: every door refuses them by the layer's name."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.packed import load_packed
from bitplan.quant.convert import integer_weights
from bitplan.quant.finite import check_finite
from bitplan.weights.torch_tensors import read_safetensors, write_tensors
from nets import two_convolutions

IMAGES = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
PLACES = ("0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var", "3.weight")


@pytest.fixture
def network():
    torch.manual_seed(0)
    return two_convolutions(nn.ReLU()).eval()


@pytest.fixture
def quantized(network, plan):
    made = bitplan.quantize(network, plan(**{"0": "w8a8", "3": "w4a4"}))
    bitplan.calibrate_(made, [IMAGES])
    return made.eval()


def spoilt(model, name, value):
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.state_dict()[name].view(-1)[0] = value
    return made


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", PLACES)
def test_quantize_refuses(network, plan, name, value):
    with pytest.raises(InputError, match=rf"layer '{name[0]}': 1 of \d+ values of {name} are NaN or infinite"):
        bitplan.quantize(spoilt(network, name, value), plan(**{"0": "w8a8", "3": "w4a4"}))


@pytest.mark.parametrize("to", [to for to in ("onnx", "openvino", "qonnx", "packed") if to in EXPORTERS])
@pytest.mark.parametrize("name", [*PLACES, "0.weight_quantizer.step", "3.input_quantizer.step"])
def test_export_refuses(quantized, tmp_path, to, name):
    with pytest.raises(InputError, match=rf"layer '{name[0]}': 1 of \d+ values of {name} "):
        bitplan.export(spoilt(quantized, name, math.nan), tmp_path / "x", to, example=IMAGES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["0.bias", "1.running_var", "3.weight_quantizer.step"])
def test_a_packed_file_is_refused_by_its_name_and_the_layers(network, quantized, tmp_path, name):
    path = bitplan.export(quantized, tmp_path / "x.safetensors", "packed")
    tensors, texts = read_safetensors(path)
    tensors[name].view(-1)[0] = math.nan
    write_tensors(tensors, path, texts)
    with pytest.raises(InputError, match=rf"x.safetensors: layer '{name[0]}': "):
        load_packed(path, network)


def test_a_weight_that_is_computed_is_looked_at_where_codes_are_made_of_it(plan):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)))
    made = bitplan.quantize(model, plan(**{"0": "w4a16"}))
    with torch.no_grad():
        made[0].parametrizations.weight.original1[1] = 0  # its length, by which it is divided
    with pytest.raises(InputError, match=r"layer '0': 4 of 12 values of 0.weight are NaN"):
        integer_weights(made)


def test_masks_may_hold_minus_infinity_and_what_has_no_data_passes():
    model = nn.Linear(4, 4)
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    model.register_buffer("scratch", torch.full((4,), math.nan), persistent=False)
    check_finite(model)
    check_finite(nn.LazyLinear(3))
    check_finite(nn.BatchNorm2d(3, device="meta"))
    model.mask[0, 0] = math.nan
    with pytest.raises(InputError, match="1 of 16 values of mask"):
        check_finite(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_type_of_floats_is_looked_at(dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2, 3), 448.0).to(dtype), requires_grad=False)
    check_finite(model)
    model.weight = nn.Parameter(torch.tensor([[1.0, math.nan]]).to(dtype), requires_grad=False)
    with pytest.raises(InputError, match="layer 'weight': 1 of 2 values of weight"):
        check_finite(model)

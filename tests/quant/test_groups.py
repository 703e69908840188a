"""Steps per group of inputs: how weights are cut, which levels are fitted, what files hold."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.quant.convert import quantizers_of
from bitplan.quant.layers import Channels
from bitplan.quant.weight_groups import Grouping, fit_levels
from bitplan.testing import check_quantizer

RULES = bitplan.Rules(first=None, last=None, narrow=0)
METHODS = ("groups:size=16", "groups:size=16,zeros=true")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, groups=1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 2, groups=2), nn.Flatten(), nn.Linear(294, 10)
    )


def quantized(method, precision="w3a16", model=None, images=None):
    model, images = model or network(), torch.randn(4, 3, 8, 8) if images is None else images
    plan = bitplan.Plan.uniform(bitplan.trace(model, images[:1], rules=RULES), precision)
    return bitplan.quantize(model, plan, method=method).eval(), images


@pytest.mark.parametrize("zeros", [False, True])
def test_it_keeps_the_contract_of_quantizers(zeros):
    from bitplan.quant.weight_groups import Groups

    check_quantizer(Groups(size=12, zeros=zeros))


@pytest.mark.parametrize(
    ("shape", "channels", "rows", "inputs"),
    [
        ((6, 40), Channels((0,)), 6, 40),
        ((40, 6), Channels((1,)), 6, 40),
        ((8, 3, 3, 3), Channels((0,)), 8, 27),
        ((8, 3, 2, 2), Channels((0, 2), 2), 6, 16),
    ],
)
def test_weights_are_cut_and_joined_again(shape, channels, rows, inputs):
    weight, blocks = torch.randn(shape), Grouping(16, channels)
    cut = blocks.cut(weight)
    assert cut.shape == (rows, -(-inputs // 16), 16)
    assert torch.equal(blocks.joined(cut, weight), weight)
    assert torch.equal(blocks.whole(blocks.rows(weight), weight), weight)
    numbers = torch.arange(cut.shape[0] * cut.shape[1]).view(cut.shape[:2])
    assert torch.equal(blocks.cut(blocks.spread(numbers, weight))[..., 0], numbers)


def test_an_output_channel_of_a_transposed_convolution_is_a_row():
    weight = torch.zeros(8, 3, 2, 2)
    weight[4:, 1] = 1  # what the second channel of the second group is made with
    rows = Grouping(16, Channels((0, 2), 2)).rows(weight)
    assert rows.sum(1).tolist() == [0, 0, 0, 0, 16, 0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_fitted_levels_are_better_than_those_up_to_the_largest(bits, zeros):
    torch.manual_seed(bits)
    cut = torch.randn(20, 5, 64) + (0.5 if zeros else 0.0)
    levels = fit_levels(cut, bits, zeros=zeros)
    error = (levels.nearest(cut, bits) - cut).square().sum(-1)
    widest = cut.abs().amax(-1) / (2 ** (bits - 1) - 1)
    plain = torch.round(cut / widest[..., None]) * widest[..., None]
    assert bool((error <= (plain - cut).square().sum(-1) * 1.001).all() or zeros)
    assert float(error.sum()) < 0.97 * float((plain - cut).square().sum())


def test_zero_points_make_ranges_that_are_not_symmetric_cheap():
    torch.manual_seed(0)
    cut = torch.rand(20, 5, 64) + 0.01  # all of one sign
    with_zeros, without = (
        float((fit_levels(cut, 3, zeros=zeros).nearest(cut, 3) - cut).square().sum()) for zeros in (True, False)
    )
    assert with_zeros < 0.35 * without


def test_zero_stays_zero_and_nothing_is_left_out():
    for zeros in (False, True):
        cut = torch.zeros(3, 2, 8)
        assert torch.equal(fit_levels(cut, 2, zeros=zeros).nearest(cut, 2), cut)


@pytest.mark.parametrize("method", METHODS)
def test_files_give_the_same_network(tmp_path, method):
    model, images = quantized(method)
    expected = model(images)
    packed = bitplan.export(model, tmp_path / "net.safetensors", "packed")
    assert torch.equal(bitplan.load_packed(packed, network()).eval()(images), expected)
    saved = bitplan.save_checkpoint(model, tmp_path / "net")
    assert torch.equal(bitplan.load_checkpoint(saved, network()).eval()(images), expected)


@pytest.mark.parametrize("method", METHODS)
def test_half_the_bits_keep_the_range(method):
    model, images = quantized(method, "w4a16")
    lower = bitplan.quantize(model, bitplan.Plan.uniform(bitplan.trace(network(), images[:1], rules=RULES), "w2a16"))
    for before, after in zip(quantizers_of(model).values(), quantizers_of(lower).values(), strict=True):
        assert torch.equal(after.weight.step, before.weight.step * 4)
    assert torch.isfinite(lower(images)).all()


def test_what_cannot_say_groups_refuses_them_by_name():
    model, images = quantized("groups", "w4a8")
    bitplan.calibrate_(model, [images])
    with pytest.raises(InputError, match="groups of its inputs have scales of their own"):
        bitplan.export(model, "net.onnx", to="onnx", example=images[:1])
    with pytest.raises(InputError, match="size is 0"):
        quantized("groups:size=0")


def test_an_embedding_has_groups_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 24), nn.Flatten(), nn.Linear(72, 40), nn.Linear(40, 10))
    words = torch.randint(10, (5, 3))
    graph = bitplan.trace(model, words, rules=bitplan.Rules(first=None, last=None, narrow=0, embeddings=None))
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w3a16"), method="groups:size=16").eval()
    table = made[0].weight_quantizer(made[0].weight)
    assert torch.equal(made[0](words), table[words])
    assert made[0].weight_quantizer.step.shape == (10, 2)

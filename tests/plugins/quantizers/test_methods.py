"""Methods of quantization beside LSQ: each by an answer that is known, and what they have in common."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.codes import entropy
from bitplan.core.errors import InputError
from bitplan.core.registry import QUANTIZERS
from bitplan.core.rules import Rules
from bitplan.plugins.integer import integer, integer_layers
from bitplan.plugins.quantizers.clipped_input import limited
from bitplan.plugins.quantizers.lq import fitted, levels_of
from bitplan.plugins.quantizers.pact import PactInput
from bitplan.quant.convert import options_of, quantize, weight_steps
from bitplan.quant.lsq import lsq
from bitplan.quant.methods import QuantizeOptions, read_method
from bitplan.quant.parameters import parameter_groups
from bitplan.quant.scales import ScaleSharing
from bitplan.testing.networks import Branching

IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
RULES = Rules(first=None, last=None, narrow=0)
FREE = Rules(first=None, last=None, narrow=0, embeddings=None)


def quantized(method, precision="w4a4", **options):
    """The small network of the contracts, all layers at one precision, calibrated."""
    torch.manual_seed(0)
    network = Branching()
    graph = bitplan.trace(network, IMAGES, rules=RULES)
    model = quantize(network, bitplan.Plan.uniform(graph, precision), method=method, **options)
    bitplan.calibrate_(model, [IMAGES])
    return model


def words():
    """Indices (B, L) → (B, L, 3): an embedding, attention and linear layers."""
    return nn.Sequential(nn.Embedding(50, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))


def weight_quantizer(method, weight, bits, **options):
    return read_method(method).weight(weight, bits, ScaleSharing(), QuantizeOptions(**options))


def gaussian(count=200_000, size=1.0):
    return torch.randn(count, generator=torch.Generator().manual_seed(3)) * size


# PACT


def test_the_clip_of_pact_learns_from_what_is_at_or_above_it_and_from_nothing_else():
    x = torch.tensor([-1.0, 0.0, 0.7, 1.999, 2.0, 2.5, 9.0], requires_grad=True)
    upstream = torch.tensor([8.0, 4.0, 16.0, 32.0, 1.0, 0.5, 0.25])
    alpha = nn.Parameter(torch.tensor(2.0))
    limited(x, alpha, 0, 15).backward(upstream)
    assert alpha.grad.item() == 1.0 + 0.5 + 0.25
    assert x.grad.tolist() == [0.0, 0.0, 16.0, 32.0, 0.0, 0.0, 0.0]


def test_below_a_clip_of_inputs_with_a_sign_the_gradient_pulls_the_other_way():
    x, alpha = torch.tensor([-3.0, -0.5, 3.0]), nn.Parameter(torch.tensor(1.0))
    limited(x, alpha, -8, 7).backward(torch.tensor([7.0, 100.0, 1.0]))
    assert alpha.grad.item() == pytest.approx(1.0 - 8.0)  # the lowest level is −8/7·α


def test_inside_its_range_pact_plus_learns_as_the_step_of_lsq_does():
    v = gaussian(1000)
    upstream = torch.randn(1000)
    alpha, step = nn.Parameter(torch.tensor(1.4)), nn.Parameter(torch.tensor(1.4 / 7))
    limited(v, alpha, -8, 7, inside=True).backward(upstream)
    lsq(v, step, -8, 7).backward(upstream)
    assert alpha.grad.item() == pytest.approx(step.grad.item() / 7, rel=1e-4)


@pytest.mark.parametrize("method", ["pact:start=0.5", "pact+:start=0.5", "sawb:start=0.5"])
def test_the_clip_trains_and_decays_only_where_it_is_told_to(method):
    model = quantized(f"{method},decay=0.1").train()
    groups = {group["name"]: group for group in parameter_groups(model, lr=0.1, weight_decay=0.01)}
    clips = [module.limit for module in model.modules() if isinstance(module, PactInput)]
    assert [id(one) for one in groups["steps"]["params"]] == [id(one) for one in clips]
    assert groups["steps"]["weight_decay"] == 0.1
    assert all(clip.item() == pytest.approx(0.5) for clip in clips)
    optimizer = torch.optim.SGD(groups.values())
    model(IMAGES).square().sum().backward()
    optimizer.step()
    assert all(clip.item() != pytest.approx(0.45 + 0.05) for clip in clips)
    assert {group["weight_decay"] for group in parameter_groups(quantized("pact"), lr=0.1)} == {0.0}


# SAWB


def test_at_two_bits_gaussian_weights_are_clipped_at_1_473_deviations():
    weight = gaussian(400_000, 0.3)
    levels = weight_quantizer("sawb", weight, 2).levels(weight)
    assert levels[-1].item() == pytest.approx(1.473 * 0.3, rel=5e-3)
    assert (levels / levels[-1]).tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])


def test_a_clip_that_would_be_negative_is_the_largest_weight():
    weight = torch.tensor([0.5, -0.5] * 8)
    assert weight_quantizer("sawb", weight, 4).levels(weight)[-1].item() == pytest.approx(0.5)


def test_with_a_zero_level_its_own_coefficients_are_taken():
    weight = gaussian(400_000)
    levels = weight_quantizer("sawb:zero=true", weight, 2).levels(weight)
    assert levels[3].item() == pytest.approx(2.6 - 1.71 * (2 / torch.pi) ** 0.5, rel=5e-3)
    assert levels[2].item() == 0.0


# DoReFa


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dorefa_is_its_equation_and_has_at_most_so_many_levels_up_to_one(bits):
    weight, top = gaussian(5000, 0.4), 2**bits - 1
    made = weight_quantizer("dorefa", weight, bits)(weight)
    unit = weight.tanh() / weight.tanh().abs().max()
    assert torch.allclose(made, 2 * ((unit / 2 + 0.5) * top).round() / top - 1, atol=1e-6)
    assert len(made.unique()) <= 2**bits
    assert made.abs().max().item() == pytest.approx(1.0)


def test_scaled_weights_keep_their_size():
    weight = gaussian(5000, 0.01)
    made = weight_quantizer("dorefa:scaled=true,zero=true", weight, 8)(weight)
    assert (made - weight).abs().max() < 0.05 / 127


# ternary


@pytest.mark.parametrize("method", ["ternary", "ternary:learned=true"])
def test_ternary_weights_have_three_levels_which_follow_the_size_of_the_weight(method):
    weight = gaussian(5000)
    one, other = weight_quantizer(method, weight, 2), weight_quantizer(method, weight * 3, 2)
    assert len(one(weight).unique()) == 3
    assert torch.equal(one.codes(weight), other.codes(weight * 3))
    assert torch.allclose(one(weight) * 3, other(weight * 3), rtol=1e-5)


def test_twn_takes_the_mean_beyond_seven_tenths_of_the_mean():
    weight = torch.tensor([0.1, -0.2, 0.9, -1.1, 2.0])  # mean|w| 0.86, threshold 0.602
    assert weight_quantizer("ternary", weight, 2)(weight).tolist() == pytest.approx([0, 0, 4 / 3, -4 / 3, 4 / 3])


def test_ttq_learns_its_two_levels_from_the_weights_that_have_them():
    weight = nn.Parameter(torch.tensor([0.04, -0.2, 0.9, -1.0, 1.0]))  # threshold 0.05
    quantizer = weight_quantizer("ternary:learned=true", weight.detach(), 2)
    assert quantizer.levels(weight).tolist() == pytest.approx([-0.6, 0.0, 0.95])
    quantizer(weight).backward(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]))
    gradients = (quantizer.above.grad.item(), quantizer.below.grad.item())
    assert gradients == pytest.approx((20 / 5**0.5, -10 / 5**0.5))
    assert weight.grad.tolist() == pytest.approx([1.0, 2 * 0.6, 4 * 0.95, 8 * 0.6, 16 * 0.95])


# Q8BERT


def test_moving_maxima_move_with_training_batches_only():
    model = quantized("q8bert:momentum=0.75", "w8a8")
    quantizer = model.head.input_quantizer
    assert quantizer.range == (-128, 127)
    quantizer.limit.fill_(2.0)
    quantizer.eval()(torch.tensor([9.0]))
    assert quantizer.limit.item() == 2.0
    quantizer.train()(torch.tensor([-4.0, 1.0]))
    assert quantizer.limit.item() == pytest.approx(0.75 * 2 + 0.25 * 4)
    assert quantizer.step.item() == pytest.approx(2.5 / 127)


def test_weights_end_at_the_largest_and_all_gradients_pass():
    weight = nn.Parameter(gaussian(1000))
    quantizer = weight_quantizer("q8bert", weight, 8)
    made = quantizer(weight)
    made.sum().backward()
    assert torch.equal(weight.grad, torch.ones(1000))
    assert quantizer.codes(weight).abs().max() == 127
    assert made.abs().max().item() == pytest.approx(weight.abs().max().item())


# N2UQ


@pytest.mark.parametrize(("low", "limit"), [(0, 3.0), (-8, 1.5)])
def test_equal_thresholds_are_uniform_and_the_gradient_passes_between_the_ends(low, limit):
    quantizer = read_method("n2uq").input(4, "layer", QuantizeOptions(), masked=False)
    high = 15 + low
    with torch.no_grad():
        quantizer._settle_at_(low < 0, limit / high)
    x = (gaussian(2000) * limit).requires_grad_()
    made = quantizer(x)
    step = limit / high
    assert torch.allclose(made, (x / step).clamp(low, high).round() * step, atol=1e-5)
    made.sum().backward()
    expected = ((x > low * step) & (x < limit)).float()
    assert torch.allclose(x.grad, expected, atol=1e-5)
    assert all(torch.isfinite(p.grad).all() and p.grad.any() for p in quantizer.parameters())


def test_a_longer_interval_has_later_thresholds_and_a_flatter_gradient():
    quantizer = read_method("n2uq").input(2, "layer", QuantizeOptions(), masked=False)
    with torch.no_grad():
        quantizer._settle_at_(False, 1.0)  # levels 0, 1, 2, 3; intervals of 1
        quantizer.widths[1] *= 2  # from 1 to 3: the second threshold is at 2, the third at 3.5
    x = torch.tensor([0.4, 0.6, 1.9, 2.1, 3.4, 3.6], requires_grad=True)
    made = quantizer(x)
    assert made.tolist() == pytest.approx([0.0, 1.0, 1.0, 2.0, 2.0, 3.0])
    made.sum().backward()
    assert x.grad.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5, 1.0, 1.0])
    quantizer.rescale_(3)
    assert quantizer.widths.numel() == 7
    assert quantizer.widths.sum().item() == pytest.approx(4 * 2 / 3)


# LQ-Nets


@pytest.mark.parametrize("signed", [True, False])
def test_data_on_the_levels_of_a_basis_give_that_basis_in_one_step(signed):
    true, start = torch.tensor([0.5, 1.3, 2.0]), torch.tensor([0.52, 1.25, 2.05])
    levels, chosen = levels_of(true, signed=signed)
    assert torch.allclose(chosen @ true, levels)
    assert fitted(levels.repeat(50), start, signed=signed).tolist() == pytest.approx(true.tolist(), rel=1e-3)


def test_the_error_of_a_fitted_basis_never_rises():
    weight, errors = gaussian(4000), []
    quantizer = weight_quantizer("lq:momentum=0", weight, 3).train()
    for _ in range(12):
        errors.append((quantizer.eval()(weight) - weight).square().mean().item())
        quantizer.train()(weight)
    assert all(later <= earlier + 1e-7 for earlier, later in pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]


# RVQuant


def test_without_large_values_value_aware_is_min_max():
    weight = gaussian(500)
    for bits in (2, 4, 8):
        made, same = (weight_quantizer(name, weight, bits)(weight) for name in ("value_aware:share=0", "q8bert"))
        assert torch.equal(made, same)


def test_with_all_values_large_value_aware_is_the_identity_up_to_16_bits():
    weight = gaussian(500)
    made = weight_quantizer("value_aware:share=1", weight, 2)(weight)
    step = float(weight.abs().max()) / 32767
    assert float((made - weight).abs().max()) <= step * 0.501
    model = quantized("value_aware:share=1", "w2a2").eval()
    torch.manual_seed(0)
    assert torch.allclose(model(IMAGES), Branching().eval()(IMAGES), atol=2e-3)


def test_the_largest_values_keep_16_bits_and_the_others_have_their_own_range():
    weight = torch.cat([torch.linspace(-1, 1, 98), torch.tensor([40.0, -37.3])])
    quantizer = weight_quantizer("value_aware:share=0.02", weight, 4)
    made, codes = quantizer(weight), quantizer.codes(weight)
    assert (made - weight)[:98].abs().max() <= 1 / 7 / 2 + 1e-6
    assert (made - weight)[98:].abs().max() <= 40 / 32767
    assert codes[:98].abs().max() == 7
    assert codes[98:].tolist() == [7 + 32767, -8 - round(37.3 / 40 * 32767)]
    assert torch.equal(quantizer.levels(weight)[(codes - quantizer.range[0]).long()], made)
    assert (quantizer.levels(weight)[1:] != quantizer.levels(weight)[:-1]).all()


def test_a_share_of_inputs_is_large_by_what_calibration_saw():
    quantizer = read_method("value_aware:share=0.1").input(3, "layer", QuantizeOptions(), masked=False)
    seen, values = quantizer.new_observation(), gaussian(10_000).abs()
    seen.add(values)
    quantizer.settle_(seen)
    codes = quantizer.codes(values)
    assert (codes > 7).float().mean() == pytest.approx(0.1, abs=1e-3)
    assert torch.equal(quantizer.levels()[codes.long()], quantizer(values))
    beyond = torch.tensor([0.5, 2 * float(values.max())], requires_grad=True)
    quantizer(beyond).sum().backward()
    assert beyond.grad.tolist() == [1, 0]
    assert float(quantizer(beyond.detach())[1]) == pytest.approx(float(values.max()), rel=1e-6)


# what they have in common

UNIFORM = [*(name for name in QUANTIZERS if QUANTIZERS.get(name).uniform), "pact:zero=true", "dorefa:scaled=true"]


@pytest.mark.parametrize("method", UNIFORM)
@pytest.mark.parametrize("per_channel", [False, True])
def test_eagl_counts_the_codes_that_are_computed(method, per_channel):
    model = quantized(method, "w2a4", per_channel=per_channel).eval()
    graph = bitplan.trace(Branching(), IMAGES, rules=RULES)
    gains = bitplan.estimate("eagl", model, graph, choices="w2a2,w2a4")
    codes = bitplan.integer_weights(model)
    for layer in graph.layers:
        counts = torch.bincount(codes[layer.name].flatten().long() + 2, minlength=4)
        assert gains.histograms[layer.name] == tuple(counts.tolist())
    expected = {group.name: sum(entropy(gains.histograms[one.name]) for one in group.layers) for group in graph.groups}
    assert {name: row[-1] for name, row in gains.rows.items()} == pytest.approx(expected)


@pytest.mark.parametrize("method", UNIFORM)
def test_embeddings_and_attention_are_packed_and_come_back(method, tmp_path):
    torch.manual_seed(0)
    network, ids = words(), torch.randint(0, 50, (2, 5))
    graph = bitplan.trace(network, ids, rules=FREE)
    model = quantize(network, bitplan.Plan.uniform(graph, "w8a8"), method=method)
    bitplan.calibrate_(model, [ids])
    expected = model.eval()(ids)
    again = bitplan.load_packed(bitplan.export(model, tmp_path / "net.safetensors", "packed"), network).eval()
    assert torch.equal(again(ids), expected)
    kept = quantize(again, bitplan.plan_of(again)).eval()
    assert torch.equal(kept(ids), expected)
    assert torch.isfinite(again.train()(ids)).all()


@pytest.mark.parametrize("method", list(QUANTIZERS))
def test_how_values_lie_in_memory_does_not_matter(method):
    quantizer = read_method(method).input(4, "layer", QuantizeOptions(), masked=False).train()
    x = gaussian(60).view(6, 10)
    quantizer(x)  # sets its levels
    assert torch.equal(quantizer.eval()(x.T), quantizer(x).T)
    weight = weight_quantizer(method, x.T, 2).eval()
    if read_method(method).rows:  # the columns of a weight are not what its rows are
        assert torch.equal(weight(x.T), weight(x.T.contiguous()))
    else:
        assert torch.equal(weight(x.T), weight(x).T)


@pytest.mark.parametrize("method", ["sawb", "ternary"])
def test_channels_that_are_numbered_within_groups_have_levels_of_their_own(method, tmp_path):
    network, x = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2)), torch.randn(2, 4, 5, 5)
    graph = bitplan.trace(network, x, rules=RULES)
    model = quantize(network, bitplan.Plan.uniform(graph, "w2a8"), method=method, per_channel=True)
    bitplan.calibrate_(model, [x])
    assert model[0].weight_quantizer.in_use(model[0].weight).numel() == 6
    packed = bitplan.load_packed(bitplan.export(model, tmp_path / "net.safetensors", "packed"), network)
    assert torch.equal(packed.eval()(x), model.eval()(x))


def test_what_one_method_learned_is_where_another_begins():
    model = quantized("lsq")
    step = model.head.input_quantizer.step.item()
    pact = quantize(model, bitplan.plan_of(model), method="pact")
    assert pact.head.input_quantizer.limit.item() == pytest.approx(15 * step)  # its input has no sign
    lower = quantize(pact, bitplan.Plan.uniform(bitplan.trace(Branching(), IMAGES, rules=RULES), "w2a2"))
    assert options_of(lower).method == "pact"
    assert lower.head.input_quantizer.limit.item() == pytest.approx(15 * step)
    assert lower.head.input_quantizer.step.item() == pytest.approx(5 * step)
    back = quantize(lower, bitplan.plan_of(lower), method="lsq")
    assert back.head.input_quantizer.step.item() == pytest.approx(5 * step)
    assert back.head.weight_quantizer.step > 0


def test_a_checkpoint_remembers_its_method_and_its_options(tmp_path):
    model = quantized("sawb:zero=true,decay=0.5", "w4a4").eval()
    path = bitplan.save_checkpoint(model, tmp_path / "net")
    again = bitplan.load_checkpoint(path, Branching()).eval()
    assert options_of(again).method == "sawb:zero=true,decay=0.5"
    assert torch.equal(again(IMAGES), model(IMAGES))
    about = path / "checkpoint.json"
    lines = [line for line in about.read_text().splitlines() if '"id"' not in line]
    about.write_text("\n".join(lines).replace("sawb:zero=true,decay=0.5", "os:system=1"))
    with pytest.raises(InputError, match=r"^[^\n]*unknown quantizer 'os'[^\n]*$"):
        bitplan.load_checkpoint(path, Branching())


def test_from_a_file_alone_codes_that_follow_from_weights_are_not_guessed(tmp_path):
    path = bitplan.save_checkpoint(quantized("sawb"), tmp_path / "net")
    graph = bitplan.trace(Branching(), IMAGES, rules=RULES)
    with pytest.raises(InputError, match=r"^[^\n]*levels follow from the weights of layer 'stem'[^\n]*load_checkpoint"):
        bitplan.estimate("eagl", str(path), graph)


@pytest.mark.parametrize("method", ["sawb:zero=true", "ternary"])
def test_multiples_of_a_step_run_elsewhere(method, tmp_path):
    model = quantized(method, "w2a8").eval()
    path = bitplan.export(model, tmp_path / "net.onnx", "onnx", example=IMAGES)
    assert bitplan.verify(path, model, [IMAGES]).passed
    with torch.no_grad():
        expected = model(IMAGES)
        assert torch.allclose(integer(model)(IMAGES), expected, atol=1e-4 * float(expected.abs().max()))


def test_a_parametrized_weight_is_quantized_as_it_is_computed():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    network, x = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 4)), torch.randn(3, 8)
    graph = bitplan.trace(network, x, rules=RULES)
    for method in QUANTIZERS:
        model = quantize(network, bitplan.Plan.uniform(graph, "w8a8"), method=method)
        model.train()(x).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.requires_grad), method


BAD = [
    ({"method": "pcat"}, "unknown quantizer 'pcat'; did you mean pact or pact+?"),
    ({"method": "pact:alpha=2"}, "unknown option of pact 'alpha'"),
    ({"method": "pact:decay=-1"}, "pact: decay is -1, and must be 0 or above"),
    ({"method": "pact:decay=much"}, "pact: decay is 'much', and must be a number"),
    ({"method": "pact:decay"}, "'decay' is not KEY=VALUE"),
    ({"method": "q8bert:momentum=1"}, "momentum is 1, and must be from 0 to below 1"),
    ({"method": "ternary"}, "ternary has no 4 bits for weights, which the plan gives layer 'stem': it has 2, 8; take"),
    ({"method": "pact", "integer": True}, "pact has no scales that stay between two runs: quantize with method faq or"),
    ({"method": "ternary:learned=true", "per_channel": True, "precision": "w2a4"}, "leave per_channel out"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_input_is_one_line_that_says_what_to_do(options, said):
    with pytest.raises(InputError, match=r"^[^\n]+$") as caught:
        quantized(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("pact", "none of its levels is zero"),
        ("ternary:learned=true", "not equally far"),
        ("lq", "not equally far"),
        ("value_aware", "not equally far"),
    ],
)
@pytest.mark.parametrize("to", ["onnx", "qonnx"])
def test_what_an_exporter_cannot_say_is_refused_by_the_name_of_the_layer(method, said, to, tmp_path):
    model = quantized(method, "w2a4").eval()
    with pytest.raises(InputError, match=r"^[^\n]*layer 'stem'[^\n]*$") as caught:
        bitplan.export(model, tmp_path / "net.onnx", to, example=IMAGES)
    assert said in str(caught.value)
    with pytest.raises(InputError, match=r"layer 'stem'"):
        weight_steps(model)
    left = integer_layers(integer(model)).left
    assert said in left["stem"]

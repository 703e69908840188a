"""Every kind of layer against a slow reference: quantize both tensors by hand, then the plain operation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitplan.quant.convert import integer_weights, quantize, weight_steps


def by_hand(v, step, low, high):
    return torch.round(torch.clamp(v / step, low, high)) * step


def input_by_hand(x, bits):
    signed = bool(x.min() < 0)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return by_hand(x, 2 * x.abs().mean() / math.sqrt(high), low, high)


def weight_by_hand(w, bits):
    high = 2 ** (bits - 1) - 1
    return by_hand(w, 2 * w.abs().mean() / math.sqrt(high), -high - 1, high)


class Conv1D(nn.Module):
    """What transformers calls Conv1D: recognized by its name and layout."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Standardized(nn.Conv2d):
    """A convolution with a forward of its own that changes its weight first."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


KINDS = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2), (2, 4, 9, 9)),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 9, 9)),
    "conv2d circular": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", groups=2),
        (2, 4, 9, 9),
    ),
    "conv2d same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 2, 5, 5, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 7)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (2, 4, 7, 7)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 3, padding=1), (2, 2, 4, 4, 4)),
    "transformers Conv1D": (lambda: Conv1D(5, 6), (2, 3, 6)),
}


def reference(module, x, weight):
    """The plain module with its weight exchanged."""
    plain = {name: value.detach() for name, value in module.named_parameters()}
    return torch.func.functional_call(module, plain | {"weight": weight}, (x,))


@pytest.mark.parametrize("precision", ["w4a4", "w2a8", "w4a16", "w16a4"])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_its_reference(kind, signed, precision, plan):
    build, shape = KINDS[kind]
    model = nn.Sequential(build())
    x = torch.randn(shape) if signed else torch.rand(shape)
    quantized = quantize(model, plan(**{"0": precision}))
    weight_bits, act_bits = (int(part) for part in precision[1:].split("a"))
    qx = x if act_bits == 16 else input_by_hand(x, act_bits)
    weight = model[0].weight.detach()
    qw = weight if weight_bits == 16 else weight_by_hand(weight, weight_bits)
    assert torch.allclose(quantized(x), reference(model[0], qx, qw), atol=1e-5)
    assert isinstance(quantized[0], type(model[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_per_output_channel(kind, plan):
    build, shape = KINDS[kind]
    model = nn.Sequential(build())
    quantized = quantize(model, plan(**{"0": "w4a16"}), per_channel=True)
    weight = model[0].weight.detach()
    groups = getattr(model[0], "groups", 1) if "transposed" in kind else 1
    outputs = weight.shape[1] * groups if "trans" in kind else weight.shape[0]
    assert quantized[0].weight_quantizer.step.numel() == outputs
    expected = torch.empty_like(weight)
    for channel in range(outputs):  # slowly: pick each channel's weights one after the other
        if "transposed" in kind:
            rows = torch.arange(weight.shape[0]).chunk(groups)[channel // weight.shape[1]]
            place = (rows, channel % weight.shape[1])
        else:
            place = (slice(None), channel) if "trans" in kind else (channel,)
        expected[place] = weight_by_hand(weight[place], 4)
    x = torch.randn(shape)
    assert torch.allclose(quantized(x), reference(model[0], x, expected), atol=1e-5)
    codes, steps = integer_weights(quantized)["0"], weight_steps(quantized)["0"]
    assert torch.equal(codes * steps, quantized[0].weight_quantizer(quantized[0].weight))


def test_transposed_convolution_keeps_its_output_size(plan):
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, stride=2))
    quantized = quantize(model, plan(**{"0": "w4a4"}))
    assert quantized[0](torch.rand(1, 3, 4, 4), output_size=(10, 10)).shape[-2:] == (10, 10)


@pytest.mark.parametrize("per_channel", [False, True])
def test_embedding_quantizes_its_rows_and_gets_the_gradients_of_the_whole_table(per_channel, plan):
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0))
    quantized = quantize(model, plan(**{"0": "w4a8"}), per_channel=per_channel)
    ids = torch.tensor([[1, 2, 2], [0, 5, 1]])
    upstream = torch.randn(2, 3, 4)
    out = quantized(ids)
    out.backward(upstream)
    table = quantized[0].weight.detach().clone().requires_grad_()
    whole = quantized[0].weight_quantizer(table)
    quantized[0].weight_quantizer.step.grad, rows = None, quantized[0].weight_quantizer.step.grad
    expected = F.embedding(ids, whole)
    expected.backward(upstream)
    assert torch.equal(out, expected)
    assert torch.allclose(quantized[0].weight.grad[1:], table.grad[1:])
    assert torch.allclose(rows, quantized[0].weight_quantizer.step.grad, atol=1e-6)
    assert not hasattr(quantized[0].input_quantizer, "step")


def test_a_subclass_runs_its_own_forward_and_its_changed_weight_is_quantized(plan):
    model = nn.Sequential(Standardized(4, 4, 3))
    quantized = quantize(model, plan(**{"0": "w4a4"}))
    x = torch.rand(2, 4, 6, 6)
    weight = model[0].weight.detach()
    changed = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    step = 2 * changed.abs().mean() / math.sqrt(7)
    expected = F.conv2d(input_by_hand(x, 4), by_hand(changed, step, -8, 7), model[0].bias)
    assert torch.allclose(quantized(x), expected, atol=1e-6)
    assert not torch.allclose(model(x), expected, atol=1e-3)


def test_a_parametrized_weight_is_quantized_after_its_parametrization(plan):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)))
    quantized = quantize(model, plan(**{"0": "w4a16"}))
    x = torch.randn(3, 6)
    out = quantized(x)
    assert torch.allclose(out, F.linear(x, weight_by_hand(model[0].weight.detach(), 4), model[0].bias), atol=1e-6)
    out.sum().backward()
    assert quantized[0].parametrizations.weight.original0.grad is not None


def test_gradient_scale_counts_weights_or_features_per_sample(plan):
    model = nn.Sequential(nn.Linear(6, 5, bias=False))
    x, upstream = torch.randn(8, 6), torch.randn(8, 5)
    grads = {}
    for features in ("sample", "batch"):
        quantized = quantize(model, plan(**{"0": "w4a4"}), features=features)
        quantized(x).backward(upstream)
        grads[features] = quantized[0].input_quantizer.step.grad.item()
        weight_grad = quantized[0].weight_quantizer.step.grad.item()
    assert grads["sample"] / grads["batch"] == pytest.approx(math.sqrt(8))
    qx, weight = input_by_hand(x, 4), model[0].weight.detach()
    step = 2 * weight.abs().mean() / math.sqrt(7)
    ratio = weight / step
    slope = torch.where((ratio > -8) & (ratio < 7), ratio.round() - ratio, ratio.clamp(-8, 7))
    expected = ((upstream.T @ qx) * slope).sum() / math.sqrt(30 * 7)
    assert weight_grad == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("weight", [torch.zeros(5, 6), torch.full((5, 6), 0.25), torch.full((5, 6), 1e-30)])
@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"method": "faq"}])
def test_degenerate_weights_give_usable_steps(weight, options, plan):
    model = nn.Sequential(nn.Linear(6, 5))
    model[0].weight.data = weight
    quantized = quantize(model, plan(**{"0": "w4a4"}), **options)
    step = quantized[0].weight_quantizer.step
    assert (step > 0).all()
    assert step.isfinite().all()
    out = quantized(torch.zeros(2, 6))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in quantized.parameters() if p.grad is not None)


def test_weights_and_inputs_without_elements(plan):
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(0, 5))
    quantized = quantize(model, plan(**{"0": "w4a4"}))
    assert quantized[0].weight_quantizer.step.isfinite().all()
    assert quantized(torch.zeros(2, 0)).isfinite().all()
    assert integer_weights(quantized)["0"].shape == (5, 0)

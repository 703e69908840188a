"""Products of activations and functions given a parameter, against operations written out by hand."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitplan.core.errors import UnknownName
from bitplan.quant.convert import integer_weights, quantize, quantizers_of, without_quantizers


def fake(x, bits, signed=None, seen=None):
    """Fake-quantize with LSQ's first step, by hand; `seen` are the values the step comes from."""
    seen = x if seen is None else seen
    signed = bool(seen.min() < 0) if signed is None else signed
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    step = 2 * seen.abs().mean() / math.sqrt(high)
    return torch.round(torch.clamp(x / step, low, high)) * step


class Attention(nn.Module):
    def __init__(self, product="@"):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.softmax = nn.Softmax(-1)
        self.product = product

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        if self.product == "@":
            return self.softmax(q @ k.transpose(1, 2)) @ x
        if self.product == "bmm":
            return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), x)
        return torch.matmul(torch.matmul(q, k.transpose(1, 2)).softmax(-1), x)


@pytest.mark.parametrize(("product", "name"), [("@", "matmul"), ("bmm", "bmm"), ("matmul", "matmul")])
def test_both_products_and_the_softmax_between_are_quantized(product, name, plan):
    model = nn.Sequential(Attention(product))
    quantized = quantize(model, plan(**{f"0.{name}": "w8a6", f"0.{name}_1": "w8a5"}))
    x = torch.randn(3, 5, 8)
    q, k = model[0].query(x), model[0].key(x)
    scores = fake(q, 6) @ fake(k.transpose(1, 2), 6)
    weights = fake(scores, 8).softmax(-1)
    assert torch.allclose(quantized(x), fake(weights, 5) @ fake(x, 5), atol=1e-5)
    assert not torch.allclose(quantized(x), model(x), atol=1e-3)
    assert [q.bits for q in quantizers_of(quantized)[f"0.{name}"].inputs] == [6, 6, 8]


def test_only_the_second_product_can_be_quantized(plan):
    model = nn.Sequential(Attention())
    quantized = quantize(model, plan(**{"0.matmul_1": "w8a3"}))
    x = torch.randn(3, 5, 8)
    weights = (model[0].query(x) @ model[0].key(x).transpose(1, 2)).softmax(-1)
    assert torch.allclose(quantized(x), fake(weights, 3) @ fake(x, 3), atol=1e-6)


class Outer(nn.Module):
    """Calls a product before and after a part that calls products of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        first = x @ x.transpose(1, 2)
        inside = self.inner(x)
        return first @ inside


@pytest.mark.parametrize("inner", [{}, {"inner.matmul": "w8a8"}])
def test_products_of_parts_are_not_counted_as_the_owners(inner, plan):
    model = Outer()
    quantized = quantize(model, plan(**{"matmul_1": "w8a3", **inner}))
    x = torch.randn(2, 4, 8)
    out = quantized(x)
    with torch.no_grad():
        inside = quantized.inner(x)
    first = x @ x.transpose(1, 2)
    assert torch.allclose(out, fake(first, 3) @ fake(inside, 3), atol=1e-4)


def test_scaled_dot_product_attention_written_out(plan):
    class Model(nn.Module):
        def forward(self, q, k, v, mask=None, is_causal=False):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)

    model = Model()
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    quantized = quantize(model, plan(scaled_dot_product_attention="w8a4"))
    scores = fake(q, 4) @ fake(k, 4).transpose(-2, -1) / 2
    expected = fake(fake(scores, 8).softmax(-1), 4) @ fake(v, 4)
    assert torch.allclose(quantized(q, k, v), expected, atol=1e-5)
    with without_quantizers(quantized):
        assert torch.equal(quantized(q, k, v), model(q, k, v))


@pytest.mark.parametrize("kind", ["bool", "float", "causal", "blind row"])
def test_masks_stay_masks(kind, plan):
    class Model(nn.Module):
        def forward(self, q, k, v, **options):
            return F.scaled_dot_product_attention(q, k, v, **options)

    allowed = torch.ones(5, 5).tril().bool()
    options = {
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.zeros(5, 5).masked_fill(~allowed, torch.finfo(torch.float32).min)},
        "causal": {"is_causal": True},
        "blind row": {"attn_mask": allowed & (torch.arange(5) > 0)[:, None]},
    }[kind]
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    quantized = quantize(Model(), plan(scaled_dot_product_attention="w8a8"))
    out = quantized(q, k, v, **options)
    assert torch.allclose(out, Model()(q, k, v, **options), atol=0.2)
    changed = v.clone()
    changed[..., 4, :] += 0.5  # the last key is hidden from all rows but the last
    again = quantized(q, k, changed, **options)
    assert torch.equal(out[..., :4, :], again[..., :4, :])
    assert not torch.equal(out[..., 4, :], again[..., 4, :])


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_weight = nn.Parameter(torch.randn(5, 6))
        self.proj = nn.Parameter(torch.randn(5, 4))
        self.kernel = nn.Parameter(torch.randn(3, 1, 3))

    def forward(self, x):
        hidden = torch.relu(F.linear(x, weight=self.gate_weight))
        out = hidden @ self.proj
        return F.conv1d(out.unsqueeze(1), self.kernel) + (hidden @ self.proj.view(5, 4)).mean()


def test_parameters_given_to_functions_are_layers(plan):
    model = Functional()
    quantized = quantize(model, plan(gate="w4a4", proj="w3a3", kernel="w2a2"))
    x = torch.randn(7, 6)
    weight = lambda w, bits: fake(w.detach(), bits, signed=True)  # noqa: E731
    hidden = torch.relu(F.linear(fake(x, 4), weight(model.gate_weight, 4)))
    out = fake(hidden, 3) @ weight(model.proj, 3)
    expected = F.conv1d(fake(out.unsqueeze(1), 2), weight(model.kernel, 2)) + out.mean()
    assert torch.allclose(quantized(x), expected, atol=1e-5)
    assert set(integer_weights(quantized)) == {"gate", "proj", "kernel"}


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_projections(need_weights, cross, per_channel, plan):
    model = nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True))
    quantized = quantize(model, plan(**{"0.in_proj": "w4a4", "0.out_proj": "w3a3"}), per_channel=per_channel)
    x, y = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    context = y if cross else x
    out, _ = quantized[0](x, context, context, need_weights=need_weights)

    def weights(w, bits):
        rows = [fake(row, bits, signed=True) for row in w.detach()]
        return torch.stack(rows) if per_channel else fake(w.detach(), bits, signed=True)

    in_weight, bias = weights(model[0].in_proj_weight, 4), model[0].in_proj_bias
    qx, qy = fake(x, 4), fake(context, 4, seen=x)  # one quantizer for all three inputs, set by the query
    q, k, v = (
        F.linear(z, w, b).view(2, -1, 2, 4).transpose(1, 2)
        for z, w, b in zip((qx, qy, qy), in_weight.chunk(3), bias.chunk(3), strict=True)
    )
    mixed = ((q @ k.transpose(-2, -1) / 2).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 8)
    expected = F.linear(fake(mixed, 3), weights(model[0].out_proj.weight, 3), model[0].out_proj.bias)
    assert torch.allclose(out, expected, atol=1e-4)


def test_attention_of_separate_projections(plan):
    model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True))
    layers = {f"0.{name}_proj": "w4a4" for name in ("q", "k", "v", "out")}
    quantized = quantize(model, plan(**layers))
    x, k, v = torch.randn(2, 5, 8), torch.randn(2, 5, 6), torch.randn(2, 5, 4)
    out, _ = quantized[0](x, k, v)
    out.sum().backward()
    assert set(integer_weights(quantized)) == set(layers)
    assert all(q.weight.step.grad is not None and q.inputs[0].range for q in quantizers_of(quantized).values())


def test_encoder_layers_are_quantized_in_inference_too(plan):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    names = ("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    quantized = quantize(model, plan(**{f"layers.0.{name}": "w4a4" for name in names}))
    x = torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    training = quantized(x, src_key_padding_mask=padding)
    quantized.eval()
    with torch.no_grad():  # where torch's fused encoder would run, were it left alone
        assert torch.allclose(quantized(x, src_key_padding_mask=padding), training, atol=1e-6)
        assert not torch.allclose(model.eval()(x), training, atol=1e-3)


def test_owners_survive_copying_and_pickling(plan):
    quantized = quantize(nn.Sequential(Attention()), plan(**{"0.matmul": "w8a8", "0.query": "w4a4"}))
    x = torch.randn(2, 5, 8)
    out = quantized(x)
    assert torch.equal(copy.deepcopy(quantized)(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), out)


@pytest.mark.parametrize(
    ("name", "near"),
    [("0.quer", "0.query"), ("0.matmull", "0.key"), ("1.matmul", "0.key"), ("0.softmax", "0.key")],
)
def test_a_name_that_leads_nowhere_is_an_error(name, near, plan):
    with pytest.raises(UnknownName, match=rf"unknown layer '{name}'.*{near}"):
        quantize(nn.Sequential(Attention()), plan(**{name: "w4a4"}))

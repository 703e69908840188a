"""Layers save no quantized tensors for the backward pass, and gradients do not show it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from bitplan.core.records import Plan
from bitplan.graph.trace import trace
from bitplan.quant import numba_loops, quantizers
from bitplan.quant.convert import quantize
from bitplan.quant.lsq import MASK, gradients_differentiable, lsq, positive_scale
from bitplan.quant.quantizers import QuantizingModule
from nets import Net, classifier, dynamo

keep_inside = torch.ops.aten.hardtanh_backward.default


class Reference(torch.autograd.Function):
    """LSQ whose results are kept by whoever reads them: as it was before they were computed again."""

    @staticmethod
    def forward(ctx, v, step, low, high, scale):
        ctx.save_for_backward(v, step)
        ctx.low, ctx.high, ctx.scale = low, high, scale
        wide = v if v.dtype == torch.float64 else v.float()
        s = positive_scale(step).to(wide.dtype)
        return wide.div(s).clamp_(low, high).round_().mul_(s).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        v, step = ctx.saved_tensors
        dtype, s = v.dtype, positive_scale(step)
        low, high, sign = ctx.low, ctx.high, torch.where(step < 0, -ctx.scale, ctx.scale)
        if v.dtype != torch.float64:
            v, grad = v.float(), grad.float()
        if torch.is_grad_enabled():
            of_v, of_step = gradients_differentiable(grad, v, s, low, high)
            return of_v.to(dtype), of_step.view(step.shape) * sign, None, None, None
        ratio = v.div(s).clamp_(low, high)
        of_v, slopes = keep_inside(grad, ratio, low, high), ratio.round() - keep_inside(ratio, ratio, low, high)
        dense = v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last))
        if step.numel() == 1 and dense and dtype != torch.float64:  # the sum in the order of the loop
            laid_out = torch.empty_like(v).copy_(grad)
            of_step = torch.tensor(numba_loops.gradients_(laid_out, v, s.item(), low, high))
        else:
            of_step = (slopes * grad).sum_to_size(s.shape)
        return of_v.to(dtype), (of_step.view(step.shape) * sign).to(step.dtype), None, None, None


def reference(v, step, low, high, scale=1.0, *, masked=False):
    if not masked:
        return Reference.apply(v, step, low, high, scale)
    return torch.where(v < MASK, v, Reference.apply(v.clamp_min(MASK), step, low, high, scale))


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:-1], 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / 2
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.dropout(torch.softmax(scores.masked_fill(ahead, float("-inf")), dim=-1))
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)


class FusedAttention(Attention):
    def forward(self, x):
        q, k, v = (part(x).view(*x.shape[:-1], 4, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def chain(first, second):
    return nn.Sequential(first, nn.ReLU(), second)


NETWORKS = {
    "convolutions": (lambda: classifier(3, (8, 8)), (6, 3, 12, 12)),
    "groups": (lambda: chain(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.Conv2d(8, 4, 1)), (5, 4, 9, 9)),
    "large": (lambda: chain(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)), (9, 3, 44, 44)),
    "padded in a circle": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 8, 8)),
    "transposed": (lambda: chain(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Conv2d(6, 2, 1)), (3, 4, 6, 6)),
    "tokens": (lambda: nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 5)), (4, 6, 7)),
    "large matrix": (lambda: nn.Linear(400, 401), (3, 400)),
    "attention": (Attention, (3, 5, 16)),
    "attention with dropout": (lambda: Attention(0.2), (3, 40, 16)),
    "fused attention": (FusedAttention, (3, 5, 16)),
    "torch's attention": (lambda: Net(lambda net, x: net.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)), (3, 5, 8)),
    "recurrent": (lambda: Net(lambda net, x: net.r(x)[0], r=nn.LSTM(5, 6, 2, batch_first=True)), (3, 4, 5)),
    "linked": (lambda: Net(lambda net, x: net.a(x) * net.b(x), a=nn.Linear(6, 8), b=nn.Linear(6, 8)), (4, 6)),
}  # fmt: skip


def quantized(name, precision="w4a4", **options):
    """The network, set and calibrated by one batch, and that batch, by which it is differentiated as well."""
    build, shape = NETWORKS[name]
    torch.manual_seed(1)
    model, x = build(), torch.randn(shape)
    graph = trace(model, x[:1], rules=None)
    made = quantize(model, Plan.uniform(graph, precision), **options)
    with torch.no_grad():
        made(x)
    return made, x.requires_grad_()


def gradients(model, x, run=None, **options):
    torch.manual_seed(2)
    out = model(x) if run is None else run(x)
    wanted = [p for p in model.parameters() if p.requires_grad]
    loss = out.float().square().mean() if out.dtype != torch.float64 else out.square().mean()
    return out.detach(), *torch.autograd.grad(loss, [x, *wanted], allow_unused=True, **options)


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.fixture
def as_before(monkeypatch):
    """What a function gives with the reference in the place of our quantizer."""

    def run(function, *arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(quantizers, "lsq", reference)
            return function(*arguments, **options)

    return run


CASES = [
    *((name, {}) for name in NETWORKS),
    *((name, {"per_channel": True}) for name in ("convolutions", "transposed", "tokens")),
    ("convolutions", {"integer": True}),
    ("tokens", {"method": "faq"}),
    ("convolutions", {"features": "batch"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_gradients_are_those_of_before_bit_for_bit(name, options, as_before):
    model, x = quantized(name, **options)
    found = gradients(model, x)
    same(found, as_before(gradients, model, x))
    assert sum(one is not None and bool(one.any()) for one in found[2:]) >= 2


@pytest.mark.parametrize("name", ["convolutions", "tokens", "attention"])
@pytest.mark.parametrize(
    "way", ["channels_last", "float64", "autocast", "checkpoint", "checkpoint autocast", "w2a16", "w16a4"]
)
def test_gradients_are_those_of_before_in_every_setting(name, way, as_before):
    model, x = quantized(name, way if way.startswith("w") else "w4a4")
    if way == "channels_last" and x.dim() == 4:
        model, x = model.to(memory_format=torch.channels_last), x.detach().to(memory_format=torch.channels_last)
    if way == "float64":
        model, x = model.double(), x.detach().double()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in way):
            return checkpoint(model, x, use_reentrant=False) if "checkpoint" in way else model(x)

    x = x.detach().requires_grad_()
    same(gradients(model, x, run), as_before(gradients, model, x, run))


@pytest.mark.parametrize("name", ["convolutions", "tokens", "attention", "fused attention", "linked"])
def test_second_derivatives_are_those_of_before(name, as_before):
    model, x = quantized(name)
    weights = [p for p in model.parameters() if p.dim() > 1]

    def products():
        loss = model(x).pow(3).sum()
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum((one * one.detach().sign()).sum() for one in first), weights, allow_unused=True)

    found, expected = products(), as_before(products)
    same(found, expected)
    assert any(one is not None and one.any() for one in found)


def test_a_graph_can_be_used_twice_where_it_is_retained_and_only_there():
    model, x = quantized("convolutions")
    loss, weights = model(x).square().mean(), list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    same(torch.autograd.grad(loss, weights), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, weights)


def test_weights_that_were_written_to_in_between_are_noticed():
    model, x = quantized("convolutions")
    loss = model(x).square().mean()
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def quantized_storages(model, x):
    """The storages of all quantized tensors of a forward pass, after it, as weak references; and the result."""
    storages = []

    def note(module, arguments, result):
        if result is not arguments[0]:
            storages.append(StorageWeakRef(result.untyped_storage()))

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, QuantizingModule)]
    out = model(x)
    for hook in hooks:
        hook.remove()
    return storages, out


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "recurrent"])  # its steps share one weight
def test_no_quantized_tensor_is_alive_after_the_forward_pass(name, as_before):
    model, x = quantized(name)
    storages, out = quantized_storages(model, x)
    assert len(storages) >= 2
    assert all(storage.expired() for storage in storages)
    out.sum().backward()
    before, out = as_before(quantized_storages, model, x)
    assert not all(storage.expired() for storage in before), "what is counted is there to be counted"


def kept_bytes(model, x):
    """The bytes of all storages that autograd saves, parameters not counted; it does not see what closures hold."""
    found = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # held, so that no other is given its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    del out
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", ["convolutions", "large", "groups", "tokens", "large matrix", "linked"])
def test_no_more_is_kept_than_by_the_float_network(name, as_before):
    model, x = quantized(name)
    float_network = NETWORKS[name][0]()
    x = x.detach()
    assert kept_bytes(model, x) <= 1.02 * kept_bytes(float_network, x)
    assert as_before(kept_bytes, model, x) > 1.2 * kept_bytes(
        float_network, x
    )  # what is counted is there to be counted


def test_attention_with_dropout_keeps_little_more_than_in_floats(as_before):
    model, x = quantized("attention with dropout")
    floats = kept_bytes(NETWORKS["attention with dropout"][0](), x.detach())
    assert kept_bytes(model, x.detach()) < 1.15 * floats
    assert as_before(kept_bytes, model, x.detach()) > 1.5 * floats


@dynamo
@pytest.mark.parametrize("name", ["convolutions", "tokens", "attention", "linked"])
def test_a_compiled_network_has_no_graph_breaks(name):
    model, x = quantized(name)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(copy.deepcopy(model).train())(x.detach())
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(model, x, compiled), gradients(model, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def images_and_step(batch, every, monkeypatch):
    """The gradient of the images' step, where the images need none."""
    monkeypatch.setattr("bitplan.quant.layer_types.EVERY", every)
    model, _ = quantized("convolutions")
    step = model[0].input_quantizer.step
    images = torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(5))
    labels = torch.arange(batch) % 2

    def gradient(x):
        return torch.autograd.grad(F.cross_entropy(model(x), labels), [step, *model[0].parameters()][:3])

    return gradient(images), gradient(images.clone().requires_grad_())


@pytest.mark.parametrize("batch", [1, 5, 16])
def test_the_step_of_images_learns_by_a_convolution_of_slopes(batch, monkeypatch):
    by_slopes, by_input = images_and_step(batch, 1, monkeypatch)
    assert by_slopes[0].item() == pytest.approx(by_input[0].item(), rel=1e-4, abs=1e-8)
    same(by_slopes[1:], by_input[1:])


def test_parts_of_a_batch_estimate_the_gradient_of_the_images_step_without_bias(monkeypatch):
    model, _ = quantized("convolutions")
    model.eval()  # or the samples would depend on each other by the batch's statistics
    step = model[0].input_quantizer.step
    images, labels = torch.randn(16, 3, 12, 12), torch.arange(16) % 2

    def gradient(order):
        loss = F.cross_entropy(model(images[order]), labels[order])
        return torch.autograd.grad(loss, step)[0].item()

    monkeypatch.setattr("bitplan.quant.layer_types.EVERY", 8)
    parts = [gradient(torch.arange(16).roll(shift)) for shift in range(8)]
    monkeypatch.setattr("bitplan.quant.layer_types.EVERY", 1)
    assert sum(parts) / 8 == pytest.approx(gradient(torch.arange(16)), rel=1e-4)
    assert max(parts) > min(parts)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("limits", [(-8, 7), (0, 15)])
@pytest.mark.parametrize("odd", [0.0, float("nan"), float("inf")])
def test_loops_give_what_torchs_operations_give_bit_for_bit(masked, limits, odd):
    v, grad = torch.randn(150_001), torch.randn(150_001)
    v[::7], v[9] = -float("inf") if masked else -6000.0, odd
    found = []
    for quantizer in (reference, lsq):
        x, step = v.clone().requires_grad_(), torch.tensor(-0.3, requires_grad=True)
        y = quantizer(x, step, *limits, 0.5, masked=masked)
        found.append((y.detach(), *torch.autograd.grad(y, (x, step), grad)))
    (y, of_x, of_step), (loop_y, loop_of_x, loop_of_step) = found
    assert torch.equal(loop_y.nan_to_num(9.0), y.nan_to_num(9.0))
    assert torch.equal(loop_of_x, of_x)
    assert loop_of_step.item() == pytest.approx(of_step.item(), rel=1e-4, nan_ok=True)

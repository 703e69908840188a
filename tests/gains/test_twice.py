"""Second derivatives by short ways, against torch's own in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitplan.gains.bilinear import Forms
from bitplan.gains.twice import short_ways


def still(norm):
    """With a scale and a shift that are not 1 and 0, and that are not differentiated by."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter).requires_grad_(False)
    return norm


class Attending(nn.MultiheadAttention):
    def __init__(self, width):
        super().__init__(width, 2, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)[0]


NETWORKS = {
    "convolutions": (lambda: [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, stride=2)], (2, 3, 7, 7)),
    "groups and dilation": (lambda: [nn.Conv2d(4, 8, 3, dilation=2, groups=2, bias=False), nn.Tanh()], (2, 4, 8, 8)),
    "by name": (lambda: [nn.Conv2d(3, 4, 3, padding="same"), nn.Tanh(), nn.Conv2d(4, 2, 1)], (2, 3, 5, 5)),
    "one axis": (lambda: [nn.Conv1d(3, 4, 3, 2, 1), nn.Tanh(), nn.Conv1d(4, 2, 1)], (2, 3, 9)),
    "three axes": (lambda: [nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Conv3d(3, 2, 1)], (2, 2, 4, 4, 4)),
    "normalized": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 1)], (3, 3, 6, 6)),
    "normalized without weights": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)], (3, 3, 6, 6)),
    "by the batch": (lambda: [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)], (3, 3, 6, 6)),
    "normalized features": (lambda: [nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)], (6, 5)),
    "normalized layers": (lambda: [nn.Linear(5, 4), still(nn.LayerNorm(4)), nn.Tanh(), nn.Linear(4, 3)], (2, 6, 5)),
    "normalized images": (lambda: [nn.Conv2d(3, 4, 3), still(nn.LayerNorm((4, 3, 3))), nn.Tanh()], (2, 3, 5, 5)),
    "learned normalization": (lambda: [nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh()], (2, 6, 5)),
    "normalized without scale": (lambda: [nn.Linear(5, 4), nn.LayerNorm(4, elementwise_affine=False)], (6, 5)),
    "bent": (lambda: [nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 2), nn.Mish()], (2, 6, 5)),
    "bent by options": (lambda: [nn.Linear(5, 4), nn.GELU("tanh"), nn.Linear(4, 3), nn.SiLU(inplace=True)], (6, 5)),
    "attention": (lambda: [nn.Linear(5, 4), Attending(4), nn.Linear(4, 2)], (2, 6, 5)),
}  # fmt: skip


def derivatives(model, x):
    """The loss, its gradients, and products of its Hessian with fixed signs, by input and weights."""
    inputs = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    loss = model(x).pow(3).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    signs = [torch.where(torch.arange(t.numel()).view(t.shape) % 3 == 0, -1.0, 1.0).to(t.dtype) for t in inputs]
    second = torch.autograd.grad(first, inputs, signs, allow_unused=True)
    return loss, first, second


@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_are_those_of_torch(name):
    torch.manual_seed(3)
    build, shape = NETWORKS[name]
    model, x = nn.Sequential(*build()).double(), torch.randn(shape).double().requires_grad_()
    model(x.detach())  # running statistics that are not 0 and 1
    model.eval()
    expected = derivatives(model, x)
    with short_ways():
        found = derivatives(model, x)
    assert torch.allclose(found[0], expected[0], rtol=1e-12)
    for own, theirs in ((found[1], expected[1]), (found[2], expected[2])):
        for one, other in zip(own, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_forms_are_vectors_times_products(name):
    """Of all weights, or of some; with the first layer's input differentiated by, and without."""
    torch.manual_seed(3)
    build, shape = NETWORKS[name]
    model, x = nn.Sequential(*build()).double().eval(), torch.randn(shape).double()
    weights = [value for value in model.parameters() if value.dim() > 1 and value.requires_grad]
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is weight for weight in weights))
    for own in (weights, weights[-1:]):
        forms = Forms(own)
        with short_ways(forms):
            grads = torch.autograd.grad(model(x).pow(3).sum(), own, create_graph=True)
        vectors = [torch.randn_like(weight) for weight in own]
        products = torch.autograd.grad(grads, own, vectors, retain_graph=True)
        with forms.gathered(vectors) as gathered:
            rest = torch.autograd.grad(grads, own, vectors, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(grads, own, vectors)
        assert any(gathered)
        for v, hv, terms, more, same in zip(vectors, products, gathered, rest, again, strict=True):
            found = sum(terms) + (0.0 if more is None else (v * more).sum())
            assert torch.allclose(found, (v * hv).sum(), rtol=1e-9, atol=1e-9)
            assert torch.equal(same, hv)


def test_a_weight_that_is_used_twice_has_one_form():
    """By layers as it is, by a layer transposed, and in the loss itself."""
    torch.manual_seed(1)
    weight, x = torch.randn(4, 4).double().requires_grad_(), torch.randn(3, 4).double()
    forms = Forms([weight])
    with short_ways(forms):
        loss = F.linear(torch.tanh(F.linear(F.gelu(F.linear(x, weight)), weight)), weight.T).pow(3).sum()
    grads = torch.autograd.grad(loss + weight.pow(4).sum(), [weight], create_graph=True)
    vector = torch.randn_like(weight)
    (product,) = torch.autograd.grad(grads, [weight], [vector], retain_graph=True)
    with forms.gathered([vector]) as gathered:
        (rest,) = torch.autograd.grad(grads, [weight], [vector])
    assert torch.allclose(sum(gathered[0]) + (vector * rest).sum(), (vector * product).sum(), rtol=1e-9)


def test_training_normalizes_by_the_batch_as_ever():
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    with short_ways():
        out = norm(x)
    assert out.mean().abs() < 1e-6
    assert norm.num_batches_tracked == 1
    assert torch.equal(out, F.batch_norm(x, None, None, norm.weight, norm.bias, training=True))


def test_a_sample_without_its_batch_is_convolved():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(3, 6, 6)
    with short_ways():
        assert torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias))


def test_what_is_computed_does_take_the_short_ways():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 6, 6)
    with short_ways():
        out = model(x)
    names, ahead = set(), [out.grad_fn]
    while ahead:
        node = ahead.pop()
        names.add(node.name())
        ahead += [following for following, _ in node.next_functions if following is not None]
    assert "_TwiceBackward" in names
    assert not any("BatchNorm" in name or name.startswith("Convolution") for name in names)


@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "bfloat16"])
def test_other_types_are_differentiated_too(cast):
    """What changes types is torch's; in 16 bits the numbers are those of torch, as far as 16 bits tell."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.GELU(), still(nn.LayerNorm(8)), nn.Linear(8, 4)]
    model, x = nn.Sequential(*layers).to(torch.float32 if cast else torch.bfloat16), torch.randn(4, 8)
    x = (x if cast else x.bfloat16()).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        expected = derivatives(model, x)
        with short_ways():
            found = derivatives(model, x)
    for one, other in zip(found[2], expected[2], strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0.1, atol=0.1 * float(other.float().abs().max()))

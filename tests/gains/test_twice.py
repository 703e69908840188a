"""Second derivatives by short ways, against torch's own in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bitplan.gains.twice import short_ways

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
}  # fmt: skip


def derivatives(model, x):
    """The loss, its gradients, and products of its Hessian with fixed signs, by input and weights."""
    inputs = [x, *model.parameters()]
    loss = model(x).pow(3).sum()
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    signs = [torch.where(torch.arange(t.numel()).view(t.shape) % 3 == 0, -1.0, 1.0).double() for t in inputs]
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
    assert "_TwiceConvolvedBackward" in names
    assert not any("BatchNorm" in name or name.startswith("Convolution") for name in names)

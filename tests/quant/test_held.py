"""Gradients that are written over: only where nobody else holds them, whoever that might be."""

import pytest
import torch
import torch.nn.functional as F

from bitplan.quant import held
from bitplan.quant.lsq import lsq

ROWS = 300  # × 400 elements: more than are copied without asking


class Through(torch.autograd.Function):
    """The identity; its backward pass keeps the gradient it was given, and hands it on."""

    @staticmethod
    def forward(ctx, v, kept):
        ctx.kept = kept
        return v.view_as(v)

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append(grad)
        return grad, None


def hooked(keep):
    def run(y, kept):
        y.register_hook(lambda grad: kept.append(keep(grad)))
        return (2 * y).sum()

    return run


def before_the_node(y, kept):
    y.grad_fn.register_prehook(lambda grads: kept.append(grads[0]))
    return (2 * y).sum()


def retained(y, kept):
    y.retain_grad()
    kept.append(y)
    return (2 * y).sum()


HOLDERS = {
    "a hook": hooked(lambda grad: grad),
    "a hook that keeps a view": hooked(lambda grad: grad.view(-1)),
    "a hook that keeps it detached": hooked(lambda grad: grad.detach()),
    "a hook that keeps an array": hooked(lambda grad: grad.numpy()),
    "a hook that keeps a part": hooked(lambda grad: grad[:1]),
    "a hook before the node": before_the_node,
    "retain_grad": retained,
    "a function after it": lambda y, kept: (2 * Through.apply(y, kept)).sum(),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_holds_is_not_written_over(holder, fused):
    x, step, kept = torch.randn(ROWS, 400, requires_grad=True), torch.tensor(0.1, requires_grad=True), []
    HOLDERS[holder](lsq(x, step, -8, 7, fused=fused), kept).backward()
    (found,) = (one.grad if holder == "retain_grad" else one for one in kept)
    assert bool((torch.as_tensor(found) == 2).all())
    assert 0 < (x.grad == 0).sum() < x.numel()  # there was something to write


def test_a_gradient_that_goes_two_ways_is_not_written_over():
    x, z, step = (torch.randn(ROWS, 400, requires_grad=True) for _ in range(3))
    step = torch.tensor(0.1, requires_grad=True)
    ((lsq(x, step, -8, 7, fused=True) + z) * 2).sum().backward()
    assert bool((z.grad == 2).all()), "an addition hands on one tensor to both of its operands"
    given = torch.full((ROWS, 400), 2.0)
    lsq(x, step, -8, 7, fused=True).backward(given)
    assert bool((given == 2).all())
    y = lsq(x, step, -8, 7, fused=True)
    of_y, of_x = torch.autograd.grad((2 * y).sum(), [y, x])
    assert bool((of_y == 2).all())
    assert not torch.equal(of_x, of_y)


def test_free_gradients_are_written_over_also_where_they_are_views(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "bitplan.quant.lsq.nobody_elses", lambda grad: asked.append(held._holders(grad) in held._free()) or asked[-1]
    )
    weight, x, step = torch.randn(ROWS, 400), torch.randn(7, 400), torch.tensor(0.1, requires_grad=True)
    weight.requires_grad_()
    F.linear(x, lsq(weight, step, -8, 7, fused=True)).square().sum().backward()
    image, kernel = torch.randn(9, 4, 60, 60, requires_grad=True), torch.randn(5, 4, 3, 3)
    F.conv2d(lsq(image, step, -8, 7, fused=True), kernel).square().sum().backward()
    assert asked == [True, True]


def test_where_torch_does_not_count_nothing_is_free(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    held._free.cache_clear()
    try:
        assert not held.nobody_elses(torch.ones(3))
    finally:
        held._free.cache_clear()

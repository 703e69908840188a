"""The step of what nothing before it learns from, such as images: its gradient without that of the images.

Only that step would make the first convolution compute the gradient of its input, the slowest part of it (7 % of a
training step of ResNet-18). A convolution is linear, so ∂L/∂s = Σ ∂L/∂y · conv(∂x̂/∂s) too: a convolution of slopes
(docs/decisions/0028).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.quant.lsq import find_node, step_gradient, step_slopes, summed_products
from bitplan.quant.recompute import call_without_saving

EVERY = 1
"""Of so many samples one is looked at; some of them, weighted for all, would estimate the gradient without bias."""


def convolved(
    convolve: Callable[..., Tensor], quantizer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The convolution of what a quantizer makes of a batch with a weight."""
    inputs = quantizer(x)
    node = None if torch.compiler.is_compiling() else find_node(inputs)
    if node is None or x.requires_grad or x.dim() != weight.dim():
        out: Tensor = call_without_saving(convolve, inputs, weight, bias)
        return out
    out = call_without_saving(convolve, inputs.detach(), weight, bias, nodes={inputs: node})
    learning: Tensor = call_without_saving(_LearnStep.apply, out, quantizer.step, x, weight, node, convolve)
    return learning


class _LearnStep(torch.autograd.Function):
    """The result of a convolution, as it is, by which the step of its input learns."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, step: Tensor, x: Tensor, weight: Tensor, node: Any, convolve: Any) -> Tensor:
        ctx.mark_dirty(out)  # not a view, which could not be written to afterwards
        ctx.save_for_backward(step, x, weight)
        ctx.node, ctx.convolve = node, convolve
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        step, x, weight = ctx.saved_tensors
        part = x[::EVERY]
        slopes = step_slopes(ctx.node, part, step)
        moved = ctx.convolve(slopes.to(weight.dtype), weight, None)
        total = summed_products(grad[::EVERY].to(moved.dtype), moved) * (len(x) / max(1, len(part)))
        return grad, step_gradient(total, step, ctx.node.scale), None, None, None, None

"""Layer normalization with a second derivative of few operations; torch's is made of dozens.

Let x̂ = (x − mean)·ρ be what it makes before its weight w, and J = ∂x̂/∂x, which is symmetric:

    J·v = ρ·(v − mean v − x̂·mean(v·x̂)),    and the gradient by x of ⟨g, x̂·w⟩ is J·ĝ with ĝ = g·w.

The derivative of uᵀ·J·ĝ by x is −ρ·(x̂·mean(u·Jĝ) + Jĝ·mean(u·x̂) + Ju·mean(ĝ·x̂)). Means are over what is normalized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.adapters.torch import is_half

_derivatives = torch.ops.aten.native_layer_norm_backward


def layer_normalized(  # the signature is torch's
    input: Tensor,  # (…, *normalized_shape)
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """As `F.layer_norm`."""
    learned = any(one is not None and one.requires_grad for one in (weight, bias))
    if learned or not input.requires_grad or is_half(input):  # statistics of 16 bits have other types
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    made: Tensor = _Normalized.apply(input, tuple(normalized_shape), weight, bias, eps)
    return made


def _jacobian(along: Tensor, x: Tensor, mean: Tensor, rho: Tensor, weight: Tensor | None, shape: Any) -> Tensor:
    """J·(along·w), w = 1 where there is none."""
    made: Tensor = _derivatives(along, x, shape, mean, rho, weight, None, (True, False, False))[0]
    return made


class _Normalized(torch.autograd.Function):
    """y = x̂·w + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rho = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rho, weight)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rho, weight = ctx.saved_tensors
        make = _Derivative.apply if torch.is_grad_enabled() else _jacobian
        return make(grad, x, mean, rho, weight, ctx.shape), None, None, None, None


class _Derivative(torch.autograd.Function):
    """J·(g·w)."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, mean: Tensor, rho: Tensor, weight: Tensor | None, shape: Any) -> Any:
        made = _jacobian(grad, x, mean, rho, weight, shape)
        normal = (x - mean) * rho
        scaled = grad if weight is None else grad * weight
        ctx.save_for_backward(x, mean, rho, weight, made, normal, -rho * _mean(scaled, normal, shape))
        ctx.shape = shape
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rho, weight, made, normal, pull = ctx.saved_tensors
        moved = _jacobian(along, x, mean, rho, None, ctx.shape)
        of_x = normal * (-rho * _mean(along, made, ctx.shape))
        of_x = of_x.addcmul_(made, -rho * _mean(along, normal, ctx.shape)).addcmul_(moved, pull)
        return (moved if weight is None else moved * weight), of_x, None, None, None, None


def _mean(one: Tensor, other: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The mean of a product over what is normalized, as many axes as that has, each of length 1."""
    sums = torch.linalg.vecdot(one.flatten(-len(shape)), other.flatten(-len(shape)))
    return (sums / math.prod(shape)).reshape(*sums.shape, *(1,) * len(shape))

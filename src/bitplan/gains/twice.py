"""Operations of which torch computes second derivatives by detours, here without: `with short_ways():`.

A normalization by running statistics is a scale and a shift, but torch differentiates it twice as if its statistics
were of the batch. Layers that multiply by weights are in `bilinear.py`. Smooth functions of single numbers are
differentiated once and for all where they are computed, and each product with the Hessian takes three multiplications
instead of the function's own second derivative, which is made of a dozen operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bitplan.gains.bilinear import CONVOLUTIONS, Forms, convolved, multiplied
from bitplan.gains.layer_norm import layer_normalized
from bitplan.quant.functions import open_attention

_SMOOTH = (F.gelu, F.silu, F.mish)


class short_ways(TorchFunctionMode):  # noqa: N801  # used like a function
    """Within it these operations are computed so that second derivatives cost less; the numbers are the same.

    With `forms` layers can also give vᵀHv of their weights without Hv.
    """

    def __init__(self, forms: Forms | None = None) -> None:
        super().__init__()
        self._forms = Forms() if forms is None else forms

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):  # types change between operations: that is torch's
            return func(*args, **kwargs)
        if func is F.batch_norm:
            return _normalized(*args, **kwargs)
        if func is F.layer_norm:
            return layer_normalized(*args, **kwargs)
        if func is F.linear:
            return multiplied(self._forms, *args, **kwargs)
        if func in CONVOLUTIONS.values():
            return convolved(self._forms, *args, **kwargs)
        if func in _SMOOTH:
            return _bent(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _normalized(  # the signature is torch's
    input: Tensor,  # (B, channels, …)
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = (1, -1, *(1,) * (input.dim() - 2))
    return torch.addcmul(shift.view(shape), input, scale.view(shape))


def _bent(function: Any, input: Tensor, inplace: bool = False, **options: Any) -> Tensor:
    if inplace or not (torch.is_grad_enabled() and input.requires_grad):
        out: Tensor = function(input, inplace=True, **options) if inplace else function(input, **options)
        return out
    with torch.enable_grad():
        x = input.detach().requires_grad_()
        y = function(x, **options)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), x)
    made: Tensor = _Bent.apply(input, y.detach(), slope.detach(), bend)
    return made


class _Bent(torch.autograd.Function):
    """y = f(x), its first two derivatives known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope, bend)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, slope, bend = ctx.saved_tensors
        return (_Slope.apply(grad, x, slope, bend) if torch.is_grad_enabled() else grad * slope), None, None, None


class _Slope(torch.autograd.Function):
    """The gradient g·f′(x), of which what depends on x alone and on g alone is kept as it is for all products."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        ctx.save_for_backward(slope, grad * bend)
        return grad * slope

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        slope, bent = ctx.saved_tensors
        return along * slope, along * bent, None, None

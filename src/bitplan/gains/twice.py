"""Operations of which torch computes second derivatives by detours, here without: `with short_ways():`.

A normalization by running statistics is a scale and a shift, but torch differentiates it twice as if its statistics
were of the batch. The second derivative of a convolution is made of convolutions and of its own first derivatives,
which have kernels; torch takes transposed convolutions over samples for one of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_derivatives = torch.ops.aten.convolution_backward


class short_ways(TorchFunctionMode):  # noqa: N801  # used like a function
    """Within it these operations are computed so that second derivatives cost less; the numbers are the same."""

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _normalized(*args, **kwargs)
        if func in _CONVOLUTIONS:
            return _convolved(func, *args, **kwargs)
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


class _Geometry(NamedTuple):
    """How a convolution moves."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _convolved(  # the signature is torch's
    convolve: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    axes = _CONVOLUTIONS[convolve]
    if isinstance(padding, str) or input.dim() != axes + 2:  # padded on one side, or a sample without its batch
        out: Tensor = convolve(input, weight, bias, stride, padding, dilation, groups)
        return out
    geometry = _Geometry(_each(stride, axes), _each(padding, axes), _each(dilation, axes), groups)
    made: Tensor = _TwiceConvolved.apply(input, weight, geometry)
    return made if bias is None else made + bias.view(1, -1, *(1,) * axes)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _forward(x: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
    return torch.convolution(
        x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, [0], geometry.groups
    )


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a convolution by its input and its weight, as far as they are wanted."""
    of_x, of_weight, _ = _derivatives(
        grad, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False, [0], geometry.groups,
        (*wanted, False),
    )  # fmt: skip
    return of_x, of_weight


class _TwiceConvolved(torch.autograd.Function):
    """y = x ∗ W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _forward(x, weight, geometry)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        return *_Derivatives.apply(grad, *ctx.saved_tensors, ctx.geometry, wanted), None


class _Derivatives(torch.autograd.Function):
    """The two gradients of a convolution, both bilinear: so theirs are convolutions and such gradients again."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, geometry: _Geometry, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(grad, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return _backward(grad, x, weight, geometry, wanted)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along_x: Tensor | None, along_weight: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad, x, weight), geometry = ctx.saved_tensors, ctx.geometry
        _, of_x_too, of_weight_too = ctx.needs_input_grad[:3]
        terms = [] if along_x is None else [_forward(along_x, weight, geometry)]
        terms += [] if along_weight is None else [_forward(x, along_weight, geometry)]
        of_grad = terms[0] if len(terms) == 1 else terms[0] + terms[1] if terms else None
        of_x = of_weight = None
        if along_weight is not None and of_x_too:
            of_x, _ = _backward(grad, x, along_weight, geometry, (True, False))
        if along_x is not None and of_weight_too:
            _, of_weight = _backward(grad, along_x, weight, geometry, (False, True))
        return of_grad, of_x, of_weight, None, None

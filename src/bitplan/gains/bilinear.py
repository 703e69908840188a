"""Layers that multiply by weights, y = B(x, W), so that products with the Hessian and their forms cost little.

The second derivatives of a bilinear B are made of B and of its own first derivatives, which have kernels; torch takes
transposed convolutions over samples for one of them. And vᵀ(Hv) of a layer's weight (`Forms`) does not need Hv itself:

    Hv has the terms     ∂⟨u, B_x(g, ·)⟩ and ∂⟨r, B(x, ·)⟩ by W     (u and r: what flows back on the way to Hv)
    so vᵀ(Hv) has        ⟨u, B_x(g, v)⟩ + ⟨r, B(x, v)⟩,             B_x(g, v) the gradient by x of ⟨g, B(x, v)⟩,

and B_x(g, v) and B(x, v) are computed on the way anyway: of six products of matrices two are not needed. Where nothing
is differentiated by the weight, B is linear, and torch's own way is short.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Axes → torch's function."""
_WIDE = (torch.float32, torch.float64)
_derivatives = torch.ops.aten.convolution_backward


@dataclass
class Forms:
    """Gathers vᵀ(Hv) of some weights while products with the Hessian are computed; the weights then get no product.

    What reaches a weight otherwise than by a layer that is given it as it is, torch differentiates as ever.
    """

    weights: Sequence[Tensor] = ()
    _along: Sequence[Tensor] | None = None
    _terms: list[list[Tensor]] = field(default_factory=list)

    @contextmanager
    def gathered(self, vectors: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
        """In this block products are along these vectors; when it ends, the lists have the terms of each form."""
        self._along, self._terms = vectors, [[] for _ in self.weights]
        try:
            yield self._terms
        finally:
            self._along = None

    def place_of(self, weight: Tensor) -> int | None:
        """Which of the weights it is."""
        return next((place for place, own in enumerate(self.weights) if own is weight), None)

    def vector(self, place: int | None) -> Tensor | None:
        """Along what the weight at a place is moved, if its form is wanted."""
        return None if place is None or self._along is None else self._along[place]

    def add(self, place: int, one: Tensor, other: Tensor) -> None:
        """Add the sum of a product of two tensors to the form at a place."""
        self._terms[place].append(_sum_of_product(one, other))


def _sum_of_product(one: Tensor, other: Tensor) -> Tensor:
    """In fp32, or fp64 of such: of fp32 numbers torch would copy all to add them up in fp64."""
    if one.dtype in _WIDE and one.is_contiguous() and other.is_contiguous():
        return torch.dot(one.view(-1), other.view(-1))
    return (one * other).sum(dtype=None if one.dtype in _WIDE else torch.float32)


class _Bilinear(ABC):
    """B: its value, and the gradients of ⟨g, B(x, W)⟩ by x and by W."""

    @abstractmethod
    def value(self, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def by_x(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def by_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...


class _Multiplying(_Bilinear):
    """x·Wᵀ of x (…, in) and W (out, in)."""

    def value(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def by_x(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def by_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.flatten(0, -2).T @ x.flatten(0, -2)


@dataclass(frozen=True)
class _Convolving(_Bilinear):
    """x ∗ W, and how W moves."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def value(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, self.stride, self.padding, self.dilation, False, [0], self.groups)

    def by_x(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._by(grad, x, weight, 0)

    def by_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._by(grad, x, weight, 1)

    def _by(self, grad: Tensor, x: Tensor, weight: Tensor, place: int) -> Tensor:
        made: Tensor = _derivatives(
            grad, x, weight, None, self.stride, self.padding, self.dilation, False, [0], self.groups,
            (place == 0, place == 1, False),
        )[place]  # fmt: skip
        return made


@dataclass
class _LayerCall:
    """One call of a layer: its map, where its weight stands among those whose forms are wanted, and B(x, v)."""

    map: _Bilinear
    forms: Forms
    place: int | None
    moved: Tensor | None = None


def multiplied(forms: Forms, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`."""
    if input.dim() < 2 or weight.dim() != 2 or not weight.requires_grad:
        return F.linear(input, weight, bias)
    made: Tensor = _Twice.apply(input, weight, _LayerCall(_Multiplying(), forms, forms.place_of(weight)))
    return made if bias is None else made + bias


def convolved(  # the signature is torch's, but for the first
    forms: Forms,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """As one of torch's convolutions."""
    axes = weight.dim() - 2
    plain = isinstance(padding, str) or input.dim() != axes + 2  # padded on one side, or a sample without its batch
    if plain or not weight.requires_grad:
        out: Tensor = CONVOLUTIONS[axes](input, weight, bias, stride, padding, dilation, groups)
        return out
    moves = _Convolving(_each(stride, axes), _each(padding, axes), _each(dilation, axes), groups)
    made: Tensor = _Twice.apply(input, weight, _LayerCall(moves, forms, forms.place_of(weight)))
    return made if bias is None else made + bias.view(1, -1, *(1,) * axes)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


class _Twice(torch.autograd.Function):
    """y = B(x, W)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, call: _LayerCall) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return call.map.value(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), call = ctx.saved_tensors, ctx.call
        of_x_too = ctx.needs_input_grad[0]
        vector = call.forms.vector(call.place)
        if vector is not None:
            moved, call.moved = call.moved, None
            call.forms.add(call.place, grad, call.map.value(x, vector) if moved is None else moved)
            return (call.map.by_x(grad, x, weight) if of_x_too else None), None, None
        if of_x_too or grad.requires_grad:
            return *_Derivatives.apply(grad, x, weight, call, of_x_too), None
        return None, call.map.by_weight(grad, x, weight), None  # which depends on nothing


class _Derivatives(torch.autograd.Function):
    """The gradients of a layer by its weight and, if that is wanted, by its input."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, call: _LayerCall, of_x_too: bool
    ) -> tuple[Tensor | None, Tensor]:
        ctx.save_for_backward(grad, x, weight)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.map.by_x(grad, x, weight) if of_x_too else None, call.map.by_weight(grad, x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, along_x: Tensor | None, along_weight: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad, x, weight), call = ctx.saved_tensors, ctx.call
        of_grad = of_x = of_weight = None
        gathers = along_weight is not None and call.forms.vector(call.place) is not None
        if along_x is not None:
            of_grad = call.map.value(along_x, weight)
        if along_weight is not None:
            moved = call.map.value(x, along_weight)
            of_grad = moved if of_grad is None else of_grad.add_(moved)
            call.moved = moved if gathers else None
            if ctx.needs_input_grad[1]:
                of_x = call.map.by_x(grad, x, along_weight)
        if along_x is not None and gathers:
            call.forms.add(call.place, along_x, of_x)
        elif along_x is not None:
            of_weight = call.map.by_weight(grad, along_x, weight)
        return of_grad, of_x, of_weight, None, None

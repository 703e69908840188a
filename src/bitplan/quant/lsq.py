"""LSQ, the learned step size quantizer (Esser et al., 2020): v̂ = round(clip(v/s, −Qn, Qp))·s, two gradients.

    ∂v̂/∂v = 1 where −Qn < v/s < Qp, else 0                                         (their eq. 5)
    ∂v̂/∂s = round(v/s) − v/s where −Qn < v/s < Qp, −Qn at or below, Qp at or above  (their eq. 3)

There are two ways to compute this: torch's operations, on any device, and one numba loop per direction on a CPU
(`quant/numba_loops.py`). Values and their gradients are the same bits; the sums that are gradients of scales differ by
rounding.

v is divided by the scale, never multiplied by its reciprocal, so integer values are exact. The backward pass recomputes
v/s from v, which the layer before has usually saved already, instead of saving integer values and masks.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

FLOOR = 2.0**-100
"""The smallest scale: far below any real one, far above where v/s or 1/s² would overflow into NaN."""

MASK = -5000.0
"""Attention scores below this are masks (−10000, −3.4e38, −inf), neither quantized nor looked at."""

_CHUNK = 1 << 17  # elements whose products are summed at once
_keep_inside = torch.ops.aten.hardtanh_backward.default  # grad where low < ratio < high, strictly as published, else 0
_FLOAT = struct.Struct("f")
_PLAIN = (Tensor, torch.nn.Parameter)


def first_scale(mean_magnitude: Tensor, high: int) -> Tensor:
    """Return LSQ's first scale, 2·mean|v|/√Qp (section 2.1)."""
    return 2 * mean_magnitude / math.sqrt(high)


def positive_scale(step: Tensor) -> Tensor:
    """Return the scale in use: |s|, at least FLOOR, so that no optimizer can make it zero or negative."""
    return step.abs().clamp_min(FLOOR)


def scale_in_use(step: float) -> float:
    """Return the same for a plain number."""
    return max(abs(step), FLOOR)


def codes(v: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """Return the integer values round(clip(v/s, −Qn, Qp)) as floats, computed in fp32 (or fp64 if given that)."""
    wide = _wide(v)
    return wide.div(positive_scale(step).to(wide.dtype)).clamp_(low, high).round_()


def lsq(v: Tensor, step: Tensor, low: int, high: int, scale: float = 1.0, *, masked: bool = False) -> Tensor:
    """Fake-quantize v, of any float type, with a scale `step` that broadcasts against it.

    The gradient of `step` is multiplied by `scale`. If values are `masked`, those below MASK pass unchanged.
    """
    quantized: Tensor = _Lsq.apply(v, step, low, high, scale, masked)
    return quantized


class _Lsq(torch.autograd.Function):
    """Twice differentiable: under `create_graph` the backward pass is made of differentiable operations."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, step: Tensor, low: int, high: int, scale: float, masked: bool) -> Tensor:
        ctx.save_for_backward(v, step)
        ctx.low, ctx.high, ctx.scale, ctx.masked = low, high, scale, masked
        ctx.step = step.item() if _fits_loop(v, step) else None  # a number for the loop, None for torch's operations
        ctx.unpacked = None
        return _quantize(ctx, v, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, step = ctx.unpacked or ctx.saved_tensors
        ctx.unpacked = None
        differentiable = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if ctx.step is not None and not differentiable:
            of_v, total = _gradients_by_loop(ctx, grad, v)
            return of_v, step.new_full(step.shape, total), None, None, None, None
        wide, incoming, s = _wide(v), _wide(grad), positive_scale(step)
        gradients = gradients_differentiable if differentiable else _gradients
        mask = wide < MASK if ctx.masked else None
        unmasked = incoming if mask is None else torch.where(mask, 0.0, incoming)
        of_v, of_step = gradients(unmasked, wide.clamp_min(MASK) if ctx.masked else wide, s, ctx.low, ctx.high)
        of_v = of_v if mask is None else torch.where(mask, incoming, of_v)
        return _like(v, of_v), step_gradient(of_step, step, ctx.scale), None, None, None, None


def _fits_loop(v: Tensor, step: Tensor) -> bool:
    """Tell whether the loop quantizes a tensor: on a CPU, up to fp32, without gaps, and with one scale."""
    if torch.compiler.is_compiling() or type(v) not in _PLAIN:  # tensors without data have types of their own
        return False
    is_narrow = v.dtype != torch.float64 and step.dtype == torch.float32
    return v.device.type == "cpu" and is_narrow and step.numel() == 1 and is_dense(v)


def find_node(tensor: Tensor) -> Any:
    """Return the node of the graph that computed a tensor if it is one of `lsq`, else None."""
    return tensor.grad_fn if is_node(tensor.grad_fn) else None


def is_node(function: Any) -> bool:
    """Tell whether a node of a graph is one of `lsq`."""
    return isinstance(function, _Lsq._backward_cls)


def recompute(node: Any, *, once: bool = False) -> Tensor:
    """Compute the result of a node of `lsq` again, bit for bit, from the tensors that the node saved.

    With `once` the node unpacks them here and keeps them for its own backward pass: checkpointing allows one unpacking.
    """
    saved = node.unpacked or node.saved_tensors
    if once:
        node.unpacked = saved
    return _quantize(node, *saved)


def _quantize(node: Any, v: Tensor, step: Tensor) -> Tensor:
    wide, low, high = _wide(v), node.low, node.high
    if node.step is not None:
        return _like(v, _loops().quantize(wide, scale_in_use(node.step), low, high, below=_mask(node)))
    s = positive_scale(step).to(wide.dtype)
    rounded = quantized(wide.clamp_min(MASK) if node.masked else wide, s, low, high)  # masks may be −inf
    return _like(v, torch.where(wide < MASK, wide, rounded) if node.masked else rounded)


def quantized(v: Tensor, s: Tensor, low: Any, high: Any) -> Tensor:
    """Return round(clip(v/s, −Qn, Qp))·s."""
    return v.div(s).clamp_(low, high).round_().mul_(s)


def step_slopes(node: Any, v: Tensor, step: Tensor) -> Tensor:
    """Return ∂v̂/∂|s| (eq. 3) of every element of the input of a node of `lsq`, or of a part of it."""
    wide = _wide(v)
    if node.step is not None and is_dense(wide) and not torch.is_grad_enabled():
        slopes: Tensor = _loops().step_slopes(wide, scale_in_use(node.step), node.low, node.high)
        return slopes
    return _slopes(wide / positive_scale(step), node.low, node.high)[0]


def step_gradient(total: Tensor, step: Tensor, scale: float) -> Tensor:
    """Return the gradient of a stored scale from that of |s|: times the slope of |s| and the gradient scale."""
    return _like(step, total.view(step.shape) * torch.where(step < 0, -scale, scale))


def gradients_differentiable(grad: Tensor, v: Tensor, s: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Return gradients for v and for the scale that have gradients themselves; bounds may be tensors."""
    slopes, inside = _slopes(v / s, low, high)
    return torch.where(inside, grad, 0.0), (grad * slopes).sum_to_size(s.shape)


def _slopes(ratio: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Return ∂v̂/∂s, and a mask that is True for values inside the range."""
    inside = (ratio > low) & (ratio < high)
    return torch.where(inside, ratio.round() - ratio, ratio.clamp(low, high).detach()), inside


def _gradients(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gradients_differentiable`, in fewer passes over memory."""
    ratio = v.div(s).clamp_(low, high)
    of_v = _keep_inside(grad, ratio, low, high)
    inside = _keep_inside(ratio, ratio, low, high)
    return of_v, ratio.round_().sub_(inside).mul_(grad).sum_to_size(s.shape)


def sum_products(one: Tensor, other: Tensor) -> Tensor:
    """Return Σ one · other, in one pass over contiguous tensors unless it must be differentiable."""
    if torch.is_grad_enabled() or not (one.is_contiguous() and other.is_contiguous()):
        return (one * other).sum()
    chunks = zip(one.view(-1).split(_CHUNK), other.view(-1).split(_CHUNK), strict=True)
    parts = [torch.dot(*chunk) for chunk in chunks]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dtype=torch.float64)


def _gradients_by_loop(node: Any, grad: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """Return both gradients; the one for v is written over a copy of the incoming one."""
    wide = _wide(v)
    of_v = _laid_out_like(_wide(grad), wide)
    of_v = of_v.clone() if of_v is grad else of_v
    total = _loops().gradients_(of_v, wide, scale_in_use(node.step), node.low, node.high, below=_mask(node))
    scale = _FLOAT.unpack(_FLOAT.pack(node.scale))[0]  # as an fp32 tensor has it: `step_gradient`, without tensors
    return _like(v, of_v), total * (-scale if node.step < 0 else scale)


@cache
def _loops() -> Any:
    """Import the loops when they are needed: they bring numba."""
    from bitplan.quant import numba_loops

    return numba_loops


def _mask(node: Any) -> float:
    """Return the value below which the input of a node is a mask."""
    return MASK if node.masked else -math.inf


def is_dense(v: Tensor) -> bool:
    """Tell whether the elements lie in one of the two usual orders without gaps."""
    return v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last))


def _laid_out_like(v: Tensor, other: Tensor) -> Tensor:
    """Return the tensor in the memory order of another one that has no gaps."""
    if other.is_contiguous():
        return v if v.is_contiguous() else v.contiguous()
    return v if v.stride() == other.stride() else torch.empty_like(other).copy_(v)


def _wide(v: Tensor) -> Tensor:
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def _like(v: Tensor, computed: Tensor) -> Tensor:
    return computed if computed.dtype == v.dtype else computed.to(v.dtype)

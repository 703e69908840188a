"""LSQ, the learned step size quantizer (Esser et al., 2020): v̂ = round(clip(v/s, −Qn, Qp))·s, two gradients.

    ∂v̂/∂v = 1 where −Qn < v/s < Qp, else 0                                         (their eq. 5)
    ∂v̂/∂s = round(v/s) − v/s where −Qn < v/s < Qp, −Qn at or below, Qp at or above  (their eq. 3)

The step is divided by, never multiplied by its reciprocal, so codes are exact. The backward pass recomputes
v/s from v, which the layer before has usually saved already, instead of saving codes and masks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOOR = 2.0**-100
"""The smallest step: far below any real one, far above where v/s or 1/s² would overflow into NaN."""

# grad where low < ratio < high, strictly as published, else 0
_keep_inside = torch.ops.aten.hardtanh_backward.default
_keep_inside_to = torch.ops.aten.hardtanh_backward.grad_input
_CHUNK = 1 << 17  # elements: seven passes over a chunk mostly stay in the cache


def first_step(mean_magnitude: Tensor, high: int) -> Tensor:
    """LSQ's first step, 2·mean|v|/√Qp (section 2.1)."""
    return 2 * mean_magnitude / math.sqrt(high)


def positive(step: Tensor) -> Tensor:
    """The step in use: |s|, at least FLOOR, so that no optimizer can make it zero or negative."""
    return step.abs().clamp_min(FLOOR)


def in_use(step: float) -> float:
    """The same for a plain number."""
    return max(abs(step), FLOOR)


def codes(v: Tensor, step: Tensor, low: int, high: int) -> Tensor:
    """round(clip(v/s, −Qn, Qp)) as floats, computed in fp32 (or fp64 if given that)."""
    wide = _wide(v)
    return wide.div(positive(step).to(wide.dtype)).clamp_(low, high).round_()


def lsq(v: Tensor, step: Tensor, low: int, high: int, scale: float = 1.0, *, fused: bool = False) -> Tensor:
    """Fake-quantize v, of any float type, with a step that broadcasts against it and learns times `scale`.

    `fused` uses one compiled loop per direction (`quant/fused.py`) for contiguous tensors on a CPU.
    """
    quantized: Tensor = _Lsq.apply(v, step, low, high, scale, fused)
    return quantized


class _Lsq(torch.autograd.Function):
    """Twice differentiable: under `create_graph` the backward pass is made of differentiable operations."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, step: Tensor, low: int, high: int, scale: float, fused: bool) -> Tensor:
        ctx.save_for_backward(v, step)
        ctx.low, ctx.high, ctx.scale = low, high, scale
        ctx.fused = fused and _fusible(v, step)
        if ctx.fused:
            from bitplan.quant import fused as kernels

            return _like(v, kernels.quantize(_wide(v), in_use(step.item()), low, high))
        wide = _wide(v)
        s = positive(step).to(wide.dtype)
        return _like(v, _quantized(wide, s, low, high))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, step = ctx.saved_tensors
        low, high = ctx.low, ctx.high
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            of_v, of_step = _gradients_differentiable(_wide(grad), _wide(v), positive(step), low, high)
        elif ctx.fused:
            from bitplan.quant import fused as kernels

            of_v, total = kernels.gradients(_wide(grad), _wide(v), in_use(step.item()), low, high)
            of_step = torch.full_like(step, total)
        elif step.numel() == 1 and dense(v):
            of_v, of_step = _gradients_chunked(_wide(grad), _wide(v), positive(step), low, high)
        else:
            of_v, of_step = _gradients(_wide(grad), _wide(v), positive(step), low, high)
        sign = torch.where(step < 0, -ctx.scale, ctx.scale)  # the slope of |s|, times the gradient scale
        return _like(v, of_v), _like(step, of_step.view(step.shape) * sign), None, None, None, None


def _quantized(v: Tensor, s: Tensor, low: int, high: int) -> Tensor:
    if v.numel() <= _CHUNK or s.numel() > 1 or torch.compiler.is_compiling() or not dense(v):
        return v.div(s).clamp_(low, high).round_().mul_(s)
    out = torch.empty_like(v)
    for x, y in zip(torch.split(flat(v), _CHUNK), torch.split(flat(out), _CHUNK), strict=True):
        torch.div(x, s, out=y).clamp_(low, high).round_().mul_(s)
    return out


def _gradients_differentiable(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    ratio = v / s
    inside = (ratio > low) & (ratio < high)
    residual = torch.where(inside, ratio.round() - ratio, ratio.clamp(low, high).detach())
    return torch.where(inside, grad, 0.0), (grad * residual).sum_to_size(s.shape)


def _gradients(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    ratio = v.div(s).clamp_(low, high)
    of_v = _keep_inside(grad, ratio, low, high)
    inside = _keep_inside(ratio, ratio, low, high)
    return of_v, ratio.round_().sub_(inside).mul_(grad).sum_to_size(s.shape)


def _gradients_chunked(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The same for one step, through pieces that fit the cache."""
    of_v = torch.empty_like(v)
    flat_v, flat_of_v, flat_grad = flat(v), flat(of_v), flat(laid_out_like(grad, v))
    buffers = flat_v.new_empty(2, min(_CHUNK, flat_v.numel()))
    parts = []
    pieces = (torch.split(t, _CHUNK) for t in (flat_v, flat_grad, flat_of_v))
    for x, g, out in zip(*pieces, strict=True):
        ratio, inside = buffers[0, : x.numel()], buffers[1, : x.numel()]
        torch.div(x, s, out=ratio).clamp_(low, high)
        _keep_inside_to(g, ratio, low, high, grad_input=out)
        _keep_inside_to(ratio, ratio, low, high, grad_input=inside)
        parts.append(torch.dot(g, ratio.round_().sub_(inside)))
    return of_v, parts[0] if len(parts) == 1 else torch.stack(parts).sum(dtype=torch.float64)


def _fusible(v: Tensor, step: Tensor) -> bool:
    plain = v.device.type == "cpu" and v.dtype != torch.float64 and step.numel() == 1
    return plain and not torch.compiler.is_compiling() and dense(v)


def dense(v: Tensor) -> bool:
    """Tell whether the elements lie in one of the two usual orders without gaps."""
    return v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last))


def flat(v: Tensor) -> Tensor:
    """All elements of a dense tensor, in memory order, as a view."""
    return v.view(-1) if v.is_contiguous() else v.permute(0, 2, 3, 1).view(-1)


def laid_out_like(v: Tensor, other: Tensor) -> Tensor:
    """The tensor in the memory order of a dense other one."""
    layout = torch.contiguous_format if other.is_contiguous() else torch.channels_last
    return v.contiguous(memory_format=layout)


def _wide(v: Tensor) -> Tensor:
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def _like(v: Tensor, computed: Tensor) -> Tensor:
    return computed if computed.dtype == v.dtype else computed.to(v.dtype)

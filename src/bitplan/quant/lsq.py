"""LSQ, the learned step size quantizer (Esser et al., 2020): v̂ = round(clip(v/s, −Qn, Qp))·s, two gradients.

    ∂v̂/∂v = 1 where −Qn < v/s < Qp, else 0                                         (their eq. 5)
    ∂v̂/∂s = round(v/s) − v/s where −Qn < v/s < Qp, −Qn at or below, Qp at or above  (their eq. 3)

The step is divided by, never multiplied by its reciprocal, so codes are exact. The backward pass recomputes
v/s from v, which the layer before has usually saved already, instead of saving codes and masks.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

FLOOR = 2.0**-100
"""The smallest step: far below any real one, far above where v/s or 1/s² would overflow into NaN."""

CHUNK = 1 << 17
"""Elements over which a gradient of a step is summed at once; seven passes over them mostly stay in the cache."""

MASK = -5000.0
"""Attention scores below this are masks (−10000, −3.4e38, −inf), neither quantized nor looked at."""

# grad where low < ratio < high, strictly as published, else 0
_keep_inside = torch.ops.aten.hardtanh_backward.default
_keep_inside_to = torch.ops.aten.hardtanh_backward.grad_input
_FEW = 1 << 11  # up to so many, loops are not worth their call; and numba is loaded for a chunk or more only
_FLOAT = struct.Struct("f")
_PLAIN = (Tensor, torch.nn.Parameter)


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


def lsq(
    v: Tensor, step: Tensor, low: int, high: int, scale: float = 1.0, *, fused: bool = False, masked: bool = False
) -> Tensor:
    """Fake-quantize v, of any float type, with a step that broadcasts against it and learns times `scale`.

    Large tensors on a CPU go through compiled loops (`quant/numba_loops.py`), with the results of torch's
    operations. `fused`
    also sums the gradient of the step in there, and on other devices compiles the operations (`quant/compiled.py`).
    Where values are `masked`, those below MASK pass as they are.
    """
    made: Tensor = _Lsq.apply(v, step, low, high, scale, fused, masked)
    return made


class _Lsq(torch.autograd.Function):
    """Twice differentiable: under `create_graph` the backward pass is made of differentiable operations."""

    @staticmethod
    def forward(
        ctx: Any, v: Tensor, step: Tensor, low: int, high: int, scale: float, fused: bool, masked: bool
    ) -> Tensor:
        ctx.save_for_backward(v, step)
        ctx.low, ctx.high, ctx.scale, ctx.masked = low, high, scale, masked
        ctx.way = way = _way(v, step, fused=fused)
        ctx.step = step.item() if way in _LOOPS else None  # a number: what is cold costs most, and that is all of torch
        ctx.unpacked = None
        return _made(ctx, v, step)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, step = ctx.unpacked or ctx.saved_tensors
        ctx.unpacked = None
        differentiable = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if ctx.way in _LOOPS and not differentiable:
            of_v, total = _by_loops(ctx, grad, v)
            return of_v, step.new_full(step.shape, total), None, None, None, None, None
        wide, incoming, s, low, high = _wide(v), _wide(grad), positive(step), ctx.low, ctx.high
        gradients = gradients_differentiable if differentiable else _GRADIENTS[ctx.way]
        mask = wide < MASK if ctx.masked else None
        shown = incoming if mask is None else torch.where(mask, 0.0, incoming)
        of_v, of_step = gradients(shown, wide.clamp_min(MASK) if ctx.masked else wide, s, low, high)
        of_v = of_v if mask is None else torch.where(mask, incoming, of_v)
        return _like(v, of_v), step_gradient(of_step, step, ctx.scale), None, None, None, None, None


def _way(v: Tensor, step: Tensor, *, fused: bool) -> str:
    """How a tensor is quantized: one of _LOOPS or of _GRADIENTS."""
    if torch.compiler.is_compiling() or type(v) not in _PLAIN:  # tensors without data have types of their own
        return "torch"
    if v.device.type != "cpu":
        return "compiled" if fused and v.dtype != torch.float64 else "torch"
    if step.numel() != 1 or not (dense(v) or (fused and without_gaps(v))):
        return "torch"
    if v.dtype == torch.float64 or step.dtype != torch.float32:
        return "chunks"
    if fused:
        return "fused"
    return "loops" if v.numel() > (_FEW if _loops.cache_info().currsize else CHUNK) else "chunks"


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
    kept = node.unpacked or node.saved_tensors
    if once:
        node.unpacked = kept
    return _made(node, *kept)


def _made(node: Any, v: Tensor, step: Tensor) -> Tensor:
    wide, low, high = _wide(v), node.low, node.high
    if node.way in _LOOPS:
        return _like(v, _loops().quantize(wide, in_use(node.step), low, high, below=_mask(node)))
    s = positive(step).to(wide.dtype)
    shown = wide.clamp_min(MASK) if node.masked else wide  # masks may be −inf
    if node.way == "compiled":
        from bitplan.quant import compiled

        made = compiled.quantize(shown, s, low, high)
    else:
        made = quantized(shown, s, low, high)
    return _like(v, torch.where(wide < MASK, wide, made) if node.masked else made)


def quantized(v: Tensor, s: Tensor, low: Any, high: Any) -> Tensor:
    """round(clip(v/s, −Qn, Qp))·s."""
    return v.div(s).clamp_(low, high).round_().mul_(s)


def step_slopes(node: Any, v: Tensor, step: Tensor) -> Tensor:
    """∂v̂/∂|s| of every element (eq. 3) of what a node of `lsq` was given, or of a part of it."""
    wide = _wide(v)
    if node.way in _LOOPS and dense(wide) and not torch.is_grad_enabled():
        slopes: Tensor = _loops().step_slopes(wide, in_use(node.step), node.low, node.high)
        return slopes
    return _slopes(wide / positive(step), node.low, node.high)[0]


def step_gradient(total: Tensor, step: Tensor, scale: float) -> Tensor:
    """The gradient of a stored step from that of the step in use: times the slope of |s| and the gradient scale."""
    return _like(step, total.view(step.shape) * torch.where(step < 0, -scale, scale))


def gradients_differentiable(grad: Tensor, v: Tensor, s: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """Gradients for v and for the step, each a function that has gradients itself; bounds may be tensors."""
    slopes, inside = _slopes(v / s, low, high)
    return torch.where(inside, grad, 0.0), (grad * slopes).sum_to_size(s.shape)


def _slopes(ratio: Tensor, low: Any, high: Any) -> tuple[Tensor, Tensor]:
    """∂v̂/∂s, and where a value is inside."""
    inside = (ratio > low) & (ratio < high)
    return torch.where(inside, ratio.round() - ratio, ratio.clamp(low, high).detach()), inside


def _gradients(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    ratio = v.div(s).clamp_(low, high)
    of_v = _keep_inside(grad, ratio, low, high)
    inside = _keep_inside(ratio, ratio, low, high)
    return of_v, ratio.round_().sub_(inside).mul_(grad).sum_to_size(s.shape)


def _gradients_chunked(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """The same for one step, through pieces that fit the cache."""
    of_v = torch.empty_like(v)
    flat_v, flat_of_v, flat_grad = flat(v), flat(of_v), flat(laid_out_like(grad, v))
    buffers = flat_v.new_empty(2, min(CHUNK, flat_v.numel()))
    parts = []
    pieces = (torch.split(t, CHUNK) for t in (flat_v, flat_grad, flat_of_v))
    for x, g, out in zip(*pieces, strict=True):
        ratio, inside = buffers[0, : x.numel()], buffers[1, : x.numel()]
        torch.div(x, s, out=ratio).clamp_(low, high)
        _keep_inside_to(g, ratio, low, high, grad_input=out)
        _keep_inside_to(ratio, ratio, low, high, grad_input=inside)
        parts.append(torch.dot(g, ratio.round_().sub_(inside)))
    return of_v, added_up(parts)


def summed_products(one: Tensor, other: Tensor) -> Tensor:
    """Σ one · other, in one pass where it need not be differentiable."""
    if torch.is_grad_enabled() or not (one.is_contiguous() and other.is_contiguous()):
        return (one * other).sum()
    pieces = zip(one.view(-1).split(CHUNK), other.view(-1).split(CHUNK), strict=True)
    return added_up([torch.dot(*piece) for piece in pieces])


def added_up(parts: list[Tensor]) -> Tensor:
    """The sum of what pieces came to."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dtype=torch.float64)


def _by_loops(node: Any, grad: Tensor, v: Tensor) -> tuple[Tensor, float]:
    """Return both gradients; the one for v is written over a copy of the incoming one."""
    wide = _wide(v)
    of_v = laid_out_like(_wide(grad), wide)
    of_v = of_v.clone() if of_v is grad else of_v
    given = of_v, wide, in_use(node.step), node.low, node.high
    if node.way == "fused":
        total = _loops().gradients_and_sum_(*given, below=_mask(node))
    else:
        total = _loops().gradients_(*given, below=_mask(node)).item()
    scale = _FLOAT.unpack(_FLOAT.pack(node.scale))[0]  # as an fp32 tensor has it: `step_gradient`, without tensors
    return _like(v, of_v), total * (-scale if node.step < 0 else scale)


@cache
def _loops() -> Any:
    from bitplan.quant import numba_loops

    return numba_loops


def _mask(node: Any) -> float:
    """Below what values are masks."""
    return MASK if node.masked else -math.inf


def _by_compiled(grad: Tensor, v: Tensor, s: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    from bitplan.quant import compiled

    return compiled.gradients(grad, v, s, low, high)


_LOOPS = ("loops", "fused")
_GRADIENTS = {
    "torch": _gradients,
    "chunks": _gradients_chunked,
    "compiled": _by_compiled,
}


def dense(v: Tensor) -> bool:
    """Tell whether the elements lie in one of the two usual orders without gaps."""
    return v.is_contiguous() or (v.dim() == 4 and v.is_contiguous(memory_format=torch.channels_last))


def without_gaps(v: Tensor) -> bool:
    """Tell whether the elements lie in any order of the axes without gaps, as those of a transposed tensor do."""
    ahead = 1
    for stride, size in sorted(zip(v.stride(), v.shape, strict=True)):
        if size > 1 and stride != ahead:
            return False
        ahead *= size
    return True


def flat(v: Tensor) -> Tensor:
    """All elements of a dense tensor, in memory order, as a view."""
    return v.view(-1) if v.is_contiguous() else v.permute(0, 2, 3, 1).view(-1)


def laid_out_like(v: Tensor, other: Tensor) -> Tensor:
    """The tensor in the memory order of another one that has no gaps."""
    if other.is_contiguous():
        return v if v.is_contiguous() else v.contiguous()
    return v if v.stride() == other.stride() else torch.empty_like(other).copy_(v)


def _wide(v: Tensor) -> Tensor:
    return v if v.dtype in (torch.float32, torch.float64) else v.float()


def _like(v: Tensor, computed: Tensor) -> Tensor:
    return computed if computed.dtype == v.dtype else computed.to(v.dtype)

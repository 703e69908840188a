"""Scales per group of inputs, fitted to the weights: they keep weights of 4, 3 and 2 bits usable without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.adapters.torch import uncompiled
from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.quant.layers import Channels
from bitplan.quant.lsq import FLOOR, gradients_differentiable, positive_scale, quantized, step_gradient
from bitplan.quant.methods import Quantizer
from bitplan.quant.quantizers import WeightQuantizer, gradient_scale, unseen
from bitplan.quant.scales import ScaleSharing

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions


class GroupedWeight(WeightQuantizer):
    """A scale for each group of inputs of each output channel, (rows, groups), and if asked for a zero point each.

    A value is (integer value − zero point)·scale. Scales learn as LSQ's do, zero points stay. Scales in use have so
    many binary `digits`, if a file for other programs has no more; 0 means all.
    """

    grouped: ClassVar[bool] = True
    zero: Tensor | None

    def __init__(self, bits: int, blocks: Grouping, levels: Levels, digits: int = 0) -> None:
        super().__init__(bits, levels.step)
        self.blocks, self.digits = blocks, digits
        self.register_buffer("zero", levels.zero)

    @property
    def in_levels(self) -> Levels:
        """The scales in use, and the zero points."""
        return Levels(round_mantissa(positive_scale(self.step.detach()), self.digits), self.zero)

    def in_use(self, weight: Tensor) -> Tensor:
        """Return the scales in use."""
        return self.in_levels.step

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a whole weight."""
        if not self.enabled:
            return weight
        with unseen():
            if self.first_step is not None:
                self._start(weight)
            cut = self.blocks.cut(weight if weight.dtype == torch.float64 else weight.float())
            _, high = self.range
            scale = gradient_scale(weight.numel() // max(1, self.step.numel()), high)
            made: Tensor = _OnLevels.apply(cut, self.step, *self.in_levels.bounds(self.bits), scale, self.digits)
            return self.blocks.joined(made, weight).to(weight.dtype)

    @uncompiled
    @torch.no_grad()
    def _start(self, weight: Tensor) -> None:
        levels = fit_levels(self.blocks.cut(weight), self.bits, zeros=self.zero is not None, digits=self.digits)
        if levels.step.shape != self.step.shape:
            raise InputError(
                f"a weight that is computed as {tuple(weight.shape)} cannot have the {self.step.numel()} scales of "
                "groups: quantize with another method"
            )
        self.settle_(levels)

    @torch.no_grad()
    def settle_(self, levels: Levels) -> None:
        """Take these scales and zero points."""
        self.step.copy_(levels.step)
        if self.zero is not None and levels.zero is not None:
            self.zero.copy_(levels.zero)
        self.first_step = None

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """Return the integer values of a weight."""
        multiples = self.in_levels.multiples(self.blocks.cut(weight.detach().float()), self.bits)
        shifted = multiples if self.zero is None else multiples + self.zero[..., None]
        return self.blocks.joined(shifted, weight).to(torch.int8)

    @torch.no_grad()
    def values(self, codes: Tensor) -> Tensor:
        """Return the values that the integers of a whole weight stand for."""
        cut = self.blocks.cut(codes.float())
        multiples = cut if self.zero is None else cut - self.zero[..., None]
        return self.blocks.joined(multiples * self.in_levels.step[..., None], codes)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """Return the value of every integer in `range`, (…, integers)."""
        low, high = self.range
        codes = torch.arange(low, high + 1, device=weight.device, dtype=torch.float32)
        zero = 0.0 if self.zero is None else self.blocks.spread(self.zero, weight)[..., None]
        return (codes - zero) * self.steps_for(weight)[..., None]

    @torch.no_grad()
    def steps_for(self, weight: Tensor) -> Tensor:
        """Return the scale of every value."""
        return self.blocks.spread(self.in_levels.step, weight)

    @torch.no_grad()
    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the scales of the same groups; those of other methods say nothing about groups."""
        if isinstance(kept, GroupedWeight) and kept.blocks == self.blocks and kept.step.shape == self.step.shape:
            self.step.copy_(kept.step)
            if self.zero is not None:
                self.zero.copy_(torch.zeros_like(self.zero) if kept.zero is None else kept.zero)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision: the ends of the range stay where they were."""
        (before, _), (low, high) = code_range(self.bits), code_range(bits)
        if self.zero is not None and bits != self.bits:
            self.zero.sub_(before).mul_(2.0 ** (bits - self.bits)).add_(low).round_().clamp_(low, high)
        super().rescale_(bits)


class _OnLevels(torch.autograd.Function):
    """LSQ (`quant/lsq.py`) with bounds of its own for each group; twice differentiable, as that is."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, step: Tensor, low: Any, high: Any, scale: float, digits: int) -> Tensor:
        ctx.save_for_backward(cut, step)
        ctx.bounds, ctx.scale, ctx.digits = (low, high), scale, digits
        return quantized(cut, round_mantissa(positive_scale(step), digits)[..., None], low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut, step = ctx.saved_tensors
        used = _in_use_with_gradient(step, ctx.digits)
        of_cut, of_step = gradients_differentiable(grad, cut, used[..., None], *ctx.bounds)
        return of_cut, step_gradient(of_step, step, ctx.scale), None, None, None, None


def _in_use_with_gradient(step: Tensor, digits: int) -> Tensor:
    """Return the scales in use; gradients ignore their rounding to `digits`."""
    whole = positive_scale(step)
    return whole + (round_mantissa(whole, digits) - whole).detach() if digits else whole


HALF = 11
"""Binary digits of a float16."""


@final
@dataclass(frozen=True)
class Groups(Quantizer):
    """A scale for each group of inputs of an output channel, fitted to the weights: for weights alone, 2 to 8 bits.

    `size` is the number of inputs of a group; runtimes have 32, 64 or 128. `zeros` gives each group a zero point as
    well. `half` keeps scales to float16 numbers, for files that store them so. Inputs are quantized as by LSQ.
    """

    source: ClassVar[str] = "group-wise weights as in GPTQ (Frantar et al. 2022), GGUF and MatMulNBits; ours: the fit"
    rows: ClassVar[bool] = True
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)

    size: int = 64
    zeros: bool = False
    half: bool = False

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise InputError(f"groups: size is {self.size!r}, and must be a whole number from 1, such as 32, 64 or 128")

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer with the scales of the least squared error."""
        blocks = Grouping(self.size, shared.channels or FIRST_AXIS)
        return make_grouped_weight(weight, bits, blocks, zeros=self.zeros, digits=HALF if self.half else 0)


def make_grouped_weight(weight: Tensor, bits: int, blocks: Grouping, *, zeros: bool, digits: int) -> GroupedWeight:
    """Return the quantizer of a weight in groups, with fitted levels unless the weight has no data."""
    if weight.is_meta:
        step = torch.ones(blocks.cut(weight).shape[:2], device="meta")
        return GroupedWeight(bits, blocks, Levels(step, step.clone() if zeros else None), digits)
    return GroupedWeight(bits, blocks, fit_levels(blocks.cut(weight), bits, zeros=zeros, digits=digits), digits)


# A weight cut into groups of inputs, and the scales that fit them.

_TRIED = 24  # steps that are tried for a group
_NARROWEST, _WIDEST = 0.35, 1.2  # their ends, as shares of the step by which the largest value is the last level
_LARGEST_HALF = 65504.0
_AT_ONCE = 1 << 16  # values that are fitted together, so that they stay in the cache


FIRST_AXIS = Channels((0,))
"""Rows are numbered by a weight's first axis, as those of linear layers and convolutions are."""


@dataclass(frozen=True)
class Grouping:
    """A weight cut into a row for each output channel, and each row into groups of `size` inputs, the last one shorter.

    A convolution's row has its input channels times its kernel, in the order in which they lie.
    """

    size: int
    channels: Channels = FIRST_AXIS

    def rows(self, weight: Tensor) -> Tensor:
        """weight → (rows, inputs)."""
        order, sizes = self._order(weight)
        count = math.prod(sizes[axis] for axis in self.channels.axes)
        return weight.reshape(sizes).permute(order).reshape(count, -1)

    def whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """(rows, inputs) → the shape of a weight."""
        order, sizes = self._order(like)
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows.reshape([sizes[axis] for axis in order]).permute(back).reshape(like.shape)

    def cut(self, weight: Tensor) -> Tensor:
        """weight → (rows, groups, inputs of a group); the last group is filled with 0."""
        return self.cut_rows(self.rows(weight))

    def cut_rows(self, rows: Tensor) -> Tensor:
        """(rows, inputs) → (rows, groups, inputs of a group)."""
        width = self.width(rows.shape[1])
        return F.pad(rows, (0, -rows.shape[1] % width)).unflatten(1, (-1, width))

    def joined(self, cut: Tensor, like: Tensor) -> Tensor:
        """(rows, groups, inputs of a group) → the shape of a weight."""
        return self.whole(cut.flatten(1)[:, : like.numel() // max(1, cut.shape[0])], like)

    def spread(self, each: Tensor, like: Tensor) -> Tensor:
        """Return a value per group, (rows, groups), for every value of a weight."""
        width = self.width(like.numel() // max(1, each.shape[0]))
        return self.joined(each[..., None].expand(*each.shape, width), like)

    def width(self, inputs: int) -> int:
        """Return the number of inputs of a group, for so many inputs in a row."""
        return max(1, min(self.size, inputs))

    def _order(self, weight: Tensor) -> tuple[list[int], list[int]]:
        """Return the axes of a weight with those first that number rows, and its sizes."""
        parts, axes = self.channels.groups, self.channels.axes
        sizes = list(weight.shape) if parts == 1 else [parts, weight.shape[0] // parts, *weight.shape[1:]]
        return [*axes, *(axis for axis in range(len(sizes)) if axis not in axes)], sizes


class Levels(NamedTuple):
    """Scales of groups, and the zero point of each, (rows, groups) both; None: all zero points are 0."""

    step: Tensor
    zero: Tensor | None

    def bounds(self, bits: int) -> tuple[Tensor | int, Tensor | int]:
        """Return the lowest and highest multiple of the scale; (rows, groups, 1) if groups differ."""
        low, high = code_range(bits)
        return (low, high) if self.zero is None else (low - self.zero[..., None], high - self.zero[..., None])

    def multiples(self, cut: Tensor, bits: int) -> Tensor:
        """Return the multiples of the scale that are nearest to each value (rows, groups, inputs), among the levels."""
        low, high = self.bounds(bits)
        return (cut / self.step[..., None]).clamp_(low, high).round_()  # type: ignore[arg-type]

    def nearest(self, cut: Tensor, bits: int) -> Tensor:
        """Return the levels that are nearest to each value."""
        return self.multiples(cut, bits) * self.step[..., None]


@torch.no_grad()
def fit_levels(cut: Tensor, bits: int, *, zeros: bool, digits: int = 0) -> Levels:
    """Return the levels of each group (rows, groups, inputs) with the least squared error among some that are tried.

    Values that are all zero get the scale of weights of size 1/√inputs. `digits` is the precision of scales (`short`).
    """
    wide = cut.detach().float()
    parts = [_fit_groups(part, bits, zeros, digits) for part in _split_for_cache(wide)]
    step = torch.cat([part.step for part in parts])
    zero = torch.cat([part.zero for part in parts if part.zero is not None]) if zeros else None
    return Levels(step, zero)


def round_mantissa(step: Tensor, digits: int) -> Tensor:
    """Return positive scales rounded to so many significant binary digits, which float16 holds; 0 changes nothing."""
    if not digits:
        return step
    mantissa, exponent = torch.frexp(step)
    kept = torch.ldexp((mantissa * 2.0**digits).round(), exponent - digits)
    return ((kept * 2.0**24).round() / 2.0**24).clamp(2.0**-24, _LARGEST_HALF)


def _fit_groups(cut: Tensor, bits: int, zeros: bool, digits: int) -> Levels:
    best, error = (
        _levels(cut, bits, 1.0, zeros=zeros, digits=digits),
        torch.full(cut.shape[:2], math.inf, device=cut.device),
    )
    _, high = code_range(bits)
    to_the_largest = 1.0 if zeros else (high + 0.5) / high
    for share in (to_the_largest, *torch.linspace(_WIDEST, _NARROWEST, _TRIED).tolist()):
        tried = _levels(cut, bits, share, zeros=zeros, digits=digits)
        squares = (tried.nearest(cut, bits) - cut).square_().sum(-1)
        better = squares < error
        error = torch.where(better, squares, error)
        zero = None if tried.zero is None or best.zero is None else torch.where(better, tried.zero, best.zero)
        best = Levels(torch.where(better, tried.step, best.step), zero)
    return best


def _levels(cut: Tensor, bits: int, share: float, *, zeros: bool, digits: int) -> Levels:
    """Return levels that end at a share of the largest values."""
    low, high = code_range(bits)
    if zeros:
        lowest, highest = cut.amin(-1).clamp_max_(0) * share, cut.amax(-1).clamp_min_(0) * share
        step = round_mantissa(_make_usable((highest - lowest) / (high - low), cut), digits)
        return Levels(step, (low - lowest / step).round_().clamp_(low, high))
    return Levels(round_mantissa(_make_usable(cut.abs().amax(-1) * (share / (high + 0.5)), cut), digits), None)


def _make_usable(step: Tensor, cut: Tensor) -> Tensor:
    return torch.where(step > FLOOR, step, 1 / math.sqrt(max(1, cut.shape[1] * cut.shape[2])))


def _split_for_cache(cut: Tensor) -> Iterator[Tensor]:
    rows = max(1, _AT_ONCE // max(1, cut.shape[1] * cut.shape[2]))
    yield from cut.split(rows) if len(cut) else (cut,)

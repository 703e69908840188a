"""Steps per group of inputs, fitted to the weights: what keeps weights of 4, 3 and 2 bits usable without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from bitplan.adapters.torch import uncompiled
from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.quant.blocks import FIRST_AXIS, Grouping, Levels, fit, short
from bitplan.quant.lsq import gradients_differentiable, positive, quantized, step_gradient
from bitplan.quant.methods.base import Quantizer
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.quantizing import gradient_scale, unseen
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


class GroupedWeight(WeightQuantizer):
    """A step for each group of inputs of each output channel, (rows, groups), and where asked for a zero point each.

    A value is (code − zero)·step. Steps learn as LSQ's do, zero points stay. In use are steps of so many binary
    `digits`, where a file for others has no more; 0 are all.
    """

    grouped: ClassVar[bool] = True
    zero: Tensor | None

    def __init__(self, bits: int, blocks: Grouping, levels: Levels, digits: int = 0) -> None:
        super().__init__(bits, levels.step)
        self.blocks, self.digits = blocks, digits
        self.register_buffer("zero", levels.zero)

    @property
    def in_levels(self) -> Levels:
        """The steps in use, and the zero points."""
        return Levels(short(positive(self.step.detach()), self.digits), self.zero)

    def in_use(self, weight: Tensor) -> Tensor:
        """The steps in use."""
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
        levels = fit(self.blocks.cut(weight), self.bits, zeros=self.zero is not None, digits=self.digits)
        if levels.step.shape != self.step.shape:
            raise InputError(
                f"a weight that is computed as {tuple(weight.shape)} cannot have the {self.step.numel()} steps of "
                "groups: quantize with another method"
            )
        self.settle_(levels)

    @torch.no_grad()
    def settle_(self, levels: Levels) -> None:
        """Take these steps and zero points."""
        self.step.copy_(levels.step)
        if self.zero is not None and levels.zero is not None:
            self.zero.copy_(levels.zero)
        self.first_step = None

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """The integer codes of a weight."""
        multiples = self.in_levels.multiples(self.blocks.cut(weight.detach().float()), self.bits)
        shifted = multiples if self.zero is None else multiples + self.zero[..., None]
        return self.blocks.joined(shifted, weight).to(torch.int8)

    @torch.no_grad()
    def values(self, codes: Tensor) -> Tensor:
        """What codes of a whole weight stand for."""
        cut = self.blocks.cut(codes.float())
        multiples = cut if self.zero is None else cut - self.zero[..., None]
        return self.blocks.joined(multiples * self.in_levels.step[..., None], codes)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """What every code of `range` stands for, (…, codes)."""
        low, high = self.range
        codes = torch.arange(low, high + 1, device=weight.device, dtype=torch.float32)
        zero = 0.0 if self.zero is None else self.blocks.spread(self.zero, weight)[..., None]
        return (codes - zero) * self.steps_for(weight)[..., None]

    @torch.no_grad()
    def steps_for(self, weight: Tensor) -> Tensor:
        """The step of every value."""
        return self.blocks.spread(self.in_levels.step, weight)

    @torch.no_grad()
    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the steps of the same groups; those of other methods say nothing of groups."""
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
    """LSQ (`quant/lsq.py`) with bounds that groups have of their own; twice differentiable, as that is."""

    @staticmethod
    def forward(ctx: Any, cut: Tensor, step: Tensor, low: Any, high: Any, scale: float, digits: int) -> Tensor:
        ctx.save_for_backward(cut, step)
        ctx.bounds, ctx.scale, ctx.digits = (low, high), scale, digits
        return quantized(cut, short(positive(step), digits)[..., None], low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut, step = ctx.saved_tensors
        used = _passing(step, ctx.digits)
        of_cut, of_step = gradients_differentiable(grad, cut, used[..., None], *ctx.bounds)
        return of_cut, step_gradient(of_step, step, ctx.scale), None, None, None, None


def _passing(step: Tensor, digits: int) -> Tensor:
    """The steps in use, whose digits gradients do not see."""
    whole = positive(step)
    return whole + (short(whole, digits) - whole).detach() if digits else whole


HALF = 11
"""Binary digits of a float16."""


@final
@dataclass(frozen=True)
class Groups(Quantizer):
    """A step for each group of inputs of an output channel, fitted to the weights: for weights alone, 2 to 8 bits.

    `size` is the inputs of a group, which runtimes have at 32, 64 or 128; `zeros` gives each group a zero point as
    well. `half` keeps to steps that are float16 numbers, for files that store them so. Inputs, where a plan quantizes
    them, are as LSQ's.
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

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Steps with the least squared error."""
        blocks = Grouping(self.size, shared.channels or FIRST_AXIS)
        return in_groups(weight, bits, blocks, zeros=self.zeros, digits=HALF if self.half else 0)


@final
@dataclass(frozen=True)
class GgufBlocks(Quantizer):
    """The blocks of GGUF's types: 256 inputs share a float16 step at 2 bits, 32 at 4, 5 and 8.

    `zeros` gives blocks of 4 and 5 bits a zero point (Q4_1, Q5_1); their steps are so short that float16 holds their
    products with zero points too. Codes of 3, 6 and 7 bits lie in the places of 4 and 8.
    """

    source: ClassVar[str] = "block types of llama.cpp's GGUF: TQ2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0; ours: the fit"
    rows: ClassVar[bool] = True
    anew: ClassVar[bool] = True
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)

    zeros: bool = False

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Steps with the least squared error; 2 bits in rows that no block of 256 fits have blocks of 32."""
        channels = shared.channels or FIRST_AXIS
        inputs = Grouping(1, channels).rows(weight).shape[1]
        blocks = Grouping(256 if bits == 2 and inputs % 256 == 0 else 32, channels)
        zeros = self.zeros and bits in (3, 4, 5)
        return in_groups(weight, bits, blocks, zeros=zeros, digits=HALF - max(bits, 4) if zeros else HALF)


def in_groups(weight: Tensor, bits: int, blocks: Grouping, *, zeros: bool, digits: int) -> GroupedWeight:
    """What quantizes a weight in groups, its levels fitted; of a weight without data they are not."""
    if weight.is_meta:
        step = torch.ones(blocks.cut(weight).shape[:2], device="meta")
        return GroupedWeight(bits, blocks, Levels(step, step.clone() if zeros else None), digits)
    return GroupedWeight(bits, blocks, fit(blocks.cut(weight), bits, zeros=zeros, digits=digits), digits)

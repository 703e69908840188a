"""Ternary weights: −α, 0, α as TWN finds them, or −W₋, 0, W₊ as TTQ learns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.quant.methods.base import Quantizer
from bitplan.quant.methods.q8bert import LargestWeight
from bitplan.quant.quantizers import WeightQuantizer, unseen
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options

TWN_SHARE, TTQ_SHARE = 0.7, 0.05
"""Below which share of mean|w|, and of max|w|, a weight is zero."""


class TernaryWeight(LargestWeight):
    """TWN: ±α where |w| > t = 0.7·mean|w|, else 0; α is the mean of |w| beyond t.

    At 8 bits, which first and last layers have, weights are those of Q8BERT, as in TernaryBERT.
    """

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """α."""
        if self.bits > 2:
            return super().step_of(seen, dims)
        magnitudes = seen.abs()
        beyond = magnitudes > _threshold(magnitudes, dims)
        return (magnitudes * beyond).sum(dims, keepdim=True) / beyond.sum(dims, keepdim=True).clamp_min(1)

    def coded(self, seen: Tensor, step: Tensor) -> Tensor:
        """−1, 0 and 1."""
        if self.bits > 2:
            return super().coded(seen, step)
        magnitudes = seen.abs()
        return seen.sign() * (magnitudes > _threshold(magnitudes, self.shared.dims(seen)))


def _threshold(magnitudes: Tensor, dims: tuple[int, ...]) -> Tensor:
    return TWN_SHARE * magnitudes.mean(dims, keepdim=True)


class LearnedTernaryWeight(TernaryWeight):
    """TTQ: W₊ where w > t, −W₋ where w < −t, else 0, with t = 0.05·max|w|; both are learned, and start at their means.

    The gradient of a weight is that of its level, times W₊ or W₋ where it has one. Recalled, not read. Those of W₊ and
    W₋ are sums over N weights, here divided by √N as LSQ's are: without that they leap at any usual rate.
    """

    def __init__(self, weight: Tensor, bits: int, shared: Shared) -> None:
        super().__init__(weight, bits, shared)
        magnitudes, signs = weight.detach().float().abs(), _signs(weight.detach().float())
        self.above, self.below = (
            nn.Parameter((magnitudes * (signs == sign)).sum() / (signs == sign).sum().clamp_min(1)) for sign in (1, -1)
        )

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        """Not at 2 bits, where the levels lie as they like."""
        return self.bits > 2

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest code."""
        return super().range if self.uniform else (-1, 1)

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a whole weight."""
        if not self.enabled or self.uniform:
            return super().forward(weight)
        with unseen():
            made: Tensor = _TwoLevels.apply(weight, self.above, self.below)
        return made

    def coded(self, seen: Tensor, step: Tensor) -> Tensor:
        """−1, 0 and 1."""
        return super().coded(seen, step) if self.uniform else _signs(seen)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """−W₋, 0 and W₊."""
        if self.uniform:
            return super().levels(weight)
        return torch.stack([-self.below, torch.zeros_like(self.below), self.above])

    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the levels that were learned."""
        if isinstance(kept, LearnedTernaryWeight):
            self.load_state_dict(kept.state_dict())


def _signs(seen: Tensor) -> Tensor:
    """1, −1, or 0 where a weight is nearer to it than t."""
    magnitudes = seen.abs()
    threshold = TTQ_SHARE * magnitudes.amax() if seen.numel() else 0.0
    return seen.sign() * (magnitudes > threshold)


class _TwoLevels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, above: Tensor, below: Tensor) -> Tensor:
        signs = _signs(weight if weight.dtype == torch.float64 else weight.float())
        ctx.save_for_backward(signs, above, below)
        return (torch.where(signs > 0, above, below) * signs).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signs, above, below = ctx.saved_tensors
        size = torch.where(signs > 0, above, torch.where(signs < 0, below, 1.0)).to(grad.dtype)
        share = 1 / math.sqrt(max(1, grad.numel()))
        sums = (grad * (signs > 0)).sum() * share, (grad * (signs < 0)).sum() * -share
        return grad * size, sums[0].to(above.dtype), sums[1].to(below.dtype)


@final
@dataclass(frozen=True)
class Ternary(Quantizer):
    """Three levels of weights by TWN, or with `learned` by TTQ; 8 bits as Q8BERT's; inputs as LSQ's.

    TWN and TTQ say nothing of inputs. TTQ has one pair of levels for a whole weight, and they are not equally far
    apart, so that no exporter can say them.
    """

    source: ClassVar[str] = "Li et al. 2016, Ternary weight networks; Zhu et al. 2016, Trained ternary quantization"
    weight_bits: ClassVar[Sequence[int]] = (2, 8)

    learned: bool = False

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Levels that follow from the weight, or learn."""
        if not self.learned:
            return TernaryWeight(weight, bits, shared)
        if shared.channels is not None:
            raise InputError("ternary:learned=true has one pair of levels for a whole weight: leave per_channel out")
        return LearnedTernaryWeight(weight, bits, shared)

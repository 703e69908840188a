"""Ternary weights: −α, 0, α as TWN finds them, or −W₋, 0, W₊ as TTQ learns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.plugins.quantizers.clipped_input import LimitedInput
from bitplan.plugins.quantizers.derived_scale import FollowingWeight, straight_through
from bitplan.quant.lsq import codes, positive_scale
from bitplan.quant.methods import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen
from bitplan.quant.scales import ScaleSharing

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions


# Q8BERT: weights up to their largest magnitude, inputs up to a moving average of theirs.


class LargestWeight(FollowingWeight):
    """Multiples of max|w|/(2^(b−1) − 1); the lowest code is not used."""

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the largest weight over the highest integer."""
        _, high = self.range
        if not seen.numel():
            return seen.new_ones([1] * seen.dim())
        return seen.abs().amax(dims, keepdim=True) / high


class MovingInput(LimitedInput):
    """Levels up to an average of max|x| over batches, which every training batch moves; all gradients pass."""

    def __init__(self, bits: int, name: str, *, momentum: float, masked: bool) -> None:
        super().__init__(bits, name, masked=masked, learned=False)
        self.momentum = momentum

    @torch.no_grad()
    def settle_(self, seen: Observation) -> None:
        """Begin at the mean of the batches' maxima; codes have a sign, whichever values were seen."""
        seen.lowest = min(seen.lowest, -math.ulp(0.0))
        super().settle_(seen)

    def _limited(self, v: Tensor, low: int, high: int) -> Tensor:
        with torch.no_grad():
            if self.training and v.numel():
                self.limit.lerp_(v.detach().abs().amax().to(self.limit.dtype), 1 - self.momentum)
            step = positive_scale(self.limit) / high
            made = (codes(v, step, low, high) * step).to(v.dtype)
        return straight_through(v, made)


@final
@dataclass(frozen=True)
class Q8Bert(Quantizer):
    """Weights up to max|w|, inputs up to a moving average of max|x|; nothing is learned.

    `momentum` is what of the average each training batch leaves.
    """

    source: ClassVar[str] = "Zafrir et al. 2019, Q8BERT: Quantized 8bit BERT; as in IntelLabs/nlp-architect"

    momentum: float = 0.9999

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"q8bert: momentum is {self.momentum}, and must be from 0 to below 1")

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer with levels up to the largest weight."""
        return LargestWeight(weight, bits, shared)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer with levels up to a moving maximum."""
        return MovingInput(bits, name, momentum=self.momentum, masked=masked)


# Ternary weights: −α, 0, α as TWN finds them, or −W₋, 0, W₊ as TTQ learns them.

TWN_SHARE, TTQ_SHARE = 0.7, 0.05
"""Below which share of mean|w|, and of max|w|, a weight is zero."""


class TernaryWeight(LargestWeight):
    """TWN: ±α where |w| > t = 0.7·mean|w|, else 0; α is the mean of |w| beyond t.

    At 8 bits, which first and last layers have, weights are those of Q8BERT, as in TernaryBERT.
    """

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return α."""
        if self.bits > 2:
            return super().step_of(seen, dims)
        magnitudes = seen.abs()
        beyond = magnitudes > _threshold(magnitudes, dims)
        return (magnitudes * beyond).sum(dims, keepdim=True) / beyond.sum(dims, keepdim=True).clamp_min(1)

    def coded(self, seen: Tensor, step: Tensor) -> Tensor:
        """Return −1, 0 and 1."""
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

    def __init__(self, weight: Tensor, bits: int, shared: ScaleSharing) -> None:
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
        """Lowest and highest integer value."""
        return super().range if self.uniform else (-1, 1)

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a whole weight."""
        if not self.enabled or self.uniform:
            return super().forward(weight)
        with unseen():
            made: Tensor = _TwoLevels.apply(weight, self.above, self.below)
        return made

    def coded(self, seen: Tensor, step: Tensor) -> Tensor:
        """Return −1, 0 and 1."""
        return super().coded(seen, step) if self.uniform else _signs(seen)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """−W₋, 0 and W₊."""
        if self.uniform:
            return super().levels(weight)
        return torch.stack([-self.below, torch.zeros_like(self.below), self.above])

    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the learned levels."""
        if isinstance(kept, LearnedTernaryWeight):
            self.load_state_dict(kept.state_dict())


def _signs(seen: Tensor) -> Tensor:
    """Return 1, −1, or 0 for weights that are nearer to it than t."""
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

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose levels follow from the weight, or learn."""
        if not self.learned:
            return TernaryWeight(weight, bits, shared)
        if shared.channels is not None:
            raise InputError("ternary:learned=true has one pair of levels for a whole weight: leave per_channel out")
        return LearnedTernaryWeight(weight, bits, shared)

"""Q8BERT: weights up to their largest magnitude, inputs up to a moving average of theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.quant.following import FollowingWeight, straight_through
from bitplan.quant.limits import LimitedInput
from bitplan.quant.lsq import codes, positive
from bitplan.quant.methods.base import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


class LargestWeight(FollowingWeight):
    """Multiples of max|w|/(2^(b−1) − 1); the lowest code is not used."""

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """As many as fit below the largest."""
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
            step = positive(self.limit) / high
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

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Levels up to the largest weight."""
        return LargestWeight(weight, bits, shared)

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """Levels up to a moving maximum."""
        return MovingInput(bits, name, momentum=self.momentum, masked=masked)

"""SAWB: where weights are clipped follows from their first two moments; PACT's inputs, or PACT+'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.quant.following import FollowingWeight
from bitplan.quant.methods.pact import PactInputs
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options

# c₁ and c₂ for 2^b levels, as in foundation-model-stack/fms-model-optimizer. For levels with a zero it has those of 2
# and 4 bits; at others, where they are one less of eight or more, the same are taken, which is ours.
COEFFICIENTS: dict[int, tuple[float, float]] = {
    2: (3.12, 2.064), 3: (7.509, 6.892), 4: (12.68, 12.80), 5: (17.74, 18.64), 8: (31.76, 35.04),
}  # fmt: skip
WITH_ZERO: dict[int, tuple[float, float]] = COEFFICIENTS | {2: (2.6, 1.71), 4: (12.035, 12.03)}


class SawbWeight(FollowingWeight):
    """Equal levels from −α to α = c₁·√E[w²] − c₂·E|w|; where that is negative, to max|w|."""

    def __init__(self, weight: Tensor, bits: int, shared: Shared, *, zero: bool) -> None:
        super().__init__(weight, bits, shared)
        self.offset = 0.0 if zero else 0.5

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """2α/(2^b − 1), or with a zero level α/(2^(b−1) − 1)."""
        _, high = self.range
        clip = self.clip_of(seen, dims)
        return 2 * clip / (2**self.bits - 1) if self.offset else clip / high

    def clip_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """α."""
        known = COEFFICIENTS if self.offset else WITH_ZERO
        if self.bits not in known:
            raise InputError(f"sawb has no {self.bits} bits for weights: it has {', '.join(map(str, known))}")
        if not seen.numel():
            return seen.new_ones([1] * seen.dim())
        first, second = known[self.bits]
        magnitudes = seen.abs()
        clip = first * seen.square().mean(dims, keepdim=True).sqrt() - second * magnitudes.mean(dims, keepdim=True)
        return torch.where(clip > 0, clip, magnitudes.amax(dims, keepdim=True))


@dataclass(frozen=True)
class _ByMoments(PactInputs):
    """Weights by SAWB."""

    weight_bits: ClassVar[Sequence[int]] = tuple(COEFFICIENTS)

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Levels that follow from moments."""
        return SawbWeight(weight, bits, shared, zero=self.zero)


@final
@dataclass(frozen=True)
class Sawb(_ByMoments):
    """Weights clipped by their first two moments, inputs at PACT's learned α."""

    source: ClassVar[str] = "Choi et al. 2019, Accurate and efficient 2-bit quantized neural networks (PACT-SAWB)"


@final
@dataclass(frozen=True)
class PactPlus(_ByMoments):
    """Weights by SAWB; PACT's α that also learns from the rounding between the ends, as LSQ's step does."""

    source: ClassVar[str] = "IBM's fms-model-optimizer (pact+, sawb)"
    inside: ClassVar[bool] = True

"""PACT: inputs are clipped at a level that is learned; weights as DoReFa has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.plugins.quantizers.clipped_input import LimitedInput, limited
from bitplan.plugins.quantizers.derived_scale import FollowingWeight
from bitplan.quant.methods import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.scales import ScaleSharing

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions


# PACT: inputs are clipped at a level that is learned; weights as DoReFa has them.


class PactInput(LimitedInput):
    """round(clip(x, 0, α)·(2^b − 1)/α)·α/(2^b − 1), where ∂/∂α is 1 from α on and 0 below.

    Inputs of either sign are clipped at both ends, and what is below the lower one pulls α the other way. With `inside`
    α also learns from the rounding between the ends, which makes it PACT+.
    """

    def __init__(
        self, bits: int, name: str, *, start: float, decay: float, inside: bool = False, **arguments: Any
    ) -> None:
        super().__init__(bits, name, **arguments)
        self.start, self.decay, self.inside = start, decay, inside

    def _limited(self, v: Tensor, low: int, high: int) -> Tensor:
        return limited(v, self.limit, low, high, inside=self.inside)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(self.start / high) if self.start else super()._first_step(seen, high)


@dataclass(frozen=True)
class PactInputs(Quantizer):
    """The inputs of PACT, and their options.

    `decay` is the weight decay of α, their L2 term. `start` is its first value, 6 to 10 in published code; 0 takes the
    percentile of what calibration saw, `percentile` of quantize. No level of a weight is zero, unless `zero`, and
    exporters need one.
    """

    inside: ClassVar[bool] = False
    percentile: ClassVar[bool] = True

    decay: float = 0.0
    start: float = 0.0
    zero: bool = False

    def __post_init__(self) -> None:
        for name, value in (("decay", self.decay), ("start", self.start)):
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{self.name}: {name} is {value}, and must be 0 or above")

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer with a learned limit."""
        arguments: dict[str, Any] = {
            "start": self.start,
            "decay": self.decay,
            "inside": self.inside,
            "percentile": options.percentile,
        }
        return PactInput(bits, name, masked=masked, **arguments)


@final
@dataclass(frozen=True)
class Pact(PactInputs):
    """Inputs clipped at a learned α, weights as DoReFa's.

    Weights keep their size, `scaled`, which is ours: without it, as published, the statistics of norms in a trained
    network are wrong at first, and every α that calibration finds by them. `pact:scaled=false,start=8` is as published.
    """

    source: ClassVar[str] = "Choi et al. 2018, PACT: Parameterized clipping activation"

    scaled: bool = True

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer with DoReFa's levels."""
        return DorefaWeight(weight, bits, shared, zero=self.zero, scaled=self.scaled)


# SAWB: where weights are clipped follows from their first two moments; PACT's inputs, or PACT+'s.

# c₁ and c₂ for 2^b levels, as in foundation-model-stack/fms-model-optimizer. For levels with a zero it has those of 2
# and 4 bits; at others, where they are one less of eight or more, the same are taken, which is ours.
COEFFICIENTS: dict[int, tuple[float, float]] = {
    2: (3.12, 2.064), 3: (7.509, 6.892), 4: (12.68, 12.80), 5: (17.74, 18.64), 8: (31.76, 35.04),
}  # fmt: skip
WITH_ZERO: dict[int, tuple[float, float]] = COEFFICIENTS | {2: (2.6, 1.71), 4: (12.035, 12.03)}


class SawbWeight(FollowingWeight):
    """Equal levels from −α to α = c₁·√E[w²] − c₂·E|w|; where that is negative, to max|w|."""

    def __init__(self, weight: Tensor, bits: int, shared: ScaleSharing, *, zero: bool) -> None:
        super().__init__(weight, bits, shared)
        self.offset = 0.0 if zero else 0.5

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return 2α/(2^b − 1), or with a zero level α/(2^(b−1) − 1)."""
        _, high = self.range
        clip = self.clip_of(seen, dims)
        return 2 * clip / (2**self.bits - 1) if self.offset else clip / high

    def clip_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return α."""
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
    """The weights of SAWB."""

    weight_bits: ClassVar[Sequence[int]] = tuple(COEFFICIENTS)

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose levels follow from moments."""
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


# DoReFa: weights squeezed by tanh onto equal levels from −1 to 1, inputs onto levels from 0 to 1.


class DorefaWeight(FollowingWeight):
    """2·round((2^b − 1)·(u/2 + ½))/(2^b − 1) − 1 of u = tanh w/max|tanh w|: 2^b levels from −1 to 1.

    None of them is zero, unless `zero` leaves one out: then they are multiples of 1/(2^(b−1) − 1). `scaled` multiplies
    them by max|tanh w|, so that the weights keep their size.
    """

    def __init__(self, weight: Tensor, bits: int, shared: ScaleSharing, *, zero: bool, scaled: bool) -> None:
        super().__init__(weight, bits, shared)
        self.offset = 0.0 if zero else 0.5
        self.scaled = scaled

    def squeezed(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the tanh of weights, as a share of the largest unless they are scaled back."""
        tanh = seen.tanh()
        return tanh if self.scaled else tanh / _largest(tanh, dims)

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return the scale of levels from −1 to 1, or up to the largest."""
        _, high = self.range
        step = 2 / (2**self.bits - 1) if self.offset else 1 / high
        largest = _largest(seen.tanh(), dims)
        return largest * step if self.scaled else torch.full_like(largest, step)


def _largest(tanh: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return max|tanh w|, or 1 for an empty weight."""
    if not tanh.numel():
        return tanh.new_ones([1] * tanh.dim())
    largest = tanh.abs().amax(dims, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


class DorefaInput(LimitedInput):
    """Levels from 0 to 1, or where values of either sign were seen from about −1 to 1: nothing is learned."""

    def __init__(self, bits: int, name: str, *, masked: bool) -> None:
        super().__init__(bits, name, masked=masked, learned=False)

    def new_observation(self) -> Observation:
        """Return an observation for the sign alone."""
        return Observation(None)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(1 / high)

    def _settle_at_(self, signed: bool, step: float) -> None:
        super()._settle_at_(signed, 1 / code_range(self.bits, signed)[1])


@final
@dataclass(frozen=True)
class Dorefa(Quantizer):
    """Weights by tanh onto levels from −1 to 1, inputs from 0 to 1; needs a norm behind every layer.

    The size of weights is lost, unless `scaled`; no level is zero, unless `zero`, and exporters need one. The gradient
    passes tanh and the maximum, as in the authors' code as recalled.
    """

    source: ClassVar[str] = "Zhou et al. 2016, DoReFa-Net; recalled, not read"

    zero: bool = False
    scaled: bool = False

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose levels follow from the largest weight."""
        return DorefaWeight(weight, bits, shared, zero=self.zero, scaled=self.scaled)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer with levels up to 1."""
        return DorefaInput(bits, name, masked=masked)

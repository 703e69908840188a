"""PACT: inputs are clipped at a level that is learned; weights as DoReFa has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.quant.limits import LimitedInput, limited
from bitplan.quant.methods.base import Quantizer
from bitplan.quant.methods.dorefa import DorefaWeight
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


class PactInput(LimitedInput):
    """round(clip(x, 0, α)·(2^b − 1)/α)·α/(2^b − 1), where ∂/∂α is 1 from α on and 0 below.

    Inputs of either sign are clipped at both ends, and what is below the lower one pulls α the other way. With `inside`
    α also learns from the rounding between the ends, which makes it PACT+.
    """

    def __init__(self, bits: int, name: str, *, start: float, decay: float, inside: bool = False, **told: Any) -> None:
        super().__init__(bits, name, **told)
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

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """Inputs up to a learned limit."""
        told: dict[str, Any] = {
            "start": self.start,
            "decay": self.decay,
            "inside": self.inside,
            "percentile": options.percentile,
        }
        return PactInput(bits, name, masked=masked, **told)


@final
@dataclass(frozen=True)
class Pact(PactInputs):
    """Inputs clipped at a learned α, weights as DoReFa's.

    Weights keep their size, `scaled`, which is ours: without it, as published, the statistics of norms in a trained
    network are wrong at first, and every α that calibration finds by them. `pact:scaled=false,start=8` is as published.
    """

    source: ClassVar[str] = "Choi et al. 2018, PACT: Parameterized clipping activation"

    scaled: bool = True

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """DoReFa's levels."""
        return DorefaWeight(weight, bits, shared, zero=self.zero, scaled=self.scaled)

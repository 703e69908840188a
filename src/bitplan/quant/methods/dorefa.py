"""DoReFa: weights squeezed by tanh onto equal levels from −1 to 1, inputs onto levels from 0 to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.quant.following import FollowingWeight
from bitplan.quant.limits import LimitedInput
from bitplan.quant.methods.base import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.steps import Shared

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


class DorefaWeight(FollowingWeight):
    """2·round((2^b − 1)·(u/2 + ½))/(2^b − 1) − 1 of u = tanh w/max|tanh w|: 2^b levels from −1 to 1.

    None of them is zero, unless `zero` leaves one out: then they are multiples of 1/(2^(b−1) − 1). `scaled` multiplies
    them by max|tanh w|, so that the weights keep their size.
    """

    def __init__(self, weight: Tensor, bits: int, shared: Shared, *, zero: bool, scaled: bool) -> None:
        super().__init__(weight, bits, shared)
        self.offset = 0.0 if zero else 0.5
        self.scaled = scaled

    def squeezed(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The tanh of weights, and unless they are scaled back as a share of the largest."""
        tanh = seen.tanh()
        return tanh if self.scaled else tanh / _largest(tanh, dims)

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """From −1 to 1, or to the largest."""
        _, high = self.range
        step = 2 / (2**self.bits - 1) if self.offset else 1 / high
        largest = _largest(seen.tanh(), dims)
        return largest * step if self.scaled else torch.full_like(largest, step)


def _largest(tanh: Tensor, dims: tuple[int, ...]) -> Tensor:
    """max|tanh w|, 1 where there is none."""
    if not tanh.numel():
        return tanh.new_ones([1] * tanh.dim())
    largest = tanh.abs().amax(dims, keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


class DorefaInput(LimitedInput):
    """Levels from 0 to 1, or where values of either sign were seen from about −1 to 1: nothing is learned."""

    def __init__(self, bits: int, name: str, *, masked: bool) -> None:
        super().__init__(bits, name, masked=masked, learned=False)

    def new_observation(self) -> Observation:
        """Only the sign is looked for."""
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

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """Levels that follow from the largest weight."""
        return DorefaWeight(weight, bits, shared, zero=self.zero, scaled=self.scaled)

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """Levels up to 1."""
        return DorefaInput(bits, name, masked=masked)

"""N2UQ: inputs are told apart by learned thresholds and become equal levels; weights end where their mean says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.plugins.quantizers.clipped_input import LimitedInput
from bitplan.plugins.quantizers.derived_scale import FollowingWeight, straight_through
from bitplan.quant.lsq import FLOOR
from bitplan.quant.methods import Quantizer
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.scales import ScaleSharing

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions

LEAST = 1e-3
"""The least length of an interval, in units of the range's positive end, which is 2 as in the authors' code."""
END = 2.0


class MeanWeight(FollowingWeight):
    """2^b levels from −γ·mean|w| to γ·mean|w|, γ = (2^b − 1)/2^(b−1); none of them is zero."""

    offset = 0.5

    def step_of(self, seen: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Return mean|w|/2^(b−2)."""
        if not seen.numel():
            return seen.new_ones([1] * seen.dim())
        return seen.abs().mean(dims, keepdim=True) / 2 ** (self.bits - 2)


class ThresholdInput(LimitedInput):
    """An activation → as many equal levels as there are intervals, whose lengths `widths` are learned.

    The code rises in the middle of every interval; the gradient is that of straight lines over the intervals, from
    one level to the next (the generalized straight-through estimator). What comes in is multiplied by a learned factor
    `shrink`, what goes out by END/2 of the learned `limit`.
    """

    uniform = False

    def _hold_(self, learned: bool) -> None:
        super()._hold_(learned)
        self.start, self.shrink = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(()))
        self.widths = nn.Parameter(torch.ones(2**self.bits - 1))

    def _settle_at_(self, signed: bool, step: float) -> None:
        super()._settle_at_(signed, step)
        low, high = code_range(self.bits, signed)
        self.start.fill_(low * END / high)
        self.shrink.fill_(END / self.limit.item())
        self.widths.fill_(END / high)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision: as many intervals as there are now divide the range as the former ones did."""
        before = self.widths
        super().rescale_(bits)
        if before.numel() == 2**bits - 1:
            return
        edges = torch.cat([before.new_zeros(1), before.clamp_min(LEAST).cumsum(0)])
        places = torch.linspace(0, before.numel(), 2**bits, device=before.device)
        left = places.floor().clamp_max(before.numel() - 1).long()
        at = edges[left] + (places - left) * (edges[left + 1] - edges[left])
        self.widths = nn.Parameter(at.diff())

    def _limited(self, v: Tensor, low: int, high: int) -> Tensor:
        wide = v if v.dtype == torch.float64 else v.float()
        made = self._risen(wide * self.shrink, low, high) * (self.limit.abs().clamp_min(FLOOR) / high)
        return made.to(v.dtype)

    def _risen(self, x: Tensor, low: int, high: int) -> Tensor:
        """Return integer values, with the gradient of straight lines."""
        widths = self.widths.clamp_min(LEAST).to(x.dtype)
        left = self.start + torch.cat([widths.new_zeros(1), widths.cumsum(0)])  # the edges of intervals
        with torch.no_grad():
            values = x.contiguous()
            inside = torch.bucketize(values, left[1:-1].contiguous())
            exact = torch.bucketize(values, left[:-1] + widths / 2).to(x.dtype) + low
            outside = (x <= left[0]) | (x >= left[-1])
        line = (x - left[inside]) / widths[inside]  # from 0 to 1 over its interval
        return straight_through(torch.where(outside, 0.0, line), exact)

    @torch.no_grad()
    def codes(self, v: Tensor) -> Tensor:
        """Return the number of thresholds below a value, plus the lowest integer."""
        assert self.range is not None, "it is calibrated before codes are asked for"
        low, high = self.range
        return self._risen((v if v.dtype == torch.float64 else v.float()) * self.shrink, low, high)


@final
@dataclass(frozen=True)
class N2uq(Quantizer):
    """Inputs by learned thresholds onto equal levels, weights up to a multiple of mean|w|; the network stays as it is.

    The authors also add biases and PReLUs to the network; those are not part of this. Recalled from their code, whose
    gradient of weights lacks a factor: here it is that of the rounding passed straight through.
    """

    source: ClassVar[str] = "Liu et al. 2022, Nonuniform-to-uniform quantization; recalled, not read"
    uniform: ClassVar[bool] = False
    percentile: ClassVar[bool] = True
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)
    input_bits: ClassVar[Sequence[int]] = range(2, 9)

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose levels follow from the mean."""
        return MeanWeight(weight, bits, shared)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer with learned thresholds."""
        arguments: dict[str, Any] = {"percentile": options.percentile, "masked": masked}
        return ThresholdInput(bits, name, **arguments)

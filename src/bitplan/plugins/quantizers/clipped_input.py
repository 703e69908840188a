"""Inputs whose grid is given by where it ends: step = limit/Qp, so another precision leaves the limit where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.quant.lsq import FLOOR, MASK, codes, positive_scale
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer


class LimitedInput(InputQuantizer):
    """An activation (any shape) → levels up to a limit, which learns only where a method says so.

    It starts at a percentile of the magnitudes that calibration saw. Values of either sign have the codes that LSQ's
    have, from −2^(b−1): PACT's and Q8BERT's own leave the lowest out, which no runtime does.
    """

    limit: Tensor

    def __init__(self, bits: int, name: str, *, percentile: float = 100.0, **arguments: Any) -> None:
        super().__init__(bits, name, **arguments)
        self.percentile = percentile

    def _hold_(self, learned: bool) -> None:
        if learned:
            self.limit = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("limit", torch.ones(()))

    @property
    def step(self) -> Tensor:  # type: ignore[override]
        """The scale: the distance of levels."""
        _, high = self.range or code_range(self.bits, signed=False)
        return positive_scale(self.limit) / high

    def _quantized(self, v: Tensor, low: int, high: int, times: int) -> Tensor:
        if not self.masked:
            return self._limited(v, low, high)
        return torch.where(v < MASK, v, self._limited(v.clamp_min(MASK), low, high))

    def _limited(self, v: Tensor, low: int, high: int) -> Tensor:
        """Quantize values, none of which is a mask."""
        return limited(v, self.limit, low, high)

    def new_observation(self) -> Observation:
        """Return an empty observation of a percentile."""
        return Observation(self.percentile)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(seen.percentile_magnitude / high)

    def _settle_at_(self, signed: bool, step: float) -> None:
        self._range = code_range(self.bits, signed)
        self.limit.fill_(step * self._range[1])
        self.signed.fill_(float(signed))

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision; the limit stays."""
        self.bits = bits
        self._range = None
        self._read_sign()


def limited(v: Tensor, limit: Tensor, low: int, high: int, *, inside: bool = False) -> Tensor:
    """Round values to levels up to a limit, with PACT's gradient for the limit, or PACT+'s if `inside`."""
    made: Tensor = _Limited.apply(v, limit, low, high, inside)
    return made


class _Limited(torch.autograd.Function):
    """∂v̂/∂v = 1 between the ends; ∂v̂/∂α = 1 from α on, −Qn/Qp at the lower end and below (0 where that is zero).

    Between them ∂v̂/∂α is 0, or with `inside` LSQ's (round(v/s) − v/s)/Qp. The backward pass has gradients itself.
    """

    @staticmethod
    def forward(ctx: Any, v: Tensor, limit: Tensor, low: int, high: int, inside: bool) -> Tensor:
        ctx.save_for_backward(v, limit)
        ctx.low, ctx.high, ctx.inside = low, high, inside
        step = positive_scale(limit) / high
        return (codes(v, step, low, high) * step).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        v, limit = ctx.saved_tensors
        low, high = ctx.low, ctx.high
        wide = v if v.dtype == torch.float64 else v.float()
        size = limit.abs().clamp_min(FLOOR)
        ratio, above = wide / (size / high), wide >= size
        between = (ratio > low) & ~above
        of_limit = None
        if ctx.needs_input_grad[1]:
            error = (ratio.round() - ratio) / high if ctx.inside else torch.zeros_like(ratio)
            slopes = torch.where(between, error, torch.where(above, 1.0, low / high))
            of_limit = (grad.to(slopes.dtype) * slopes).sum() * torch.where(limit < 0, -1.0, 1.0)
            of_limit = of_limit.to(limit.dtype)
        return torch.where(between, grad, 0.0), of_limit, None, None, None

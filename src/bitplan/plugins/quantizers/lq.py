"""LQ-Nets: levels are sums of a basis, which is fitted to what it quantizes, step by step of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.plugins.quantizers.derived_scale import straight_through
from bitplan.quant.lsq import MASK
from bitplan.quant.methods import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen
from bitplan.quant.scales import ScaleSharing, first_weight_scale

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions

RIDGE = 1e-4
"""Added to the diagonal of BᵀB, as a share of its mean: where a bit is never set, it is singular."""
_SAMPLE = 1 << 16  # the most values that a basis is fitted to


def levels_of(basis: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return all sums of a basis (bits,), ascending (2^bits,), and the bits of each (2^bits, bits): ±1, or 0 and 1."""
    bits = basis.numel()
    numbers = torch.arange(2**bits, device=basis.device)
    chosen = (numbers[:, None] >> torch.arange(bits, device=basis.device) & 1).to(basis.dtype)
    chosen = chosen * 2 - 1 if signed else chosen
    levels, order = (chosen @ basis).sort(stable=True)
    return levels, chosen[order]


def nearest(values: Tensor, levels: Tensor) -> Tensor:
    """Return the index of the nearest of ascending levels for each value."""
    return torch.bucketize(values.contiguous(), (levels[1:] + levels[:-1]) / 2)


def fitted(values: Tensor, basis: Tensor, *, signed: bool) -> Tensor:
    """Return the basis with the least squared error for values with these bits: v = (BᵀB)⁻¹Bᵀx."""
    every = -(-values.numel() // _SAMPLE)
    flat = values.detach().flatten()[::every].to(basis.dtype)
    levels, chosen = levels_of(basis, signed=signed)
    bits = chosen[nearest(flat, levels)]  # (values, bits)
    products = bits.T @ bits
    ridge = RIDGE * products.diagonal().mean().clamp_min(1.0) * torch.eye(len(basis), device=basis.device)
    return basis + torch.linalg.solve(products + ridge, bits.T @ (flat - bits @ basis))


class LqWeight(WeightQuantizer):
    """Levels Σ ±v_i of a whole weight; gradients pass as if nothing were rounded."""

    uniform = False
    follows: ClassVar[bool] = True
    basis: Tensor

    def __init__(self, bits: int, basis: Tensor, momentum: float) -> None:
        super().__init__(bits, torch.zeros(()), learned=False)
        self.momentum = momentum
        self.register_buffer("basis", basis)

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize; in training fit the basis first."""
        if not self.enabled:
            return weight
        with unseen(), torch.no_grad():
            if self.training and weight.numel():
                self.basis.lerp_(fitted(weight, self.basis, signed=True), 1 - self.momentum)
            levels, _ = levels_of(self.basis, signed=True)
            made = levels[nearest(weight.to(levels.dtype), levels)].to(weight.dtype)
        return straight_through(weight, made)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """Return the indices of levels, from the lowest integer on."""
        places = nearest(weight.to(self.basis.dtype), levels_of(self.basis, signed=True)[0])
        return (places + self.range[0]).to(torch.int8)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """Return all sums, ascending."""
        return levels_of(self.basis, signed=True)[0]

    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with a basis of as many bits."""
        if isinstance(kept, LqWeight):
            self.basis.copy_(kept.basis)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision: an equidistant basis of so many bits that ends where the former did."""
        self.basis, self.bits = rebased(self.basis, bits), bits


class LqInput(InputQuantizer):
    """Levels Σ v_i of the bits that are set; of inputs with a sign Σ ±v_i."""

    uniform = False
    basis: Tensor

    def __init__(self, bits: int, name: str, *, momentum: float, masked: bool) -> None:
        super().__init__(bits, name, masked=masked)
        self.momentum = momentum

    def _hold_(self, learned: bool) -> None:
        self.register_buffer("basis", torch.ones(self.bits))

    @property
    def step(self) -> Tensor:  # type: ignore[override]
        """The mean distance of levels."""
        return self.basis.abs().sum() / (2**self.bits - 1) * (2 if self._signed else 1)

    @property
    def _signed(self) -> bool:
        return self.range is not None and self.range[0] < 0

    def _settle_at_(self, signed: bool, step: float) -> None:
        self.signed.fill_(float(signed))
        self._range = code_range(self.bits, signed)
        self.basis.copy_(equal_basis(step, self.bits, signed=signed))

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision: an equidistant basis of so many bits that ends where the former did."""
        self.basis, self.bits = rebased(self.basis, bits), bits
        self._range = None
        self._read_sign()

    def _quantized(self, v: Tensor, low: int, high: int, times: int) -> Tensor:
        with torch.no_grad():
            shown = v.clamp_min(MASK) if self.masked else v
            kept = shown[v >= MASK] if self.masked else shown
            if self.training and kept.numel():
                self.basis.lerp_(fitted(kept, self.basis, signed=low < 0), 1 - self.momentum)
            levels, _ = levels_of(self.basis, signed=low < 0)
            made = levels[nearest(shown.to(levels.dtype), levels)].to(v.dtype)
            made = torch.where(v < MASK, v, made) if self.masked else made
            inside = (shown >= levels[0]) & (shown <= levels[-1]) | (v < MASK)
        return straight_through(torch.where(inside, v, 0.0), made)

    @torch.no_grad()
    def codes(self, v: Tensor) -> Tensor:
        """Return the indices of levels, from the lowest integer on."""
        assert self.range is not None, "it is calibrated before codes are asked for"
        return (nearest(v.to(self.basis.dtype), self.levels()) + self.range[0]).to(v.dtype)

    @torch.no_grad()
    def levels(self) -> Tensor:
        """Return all sums, ascending."""
        return levels_of(self.basis, signed=self._signed)[0]

    def new_observation(self) -> Observation:
        """Return an observation for LSQ's first scale."""
        return Observation(None)


def equal_basis(step: float | Tensor, bits: int, *, signed: bool) -> Tensor:
    """Return the basis of equidistant levels: powers of two times the scale, or half of it for signed values."""
    return torch.exp2(torch.arange(bits)) * step * (0.5 if signed else 1.0)


def rebased(basis: Tensor, bits: int) -> Tensor:
    """Return a basis of so many bits with the same sum, which is the last level."""
    if basis.numel() == bits:
        return basis
    return (torch.exp2(torch.arange(bits)) / (2**bits - 1)).to(basis) * basis.abs().sum()


@final
@dataclass(frozen=True)
class Lq(Quantizer):
    """Levels that are sums of a basis, fitted to weights and inputs in every training step.

    `momentum` is what of a basis each step leaves. One basis for a whole weight; the authors have one per channel.
    """

    source: ClassVar[str] = "Zhang et al. 2018, LQ-Nets: Learned quantization; as in microsoft/LQ-Nets"
    uniform: ClassVar[bool] = False
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)
    input_bits: ClassVar[Sequence[int]] = range(2, 9)

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"lq: momentum is {self.momentum}, and must be from 0 to below 1")

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer whose basis begins with LSQ's levels."""
        if shared.channels is not None:
            raise InputError("lq has one basis for a whole weight: leave per_channel out")
        step = first_weight_scale(weight, bits, shared)
        return LqWeight(bits, equal_basis(step.cpu(), bits, signed=True).to(weight.device), self.momentum)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer whose basis begins with LSQ's levels."""
        return LqInput(bits, name, momentum=self.momentum, masked=masked)

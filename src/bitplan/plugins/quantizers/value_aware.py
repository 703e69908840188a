"""RVQuant: a few large values keep 16 bits, and the others, which are most, have a range of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.plugins.quantizers.derived_scale import straight_through
from bitplan.quant.lsq import FLOOR, MASK
from bitplan.quant.methods import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen
from bitplan.quant.scales import ScaleSharing

if TYPE_CHECKING:
    from bitplan.quant.methods import QuantizeOptions

LARGE_BITS = 16


class TwoGrids(NamedTuple):
    """Values up to `limit` on a grid of few bits that ends there, and larger ones on one of 16 bits up to `largest`.

    Codes of few bits come first, from `low` to `high`; those of large values follow on either side of them: `high` + k
    and `low` − k stand for ±k of their steps. So every value has one code, and the codes ascend with the values.
    """

    limit: Tensor
    largest: Tensor
    low: int
    high: int

    @property
    def range(self) -> tuple[int, int]:
        """The lowest and the highest integer value."""
        return wide_range(self.low, self.high)

    def codes(self, values: Tensor) -> Tensor:
        """Return the integer value of each value, in its own type."""
        lowest, highest = code_range(LARGE_BITS, self.low < 0)
        large = (values / self._large_step).round().clamp(-highest if lowest else 0, highest)
        small = (values / self._step).round().clamp(-self.high if self.low else 0, self.high)
        beyond = torch.where(large > 0, large + self.high, torch.where(large < 0, large + self.low, 0.0))
        return torch.where(values.abs() > self.limit, beyond, small)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values that integers stand for."""
        above, below = (codes - self.high).clamp_min(0), (codes - self.low).clamp_max(0)
        is_large = (codes > self.high) | (codes < self.low)
        return torch.where(is_large, (above + below) * self._large_step, codes * self._step)

    def levels(self) -> Tensor:
        """Return the value of each integer in the range."""
        low, high = self.range
        return self.values(torch.arange(low, high + 1, device=self.limit.device, dtype=self.limit.dtype))

    @property
    def _step(self) -> Tensor:
        return self.limit.clamp_min(FLOOR) / self.high

    @property
    def _large_step(self) -> Tensor:
        return self.largest.clamp_min(FLOOR) / code_range(LARGE_BITS, self.low < 0)[1]


def wide_range(low: int, high: int) -> tuple[int, int]:
    """Codes of few bits, and beside them those of large values."""
    _, highest = code_range(LARGE_BITS, low < 0)
    return low - highest if low else 0, high + highest


class OutlierWeight(WeightQuantizer):
    """Weights above a threshold, which was set once, at 16 bits up to the largest; gradients pass the rounding."""

    uniform = False
    follows: ClassVar[bool] = True
    limit: Tensor

    def __init__(self, bits: int, limit: Tensor, *, share: float) -> None:
        super().__init__(bits, torch.zeros(()), learned=False)
        self.share = share
        self.register_buffer("limit", limit)

    @property
    def range(self) -> tuple[int, int]:
        """Lowest and highest integer value, those of large values included."""
        return wide_range(*code_range(self.bits))

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """Quantize a whole weight."""
        if not self.enabled:
            return weight
        with unseen(), torch.no_grad():
            grids = self._grids(weight)
            made = grids.values(grids.codes(weight.to(self.limit.dtype))).to(weight.dtype)
        return straight_through(weight, made)

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Tensor:
        """Return integers of few bits, and beyond them those of large values."""
        return self._grids(weight).codes(weight.detach().to(self.limit.dtype)).to(torch.int32)

    @torch.no_grad()
    def levels(self, weight: Tensor) -> Tensor:
        """Return all levels of both grids, ascending."""
        return self._grids(weight).levels()

    def _grids(self, weight: Tensor) -> TwoGrids:
        largest = weight.detach().abs().amax().to(self.limit.dtype) if weight.numel() else self.limit
        return TwoGrids(self.limit if self.share else largest, largest, *code_range(self.bits))

    def take_(self, kept: WeightQuantizer) -> None:
        """Go on with the threshold of one of this kind."""
        if isinstance(kept, OutlierWeight):
            self.limit.copy_(kept.limit)

    def rescale_(self, bits: int) -> None:
        """Change the precision; the threshold stays."""
        self.bits = bits


class Magnitudes(Observation):
    """A percentile of magnitudes, and the largest of them."""

    largest = 0.0

    def add(self, v: Tensor) -> bool:
        """Add one batch; return False if it has NaN or infinite values."""
        sound = super().add(v)
        if sound and v.numel():
            self.largest = max(self.largest, float(v.detach().abs().amax()))
        return sound

    def agreed(self) -> Magnitudes:
        """Return the statistics over all processes."""
        whole = super().agreed()
        if whole is self:
            return self
        made, distributed = Magnitudes(self._percentile), torch.distributed
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        largest = torch.tensor(self.largest, dtype=torch.float64, device=device)
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX)
        vars(made).update(vars(whole), largest=largest.item())
        return made


class OutlierInput(InputQuantizer):
    """Values above a threshold at 16 bits, up to the largest that calibration saw; beyond it no gradient passes."""

    uniform = False
    limit: Tensor
    largest: Tensor

    def __init__(self, bits: int, name: str, *, share: float, masked: bool) -> None:
        super().__init__(bits, name, masked=masked, learned=False)
        self.share = share

    def _hold_(self, learned: bool) -> None:
        self.register_buffer("limit", torch.ones(()))
        self.register_buffer("largest", torch.ones(()))

    @property
    def step(self) -> Tensor:  # type: ignore[override]
        """The scale up to the threshold."""
        return self.limit.clamp_min(FLOOR) / self._few[1]

    @property
    def _few(self) -> tuple[int, int]:
        return code_range(self.bits, bool(self.signed > 0.5))

    def new_observation(self) -> Observation:
        """Return an observation of the threshold and of the largest value."""
        return Magnitudes(100 * (1 - self.share))

    @torch.no_grad()
    def settle_(self, seen: Observation) -> None:
        """Set sign, threshold and end from an observation."""
        assert isinstance(seen, Magnitudes)
        self.signed.fill_(float(seen.lowest < 0))
        self.largest.fill_(seen.largest or 1.0)
        limit = 0.0 if self.share == 1 else seen.percentile_magnitude if self.share else seen.largest
        self.limit.fill_(limit)
        self._read_sign()

    def _settle_at_(self, signed: bool, step: float) -> None:
        self.signed.fill_(float(signed))
        self.limit.fill_(step * self._few[1])
        self.largest.copy_(self.limit)
        self._read_sign()

    def _read_sign(self) -> None:
        super()._read_sign()
        if self._range is not None:
            self._range = wide_range(*self._range)

    @torch.no_grad()
    def rescale_(self, bits: int) -> None:
        """Change the precision; threshold and end stay."""
        self.bits = bits
        self._range = None
        self._read_sign()

    @property
    def _grids(self) -> TwoGrids:
        return TwoGrids(self.limit, self.largest, *self._few)

    def _quantized(self, v: Tensor, low: int, high: int, times: int) -> Tensor:
        with torch.no_grad():
            shown = (v.clamp_min(MASK) if self.masked else v).to(self.limit.dtype)
            grids = self._grids
            made = grids.values(grids.codes(shown)).to(v.dtype)
            inside = (shown <= self.largest) & (shown >= (-self.largest if low else 0.0))
            if self.masked:
                made, inside = torch.where(v < MASK, v, made), inside | (v < MASK)
        return straight_through(torch.where(inside, v, 0.0), made)

    @torch.no_grad()
    def codes(self, v: Tensor) -> Tensor:
        """Return integers of few bits, and beyond them those of large values, as floats."""
        assert self.range is not None, "it is calibrated before codes are asked for"
        return self._grids.codes(v.to(self.limit.dtype))

    @torch.no_grad()
    def levels(self) -> Tensor:
        """Return all levels of both grids, ascending."""
        return self._grids.levels()


@final
@dataclass(frozen=True)
class ValueAware(Quantizer):
    """The largest `share` of values by magnitude at 16 bits, the others linear in their own range; not b bits but more.

    A tensor of b bits takes about b + 16·`share` bits for each value (4.32 instead of 4 at 2 %), and where its large
    values are must be kept as well; costs in plans count b. Second-hand, the paper itself was not read: which values
    and how many bits. Ours: ranges are even about zero, or begin there; thresholds are set when the network is
    quantized and calibrated, since finding the largest anew takes a sort in every step, so that the share is no longer
    exact once weights are trained; and what is computed forwards is quantized, where the published training quantizes
    only what is kept for the backward pass.
    """

    source: ClassVar[str] = "Park et al. 2018, Value-aware quantization (RVQuant); second-hand"
    uniform: ClassVar[bool] = False
    weight_bits: ClassVar[Sequence[int]] = range(2, 9)
    input_bits: ClassVar[Sequence[int]] = range(2, 9)

    share: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"value_aware: share is {self.share}, and must be from 0 to 1, such as 0.02")

    def weight(self, weight: Tensor, bits: int, shared: ScaleSharing, options: QuantizeOptions) -> WeightQuantizer:
        """Return a quantizer with a threshold that this share of the weight exceeds."""
        if shared.channels is not None:
            raise InputError("value_aware has one threshold for a whole weight: leave per_channel out")
        return OutlierWeight(bits, threshold(weight, self.share), share=self.share)

    def input(self, bits: int, name: str, options: QuantizeOptions, *, masked: bool) -> InputQuantizer:
        """Return a quantizer with a threshold that calibration sets."""
        return OutlierInput(bits, name, share=self.share, masked=masked)


@torch.no_grad()
def threshold(weight: Tensor, share: float) -> Tensor:
    """Return the magnitude that this share of a weight exceeds; 0 if all do."""
    kept = weight.numel() - round(share * weight.numel())
    if weight.is_meta or not kept:
        return torch.zeros((), device=weight.device)
    return weight.detach().abs().flatten().float().kthvalue(kept).values.clone()

"""FAQ: steps are set once, at a percentile of magnitudes, and stay; only weights are fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor

from bitplan.quant.methods.base import Quantizer
from bitplan.quant.observe import Observation
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.steps import Shared, weight_step

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


class FixedInput(InputQuantizer):
    """A step that is a percentile of |v| over Qp, and does not learn."""

    def __init__(self, bits: int, name: str, *, percentile: float, **told: Any) -> None:
        super().__init__(bits, name, learned=False, **told)
        self.percentile = percentile

    def new_observation(self) -> Observation:
        """An empty memory of a percentile."""
        return Observation(self.percentile)

    def _first_step(self, seen: Observation, high: int) -> Tensor:
        return torch.tensor(seen.percentile_magnitude / high)


@final
@dataclass(frozen=True)
class Faq(Quantizer):
    """Steps fixed at `percentile` of magnitudes, an option of quantize; the weights are fine-tuned."""

    source: ClassVar[str] = "McKinstry et al. 2019, FAQ; its details are recalled, not read"
    integers: ClassVar[bool] = True
    percentile: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """A step that is a percentile of |w| over Qp."""
        step = weight_step(weight, bits, shared, options.percentile)
        return WeightQuantizer(bits, step, learned=False, fused=options.fused)

    def input(self, bits: int, name: str, options: Options, *, masked: bool) -> InputQuantizer:
        """The same of inputs."""
        told = {"features": options.features, "fused": options.fused, "masked": masked}
        return FixedInput(bits, name, percentile=options.percentile, **told)

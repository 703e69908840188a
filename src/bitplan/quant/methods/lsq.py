"""LSQ, the default: every step is learned (`quant/lsq.py` has the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from bitplan.quant.methods.base import Quantizer
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.steps import Shared, weight_step

if TYPE_CHECKING:
    from bitplan.quant.factory import Options


@final
@dataclass(frozen=True)
class LearnedSteps(Quantizer):
    """Learned steps of weights and inputs: the default."""

    source: ClassVar[str] = "Esser et al. 2020, Learned step size quantization"
    integers: ClassVar[bool] = True

    def weight(self, weight: Tensor, bits: int, shared: Shared, options: Options) -> WeightQuantizer:
        """A learned step, at first 2·mean|w|/√Qp."""
        return WeightQuantizer(bits, weight_step(weight, bits, shared), fused=options.fused)

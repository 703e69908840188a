"""The cost of storing: bits of weights and steps."""

from __future__ import annotations

from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.costs.base import measured_in

STEP_BITS = 32


@measured_in("bits")
def memory(layer: Layer, precision: Precision) -> int:
    """Weights at their precision, one step for them and one for the input (none where left alone)."""
    steps = (precision.quantizes_weights and layer.weights > 0) + precision.quantizes_inputs
    return layer.weights * precision.weight_bits + steps * STEP_BITS

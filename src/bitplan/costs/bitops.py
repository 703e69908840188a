"""Costs of computing: bit multiply-accumulates (the paper's) and bit operations (HAWQ-v3's)."""

from __future__ import annotations

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.costs.base import measured_in


@measured_in("bit-MACs")
def bmac(layer: Layer, precision: Precision) -> int:
    """b · MACs (section 3.4.1), defined where weights and activations have the same b bits."""
    if precision.weight_bits != precision.act_bits:
        raise InputError(
            f"bmac is defined for equal weight and activation bits, not for {precision} ({layer.name}): "
            "use bops (bits × bits × MACs) or memory"
        )
    return layer.macs * precision.weight_bits


@measured_in("bit operations")
def bops(layer: Layer, precision: Precision) -> int:
    """Weight bits · activation bits · MACs."""
    return layer.macs * precision.weight_bits * precision.act_bits

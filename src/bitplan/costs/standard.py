"""Costs by formula: bit multiply-accumulates (the paper's), bit operations (HAWQ-v3's), bits of weights, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitplan.core.errors import InputError, suggestion
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Layer, Plan
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


STEP_BITS = 32


@measured_in("bits")
def memory(layer: Layer, precision: Precision) -> int:
    """Weights at their precision, one step for them and one for the input (none where left alone)."""
    steps = (precision.quantizes_weights and layer.weights > 0) + precision.quantizes_inputs
    return layer.weights * precision.weight_bits + steps * STEP_BITS


# Energies of a published table, for comparison, not for a particular chip.
MULTIPLY_8, MULTIPLY_32 = 0.2, 3.1
ADD_32 = 0.1
"""Products are added up in 32 bits, whatever their own."""
FLOAT_MULTIPLY, FLOAT_ADD = 1.1, 0.4
"""Of 16 bits: where weights or inputs are left alone, both are multiplied as floats."""
READ_BIT = 1300 / 64
"""Of a weight's bit from DRAM, by the lower figure."""
POWER = math.log(MULTIPLY_32 / MULTIPLY_8) / math.log(32 * 32 / (8 * 8))
"""Of the product of both bits, by which multiplications grow."""


@measured_in("pJ")
def energy(layer: Layer, precision: Precision) -> int:
    """MACs · (one multiplication + one addition), and every weight read once from DRAM for the example.

    Activations are not in it: where they are kept differs most between chips, and a graph does not know their sizes.
    Neither are the few rows that an embedding reads.
    """
    read = 0.0 if layer.kind == "embedding" else layer.weights * precision.weight_bits * READ_BIT
    return round(layer.macs * mac_energy(precision) + read)


def mac_energy(precision: Precision) -> float:
    """One multiplication and one addition, in picojoules."""
    if not (precision.quantizes_weights and precision.quantizes_inputs):
        return FLOAT_MULTIPLY + FLOAT_ADD
    return MULTIPLY_8 * math.pow(precision.weight_bits * precision.act_bits / 64, POWER) + ADD_32


FLOAT_BITS = 32


@dataclass(frozen=True)
class Totals:
    """Bit operations (all, and without the first and last layer, as the paper's table counts), size, compression.

    `bmacs` is None where some layer's weights and activations have different bits.
    """

    bops: int
    bops_without_ends: int
    bmacs: int | None
    bits: int
    compression: float


def total(plan: Plan, graph: Graph) -> Totals:
    """Add up a plan over every layer of its graph, the fixed ones included."""
    layers = {layer.name: layer for layer in graph.layers}
    for name in layers:
        if name not in plan.precisions:
            raise InputError(f"the plan has no precision for layer {name!r}{suggestion(name, plan.precisions)}")
    ends = {layer.name for layer in graph.layers if layer.is_end}
    each = {name: bops(layer, plan.precisions[name]) for name, layer in layers.items()}
    return Totals(
        bops=sum(each.values()),
        bops_without_ends=sum(value for name, value in each.items() if name not in ends),
        bmacs=_bmacs(plan, graph.layers),
        bits=sum(memory(layer, plan.precisions[name]) for name, layer in layers.items()),
        compression=_compression(plan, graph.layers),
    )


def _bmacs(plan: Plan, layers: tuple[Layer, ...]) -> int | None:
    used = [(layer, plan.precisions[layer.name]) for layer in layers]
    if any(precision.weight_bits != precision.act_bits for _, precision in used):
        return None
    return sum(bmac(layer, precision) for layer, precision in used)


def _compression(plan: Plan, layers: tuple[Layer, ...]) -> float:
    """Return how many times smaller the weights are than in float32 (biases and norms not counted)."""
    stored = sum(layer.weights * plan.precisions[layer.name].weight_bits for layer in layers)
    return FLOAT_BITS * sum(layer.weights for layer in layers) / stored if stored else 1.0

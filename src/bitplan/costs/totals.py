"""What a whole plan comes to: the figures that papers compare."""

from __future__ import annotations

from dataclasses import dataclass

from bitplan.core.errors import InputError, suggestion
from bitplan.core.records import Graph, Layer, Plan
from bitplan.costs.bitops import bmac, bops
from bitplan.costs.memory import memory

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
    """How many times smaller the weights are than in 32-bit floating point (biases and norms not counted)."""
    stored = sum(layer.weights * plan.precisions[layer.name].weight_bits for layer in layers)
    return FLOAT_BITS * sum(layer.weights for layer in layers) / stored if stored else 1.0

"""The weights of a network as codes and steps, as ONNX files store them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from bitplan.core.records import Plan
from bitplan.quant.convert import integer_weights, quantizers_of, weight_steps
from bitplan.quant.methods.groups import GroupedWeight


@dataclass(frozen=True)
class Weight:
    """The codes of a layer's weight, its steps (broadcasting against them) and its bits.

    `as_matrix` has a weight (N, C, 1, 1), stored so, used as a matrix (C, N). Where groups of `size` inputs have steps
    of their own, these are (rows, groups), and so are the `zeros`, codes that stand for zero, if there are any.
    """

    layer: str
    codes: Tensor
    steps: Tensor
    bits: int
    as_matrix: bool = False
    size: int = 0
    zeros: Tensor | None = None


def coded_weights(model: nn.Module, plan: Plan, *, groups: bool) -> dict[str, Weight]:
    """The weights by layer, their codes in the network's own layout."""
    cut = {
        layer: both.weight
        for layer, both in quantizers_of(model).items()
        if groups and isinstance(both.weight, GroupedWeight)
    }
    steps, found = weight_steps(model, but=cut), {}
    for layer, codes in integer_weights(model).items():
        bits, quantizer = plan.precisions[layer].weight_bits, cut.get(layer)
        if quantizer is None:
            found[layer] = Weight(layer, codes.cpu(), steps[layer].cpu(), bits)
            continue
        levels, row = quantizer.in_levels, quantizer.blocks.rows(codes).shape[1]
        zeros = None if levels.zero is None else levels.zero.cpu()
        size = quantizer.blocks.width(row)
        found[layer] = Weight(layer, codes.cpu(), levels.step.cpu(), bits, size=size, zeros=zeros)
    return found

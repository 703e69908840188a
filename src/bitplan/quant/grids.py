"""The grid on which a layer's products lie: multiples of the step of its input times that of its weight.

What an integer kernel adds to them, a bias or the shift of a batch normalization, must lie there too, or it computes
something else. Rounding is part of the trained network: the gradient passes straight through.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitplan.quant.lsq import positive
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen

LARGEST = 2.0**30
"""The largest code of a bias: it and the sum that it is added to fit 32 bits."""


def grid_of(inputs: nn.Module, weight: nn.Module) -> Tensor | None:
    """step_x·step_w, one or one for each output channel, without gradient; None where either is not quantized."""
    if not (isinstance(inputs, InputQuantizer) and isinstance(weight, WeightQuantizer)):
        return None
    if not (inputs.quantizes and weight.enabled):
        return None
    return positive(inputs.step.detach()) * positive(weight.step.detach()).flatten()


def rounded(values: Tensor, grid: Tensor) -> Tensor:
    """The nearest multiples whose codes fit an integer kernel; no gradient."""
    return (values.detach() / grid).round().clamp(-LARGEST, LARGEST) * grid


def on_grid(bias: Tensor | None, inputs: nn.Module, weight: nn.Module) -> Tensor | None:
    """A layer's bias, rounded to its grid where the network is made for integers.

    A part of a bias whose layer has a step for each channel stays as it is: nothing says which channels it is of.
    """
    if bias is None or not getattr(weight, "integer", False):
        return bias
    with unseen():
        grid = grid_of(inputs, weight)
        if grid is None or grid.numel() not in (1, bias.numel()):
            return bias
        return bias + (rounded(bias, grid) - bias.detach()).to(bias.dtype)


def settle_bias_(bias: Tensor, inputs: nn.Module, weight: WeightQuantizer) -> None:
    """Write the rounded values into a bias, so that it is a constant where a graph is captured."""
    with torch.no_grad():
        settled = on_grid(bias, inputs, weight)
        assert settled is not None
        bias.copy_(settled)
    weight.integer = False

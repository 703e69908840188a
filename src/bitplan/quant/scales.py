"""The values of a weight that share a scale, their first scale, and the grid on which products lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.core.errors import InputError
from bitplan.quant.layers import Channels
from bitplan.quant.lsq import first_scale, positive_scale
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen

# Which values of a weight share a step, and the first step of those that do.


@dataclass(frozen=True)
class ScaleSharing:
    """All values of a weight share a scale, or, with `channels`, those of an output channel do."""

    channels: Channels | None = None

    def view(self, weight: Tensor) -> Tensor:
        """Return the weight as its scales see it: (groups, rest, …) if channels are numbered anew in each group."""
        groups = 1 if self.channels is None else self.channels.groups
        return weight if groups == 1 else weight.view(groups, -1, *weight.shape[1:])

    def dims(self, seen: Tensor) -> tuple[int, ...]:
        """Return the axes of `view` over which a scale is shared."""
        return tuple(axis for axis in range(seen.dim()) if self.channels is None or axis not in self.channels.axes)

    def shaped(self, statistic: Tensor) -> Tensor:
        """Return a statistic that was reduced over `dims` in the shape of the scales; one scale is a scalar."""
        return statistic if self.channels is not None else statistic.reshape(())

    def steps(self, weight: Tensor) -> Tensor:
        """Return zeros, one for each scale."""
        seen = self.view(weight)
        dims = self.dims(seen)
        shape = [1 if axis in dims else size for axis, size in enumerate(seen.shape)]
        return self.shaped(torch.zeros(shape, device=weight.device))


def first_weight_scale(weight: Tensor, bits: int, shared: ScaleSharing, percentile: float | None = None) -> Tensor:
    """Return the first scale of a weight: LSQ's, or for FAQ a percentile of |w| over Qp.

    Weights that are all zero (or empty) get the scale of weights as an initializer makes them, 1/√fan-in.
    """
    weight = shared.view(weight)
    dims = shared.dims(weight)
    _, high = code_range(bits, signed=True)
    fan_in = math.prod(weight.shape[1:]) if weight.dim() > 1 else weight.numel()
    magnitude = _magnitude(weight.detach(), dims, percentile)
    magnitude = torch.where(magnitude > 0, magnitude, 1 / math.sqrt(max(1, fan_in)))
    return shared.shaped(first_scale(magnitude, high) if percentile is None else magnitude / high)


def check_real(weight: Tensor) -> None:
    """Raise an error for a weight of complex numbers."""
    if weight.is_complex():
        raise InputError(
            "the plan quantizes weights that are complex numbers, which have no steps: make it from a graph of this "
            "model, with trace(model, example), which leaves them alone"
        )


def _magnitude(weight: Tensor, dims: tuple[int, ...], percentile: float | None) -> Tensor:
    """Return the mean of |w| over `dims`, or a percentile of it; these axes have length 1 then."""
    shape = [1 if axis in dims else size for axis, size in enumerate(weight.shape)]
    if weight.numel() == 0:
        return torch.zeros(shape)
    magnitudes = weight.float().abs()
    if percentile is None:
        return magnitudes.mean(dim=dims, keepdim=True)
    kept = [axis for axis in range(weight.dim()) if axis not in dims]
    rows = magnitudes.permute(*kept, *dims).flatten(len(kept))  # (kept axes …, values that share a step)
    rank = max(1, math.ceil(rows.shape[-1] * percentile / 100))
    return rows.kthvalue(rank, dim=-1).values.view(shape)


# The grid on which a layer's products lie: multiples of the step of its input times that of its weight.

LARGEST = 2.0**30
"""The largest code of a bias: it and the sum that it is added to fit 32 bits."""


def grid_of(inputs: nn.Module, weight: nn.Module) -> Tensor | None:
    """Return scale_x·scale_w, one or one for each output channel, without gradient; None if either is in float."""
    if not (isinstance(inputs, InputQuantizer) and isinstance(weight, WeightQuantizer)):
        return None
    if not (inputs.quantizes and weight.enabled):
        return None
    return positive_scale(inputs.step.detach()) * positive_scale(weight.step.detach()).flatten()


def round_to_grid(values: Tensor, grid: Tensor) -> Tensor:
    """Return the nearest multiples whose integer values fit an integer kernel; no gradient."""
    return (values.detach() / grid).round().clamp(-LARGEST, LARGEST) * grid


def round_bias(bias: Tensor | None, inputs: nn.Module, weight: nn.Module) -> Tensor | None:
    """Return a layer's bias, rounded to its grid if the network is made for integers.

    A part of a bias whose layer has a scale for each channel stays as it is: its channels are not known.
    """
    if bias is None or not getattr(weight, "integer", False):
        return bias
    with unseen():
        grid = grid_of(inputs, weight)
        if grid is None or grid.numel() not in (1, bias.numel()):
            return bias
        return bias + (round_to_grid(bias, grid) - bias.detach()).to(bias.dtype)


def write_rounded_bias_(bias: Tensor, inputs: nn.Module, weight: WeightQuantizer) -> None:
    """Write the rounded values into a bias, so that it is a constant in a captured graph."""
    with torch.no_grad():
        settled = round_bias(bias, inputs, weight)
        assert settled is not None
        bias.copy_(settled)
    weight.integer = False

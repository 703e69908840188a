"""Weight error: a layer gains what more bits take off the squared error of its weights; a file is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.graph.names import Names
from bitplan.quant.convert import is_quantized, quantizers_of, weights_of
from bitplan.quant.methods import QuantizeOptions, QuantizerFactory, check_precision, read_method
from bitplan.quant.other_precisions import rescale_copy
from bitplan.quant.scales import ScaleSharing
from bitplan.quant.sites import find_sites
from bitplan.quant.weight_groups import FIRST_AXIS
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, open_if_path
from bitplan.weights.tensors import FLOATS, Rows

Errors = tuple[float, ...]
"""The sum of squares of weights, then of their errors at each choice."""
_AT_ONCE = 1 << 22  # weights of a file that are in memory together


@dataclass(frozen=True)
class WeightError(Gain):
    """The squared error of a layer's quantized weights over the squares of the weights; no data.

    e(c) = ‖Q_c(W) − W‖² / ‖W‖², value(c) = e(c0) − e(c): by the quantizer that the plan will have, fitted to each
    choice, or of a quantized model its own, rescaled. Without `relative` it is the squared error itself: but a layer
    whose weights are twice as large, and a norm before it half as large, computes the same. `rows` above 0 looks at as
    many output channels of each layer, evenly spread, for files of billions of weights and methods with steps by row.
    """

    about: ClassVar[About] = About(source="weights alone")

    relative: bool = True
    rows: int = 0

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise InputError(f"weight_error: rows must be at least 0, which takes all, not {self.rows}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """A weight at a time; of a file never more than a part of one is in memory."""
        layers = [layer for group in graph.selectable for layer in group.layers]
        names = [layer.name for layer in layers if layer.weights]
        errors_of = self._source(model, graph, choices, context.quantizer_for(choices))
        found: dict[str, Errors] = {}
        for number, name in enumerate(names):
            found[name] = errors_of(name)
            if not all(map(math.isfinite, found[name])):
                raise InputError(f"the weights of layer {name!r} are NaN or infinite, so there is no error to compare")
            if context.progress is not None:
                context.progress(number + 1, len(names), name)
        values = {name: self._gains(found[name]) for name in names}
        nothing = (0.0,) * len(choices)
        return LayerGains(
            {layer.name: values.get(layer.name, nothing) for layer in layers}, counts={"layers": len(names)}
        )

    def _gains(self, found: Errors) -> tuple[float, ...]:
        power, *errors = found
        scale = (power or 1.0) if self.relative else 1.0
        return tuple((errors[0] - error) / scale for error in errors)

    def _source(self, model: Any, graph: Graph, choices: Sequence[Precision], how: str) -> Callable[[str], Errors]:
        """What gives the errors of a layer, for what the weights are in."""
        if isinstance(model, CheckpointLike):
            opened = open_if_path(model)
            return _InFile(opened, choices, how, self.rows).errors
        if not isinstance(model, nn.Module):
            raise InputError(f"weight_error reads a torch.nn.Module or a checkpoint's path, not {type(model).__name__}")
        return _in_network(model, graph, choices, how)


def _in_network(model: nn.Module, graph: Graph, choices: Sequence[Precision], how: str) -> Callable[[str], Errors]:
    if is_quantized(model):
        weights, found = weights_of(model), quantizers_of(model)

        def own(name: str) -> Errors:
            quantizer = found[name].weight
            assert quantizer is not None
            return _errors(weights[name], [rescale_copy(quantizer, choice.weight_bits) for choice in choices])

        return own
    plan = Plan.uniform(graph, choices[-1])
    sites = find_sites(model, [layer.name for group in graph.selectable for layer in group.layers], plan.uses)
    factory = QuantizerFactory(QuantizeOptions(method=how), {}, torch.device("cpu"))

    def fresh(name: str) -> Errors:
        weight = sites[name].weight
        assert weight is not None
        return _errors(weight, [factory.weight(sites[name], choice.weight_bits) for choice in choices])

    return fresh


class _InFile:
    """Weights of a file, mapped: as many rows at a time as fit, where the method has steps by row."""

    def __init__(self, opened: OpenedCheckpoint, choices: Sequence[Precision], how: str, rows: int) -> None:
        self.opened, self.choices, self.method, self.rows = opened, choices, read_method(how), rows
        for choice in choices:
            check_precision(self.method, choice, "weight_error")

    def errors(self, name: str) -> Errors:
        """Of one layer, the sums over its parts."""
        shared, options = (
            ScaleSharing(FIRST_AXIS if self.method.rows else None),
            QuantizeOptions(method=self.method.name),
        )
        sums: list[Errors] = []
        for part in self._parts(name):
            made = [self.method.weight(part, choice.weight_bits, shared, options) for choice in self.choices]
            sums.append(_errors(part, made))
        return tuple(map(sum, zip(*sums, strict=True)))

    def _parts(self, name: str) -> Iterator[Tensor]:
        """(rows, inputs) each."""
        tensor = self.opened.weight(name)
        if tensor is None or tensor.dtype not in FLOATS:
            raise InputError(
                f"{self.opened.path} holds no float weight of layer {name!r}: the graph must be of this file"
            )
        rows = Rows.of(tensor.shape, Names().layout(name, tensor.shape))
        units = tensor.size // rows.unit
        by_row = self.method.rows
        each = max(1, _AT_ONCE // rows.unit) if by_row else units
        starts = list(range(0, units, each))
        if self.rows and by_row and self.rows < units * rows.unit // rows.width:
            starts, each = _spread(units, max(1, self.rows * rows.width // rows.unit))
        for start in starts:
            first, last = start * rows.unit, min(start + each, units) * rows.unit
            yield torch.from_numpy(
                np.array(rows.arrange(tensor.floats(first, last)))
            )  # a file that is mapped is not written
            tensor.done(first, last)


def _spread(units: int, wanted: int) -> tuple[list[int], int]:
    """Where runs of rows begin that are evenly spread, and how long each is: long ones, for disks."""
    runs = min(8, wanted)
    each = wanted // runs
    return [number * units // runs for number in range(runs)], each


@torch.no_grad()
def _errors(weight: Tensor, quantizers: Sequence[nn.Module]) -> Errors:
    """The squares of a weight, and of its errors."""
    wide = weight.detach().float()
    return (_squares(wide), *(_squares(quantizer(wide) - wide) for quantizer in quantizers))


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2

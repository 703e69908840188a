"""Layers of a quantized network at other precisions for a while, in place: the network is not copied."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bitplan.adapters.torch import device_of
from bitplan.core.precision import Precision
from bitplan.quant.convert import options_of, plan_of, quantizers_of
from bitplan.quant.methods import QuantizerFactory, read_method
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import PLAN, Quantizers, sites_of, unwrap

Switched = WeightQuantizer | InputQuantizer
Some = TypeVar("Some", WeightQuantizer, InputQuantizer)


def can_switch(model: nn.Module, layers: Mapping[str, Precision]) -> bool:
    """Tell whether only bits differ: tensors in float have no quantizer, and integer grids span layers.

    A method that fits weights anew at other bits cannot be rescaled, unless its weights are off and fitted in any case.
    """
    options, now = options_of(model), plan_of(model).precisions
    if options.integer or not all(_quantizes(now[name]) == _quantizes(layers[name]) for name in layers):
        return False
    found = quantizers_of(model) if read_method(options.method).anew else {}
    return all(
        is_off(found[name]) or now[name].weight_bits == layers[name].weight_bits for name in found.keys() & layers
    )


def _quantizes(precision: Precision) -> tuple[bool, bool]:
    return precision.quantizes_weights, precision.quantizes_inputs


def switch_off_(model: nn.Module, layers: Iterable[str]) -> None:
    """Let the weights of these layers pass in float, until a layer is switched on to be lowered."""
    found = quantizers_of(model)
    for quantizer in (found[name].weight for name in layers if name in found):
        if quantizer is not None:
            quantizer.enabled = False


def is_off(quantizers: Quantizers) -> bool:
    """Tell whether the weight of a layer passes in float."""
    return quantizers.weight is not None and not quantizers.weight.enabled


class FreshQuantizers:
    """Quantizers of weights as `quantize` makes them for a float network, each fitted once."""

    def __init__(self, model: nn.Module) -> None:
        self._sites, self._factory = sites_of(model), QuantizerFactory(options_of(model), {}, device_of(model))
        self._made: dict[tuple[str, int], WeightQuantizer] = {}

    def at(self, layer: str, bits: int) -> WeightQuantizer:
        """Return the quantizer of a layer's weight at so many bits."""
        if (layer, bits) not in self._made:
            made = self._factory.weight(self._sites[layer], bits)
            assert isinstance(made, WeightQuantizer), "only bits that quantize are asked for"
            self._made[layer, bits] = made.eval()
        return self._made[layer, bits]


def lower_weights(
    layer: str, found: Quantizers, choices: Sequence[Precision], fresh: FreshQuantizers
) -> list[WeightQuantizer]:
    """Return the quantizer of a layer's weight at each choice: a fresh one if it is off, else a rescaled copy."""
    if found.weight is None:
        return []
    if is_off(found):
        return [fresh.at(layer, choice.weight_bits) for choice in choices]
    return [rescale_copy(found.weight, choice.weight_bits) for choice in choices]


def rescale_copy(quantizer: Some, bits: int) -> Some:
    """Return a copy with other bits, its scale rescaled as when a group is lowered."""
    remembered = vars(quantizer).pop("forward", None)  # what it made at its own bits is nothing to a copy
    made = copy.deepcopy(quantizer)
    if remembered is not None:
        vars(quantizer)["forward"] = remembered
    made.rescale_(bits)
    return made


@contextmanager
def with_precisions(
    model: nn.Module,
    found: Mapping[str, Quantizers],
    layers: Mapping[str, Precision],
    fresh: FreshQuantizers | None = None,
) -> Iterator[list[Switched]]:
    """Put quantizers of these layers at other bits until the block ends, their scales rescaled as `quantize` does.

    `found` is the result of `quantizers_of`. Afterwards the quantizers, and the plan of the model, are what they were.
    A quantizer that is switched off is replaced by a `fresh` one.
    """
    root, plan = unwrap(model), plan_of(model)
    changes = {id(one): (name, one, bits) for name in layers for one, bits in find_changes(found[name], layers[name])}
    before = [(quantizer, dict(vars(quantizer))) for _, quantizer, _ in changes.values()]
    try:
        setattr(root, PLAN, plan.model_copy(update={"precisions": plan.precisions | dict(layers)}))
        for name, quantizer, bits in changes.values():
            if not quantizer.enabled and isinstance(quantizer, WeightQuantizer):
                _set_attributes_(quantizer, dict(vars((fresh or FreshQuantizers(model)).at(name, bits))))
                continue
            _set_attributes_(
                quantizer, {name: copy.deepcopy(vars(quantizer)[name]) for name in vars(quantizer).keys() - {"forward"}}
            )
            quantizer.rescale_(bits)
        yield [quantizer for _, quantizer, _ in changes.values()]
    finally:
        setattr(root, PLAN, plan)
        for quantizer, own in before:
            _set_attributes_(quantizer, own)


def _set_attributes_(quantizer: Switched, own: dict[str, Any]) -> None:
    """Give a quantizer these attributes and no others; it stays the object that others refer to."""
    held = vars(quantizer)
    held.clear()  # another dictionary in the place of its own has crashed Python 3.11's garbage collector
    held.update(own)


def find_changes(quantizers: Quantizers, precision: Precision) -> Iterator[tuple[Switched, int]]:
    """Yield the quantizers of a layer that follow its precision, with their bits; those of a softmax keep theirs."""
    if quantizers.weight is not None and precision.quantizes_weights:
        yield quantizers.weight, precision.weight_bits
    if precision.quantizes_inputs:
        yield from ((one, precision.act_bits) for one in quantizers.inputs if not one.masked)


def remember_weights_(model: nn.Module) -> None:
    """Let a model whose weights do not change quantize each weight once, as long as nothing learns from it."""
    for quantizers in quantizers_of(model).values():
        if quantizers.weight is not None:
            quantizers.weight.__dict__["forward"] = _CachedForward(quantizers.weight)


class _CachedForward:
    """Stands in for the forward of a weight's quantizer: a parameter is quantized once."""

    def __init__(self, quantizer: WeightQuantizer) -> None:
        self._quantizer = quantizer
        self._made: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(self, weight: Tensor, **options: Any) -> Tensor:
        fresh = type(self._quantizer).forward
        if options or not isinstance(weight, nn.Parameter) or self._learns(weight):
            return fresh(self._quantizer, weight, **options)
        known = self._made.get(id(weight))
        if known is None or known[1] != weight._version:
            made = fresh(self._quantizer, weight)
            known = self._made[id(weight)] = weight, weight._version, made
        return known[2]

    def _learns(self, weight: Tensor) -> bool:
        return torch.is_grad_enabled() and any(one.requires_grad for one in (weight, *self._quantizer.parameters()))

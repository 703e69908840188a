"""Layers of a quantized network at other precisions for a while, in place: no copy of the network is made."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.precision import Precision
from bitplan.quant.convert import options_of, plan_of, quantizers_of
from bitplan.quant.factory import Quantizers
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.root import PLAN, root_of

Switched = WeightQuantizer | InputQuantizer


def can_switch(model: nn.Module, layers: Mapping[str, Precision]) -> bool:
    """Whether only bits differ: what is left alone has no quantizer, and integer grids hang together over layers."""
    now = plan_of(model).precisions
    return not options_of(model).integer and all(_quantizes(now[name]) == _quantizes(layers[name]) for name in layers)


def _quantizes(precision: Precision) -> tuple[bool, bool]:
    return precision.quantizes_weights, precision.quantizes_inputs


@contextmanager
def switched(
    model: nn.Module, found: Mapping[str, Quantizers], layers: Mapping[str, Precision]
) -> Iterator[list[Switched]]:
    """Quantizers of these layers at other bits, their steps rescaled as `quantize` does, until the block ends.

    `found` is what `quantizers_of` says of the model. Each quantizer goes on as a copy of itself, and is afterwards
    what it was; so is the plan that the model follows.
    """
    root, plan = root_of(model), plan_of(model)
    changes = {id(one): (one, bits) for name in layers for one, bits in changes_of(found[name], layers[name])}
    before = [(quantizer, dict(vars(quantizer))) for quantizer, _ in changes.values()]
    try:
        setattr(root, PLAN, plan.model_copy(update={"precisions": plan.precisions | dict(layers)}))
        for quantizer, bits in changes.values():
            _hold_(
                quantizer, {name: copy.deepcopy(vars(quantizer)[name]) for name in vars(quantizer).keys() - {"forward"}}
            )
            quantizer.rescale_(bits)
        yield [quantizer for quantizer, _ in changes.values()]
    finally:
        setattr(root, PLAN, plan)
        for quantizer, own in before:
            _hold_(quantizer, own)


def _hold_(quantizer: Switched, own: dict[str, Any]) -> None:
    """Let a quantizer have these attributes and no others; it stays the object that others refer to."""
    held = vars(quantizer)
    held.clear()  # another dictionary in the place of its own has crashed Python 3.11's garbage collector
    held.update(own)


def changes_of(quantizers: Quantizers, precision: Precision) -> Iterator[tuple[Switched, int]]:
    """The quantizers of a layer that follow its precision, with their bits; those around a softmax keep their own."""
    if quantizers.weight is not None and precision.quantizes_weights:
        yield quantizers.weight, precision.weight_bits
    if precision.quantizes_inputs:
        yield from ((one, precision.act_bits) for one in quantizers.inputs if not one.masked)


def remember_weights_(model: nn.Module) -> None:
    """Let a copy whose weights stay as they are quantize each only once, where nothing is to learn from it."""
    for quantizers in quantizers_of(model).values():
        if quantizers.weight is not None:
            quantizers.weight.__dict__["forward"] = _Remembering(quantizers.weight)


class _Remembering:
    """What a weight's quantizer does in the place of its forward: a parameter is quantized once."""

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

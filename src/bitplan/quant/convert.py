"""model + Plan → quantized model, and back: which plan a model follows, and its integer weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.quant.calls import WeightedCall
from bitplan.quant.install import Options, Quantizers, call_at, install_, quantizers_at, strip_
from bitplan.quant.quantizers import Features, InputQuantizer, Method, WeightQuantizer
from bitplan.quant.sites import Site, find_sites

_PLAN = "_bitplan_plan"
_OPTIONS = "_bitplan_options"


def quantize(
    model: nn.Module,
    plan: Plan,
    *,
    per_channel: bool | None = None,
    method: Method | None = None,
    percentile: float | None = None,
    features: Features | None = None,
    fused: bool | None = None,
) -> nn.Module:
    """A quantized copy of a model; the given one stays as it was.

    Of a model that is quantized already, weights, learned steps and options are kept, and a step is
    multiplied by 2^(b1−b2) where its precision changes. Bits of 16 leave a tensor alone. Input steps are set
    by `calibrate_`, or else by the first training batch. Options, with their defaults: `per_channel` (False:
    one step per weight tensor), `method` ("lsq" learns steps, "faq" fixes them at a percentile of
    magnitudes), `percentile` (99.9), `features` ("sample" or "batch": what N in the gradient scale of an
    input step counts), `fused` (False; True quantizes in one compiled loop on a CPU).
    """
    if is_quantized(model) and not hasattr(model, _PLAN):
        raise InputError("a part of this model is quantized already: quantize that part, not what wraps it")
    told = {
        "per_channel": per_channel,
        "method": method,
        "percentile": percentile,
        "features": features,
        "fused": fused,
    }
    before: Options = getattr(model, _OPTIONS, Options())
    changes: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    chosen = replace(before, **changes)
    quantized = copy.deepcopy(model)
    kept = strip_(quantized, _sites(quantized)) if hasattr(quantized, _PLAN) else {}
    install_(quantized, plan, find_sites(quantized, _quantized_layers(plan), plan.uses), chosen, kept)
    setattr(quantized, _PLAN, plan)
    setattr(quantized, _OPTIONS, chosen)
    return quantized


def plan_of(model: nn.Module) -> Plan:
    """The plan a quantized model follows, also through wrappers (DDP, averages, compiled)."""
    plan: Plan = getattr(root_of(model), _PLAN)
    return plan


def is_quantized(model: nn.Module) -> bool:
    """Tell whether the model, or the model in this wrapper, follows a plan."""
    return any(hasattr(module, _PLAN) for module in model.modules())


def options_of(model: nn.Module) -> Options:
    """How a quantized model was quantized, beside its plan."""
    options: Options = getattr(root_of(model), _OPTIONS)
    return options


def quantizers_of(model: nn.Module) -> dict[str, Quantizers]:
    """The quantizers of every layer of the plan; linked layers name the same input quantizer."""
    return {layer: quantizers_at(site) for layer, site in _sites(model).items()}


def integer_weights(model: nn.Module) -> dict[str, Tensor]:
    """The codes of every quantized weight, exactly those that the network multiplies by its steps.

    int8 up to 8 bits, int16 above; layers whose weights are left alone are not among them.
    """
    return {layer: quantizer.codes(weight) for layer, quantizer, weight in _weights(model)}


def weight_steps(model: nn.Module) -> dict[str, Tensor]:
    """The positive steps of `integer_weights`: scalars, or of a shape that broadcasts against the codes."""
    return {layer: quantizer.steps_for(weight) for layer, quantizer, weight in _weights(model)}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `integer_weights` before they are quantized."""
    return {layer: weight for layer, _, weight in _weights(model)}


@contextmanager
def unquantized(model: nn.Module) -> Iterator[nn.Module]:
    """The same model with every quantizer passing its tensor through untouched, until the block ends."""
    switched = [
        module for module in model.modules() if isinstance(module, (WeightQuantizer, InputQuantizer)) and module.enabled
    ]
    for quantizer in switched:
        quantizer.enabled = False
    try:
        yield model
    finally:
        for quantizer in switched:
            quantizer.enabled = True


def root_of(model: nn.Module) -> nn.Module:
    """The quantized model itself, without what wraps it."""
    found = next((module for module in model.modules() if hasattr(module, _PLAN)), None)
    if found is None:
        raise InputError("this model is not quantized: make it one with quantize(model, plan)")
    return found


def _sites(model: nn.Module) -> dict[str, Site]:
    root = root_of(model)
    plan: Plan = getattr(root, _PLAN)
    return find_sites(root, _quantized_layers(plan), plan.uses)


def _quantized_layers(plan: Plan) -> list[str]:
    """The layers that get quantizers: 16 bits on both sides leave a layer alone."""
    return [name for name, precision in plan.precisions.items() if not precision.left_alone]


def _weights(model: nn.Module) -> Iterator[tuple[str, WeightQuantizer, Tensor]]:
    for layer, site in _sites(model).items():
        quantizer, call = quantizers_at(site).weight, call_at(site)
        weight = call.multiplied(layer) if isinstance(call, WeightedCall) else site.weight
        if quantizer is not None and weight is not None:
            yield layer, quantizer, weight

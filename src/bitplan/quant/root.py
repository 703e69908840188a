"""A quantized model among what wraps it: the module that `quantize` returned, and where the layers of its plan are."""

from __future__ import annotations

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.records import Plan
from bitplan.quant.sites import Site, find_sites

PLAN = "_bitplan_plan"
OPTIONS = "_bitplan_options"
INTEGER = "_bitplan_integer"
"""What a copy that computes in integers has: which of its layers do."""


def is_quantized(model: nn.Module) -> bool:
    """Tell whether the model, or the model in this wrapper, follows a plan."""
    return any(hasattr(module, PLAN) for module in model.modules())


def root_of(model: nn.Module) -> nn.Module:
    """The quantized model itself, without what wraps it."""
    found = next((module for module in model.modules() if hasattr(module, PLAN)), None)
    if found is None:
        raise InputError("this model is not quantized: make it one with quantize(model, plan)")
    return found


def sites_of(model: nn.Module) -> dict[str, Site]:
    """Where the layers are that the plan of a quantized model quantizes."""
    root = root_of(model)
    plan: Plan = getattr(root, PLAN)
    return find_sites(root, quantized_layers(plan), plan.uses)


def quantized_layers(plan: Plan) -> list[str]:
    """The layers that get quantizers: 16 bits on both sides leave a layer alone."""
    return [name for name, precision in plan.precisions.items() if not precision.left_alone]

"""The weights of a torch module for EAGL, with the steps that a quantized one learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.naming import OWN_WEIGHT, weight_names
from bitplan.gains.counting.scheme import Weights
from bitplan.quant.convert import is_quantized, plan_of, weight_steps, weights_of
from bitplan.quant.layers import WeightLayout, kin
from bitplan.weights.torch_tensors import as_tensor

if TYPE_CHECKING:
    import torch


def module_weights(model: torch.nn.Module, layers: Sequence[str]) -> dict[str, Weights]:
    """Layer → weights, shared with the model, which stays as it is."""
    if not hasattr(model, "named_modules"):
        raise InputError(f"EAGL reads a torch.nn.Module or a checkpoint's path, not {type(model).__name__}")
    learned = _learned_weights(model)
    modules = dict(model.named_modules())
    found: dict[str, Weights] = {}
    for name in layers:
        layout = _layout(modules, name)
        if name in learned:
            weight, step, bits = learned[name]
            steps = np.array(step.detach().cpu().float().reshape(-1).numpy(), np.float32)
            found[name] = Weights(as_tensor(name, weight), layout, steps, bits)
        else:
            found[name] = Weights(as_tensor(name, _weight(model, modules, name)), layout)
    return found


def _layout(modules: Mapping[str, torch.nn.Module], layer: str) -> WeightLayout:
    """How a layer's weight lies, as the type of the module says that has it as `weight` or under a name of its own."""
    owner, _, parameter = layer.rpartition(".")
    found = kin(modules[layer]) if layer in modules else kin(modules[owner]) if owner in modules else None
    named = found is not None and (layer in modules or found.holds(parameter) or found.holds(f"{parameter}_weight"))
    return found.layout if found is not None and named else "out_in"


def _weight(model: torch.nn.Module, modules: dict[str, Any], name: str) -> Any:
    weight = getattr(modules.get(name), OWN_WEIGHT, None)  # a parametrized one too
    if weight is None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        weight = next((parameters[known] for known in weight_names(name) if known in parameters), None)
    if weight is None:
        raise UnknownName("layer", name, modules, hint="The graph must come from this model")
    return weight


def _learned_weights(model: torch.nn.Module) -> dict[str, tuple[Any, Any, int]]:
    """Layer → weight, step and bits of a quantized model; empty for a float one."""
    if not is_quantized(model):
        return {}
    precisions = plan_of(model).precisions
    weights = weights_of(model)
    return {name: (weights[name], step, precisions[name].weight_bits) for name, step in weight_steps(model).items()}

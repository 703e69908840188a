"""The weights of a torch module for EAGL, with the steps that a quantized one learned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.naming import OWN_WEIGHT, split_name, weight_names
from bitplan.gains.histogram import Weights
from bitplan.quant.convert import is_quantized, quantizers_of, weights_of
from bitplan.quant.layers import WeightLayout, type_for_class
from bitplan.quant.lsq import positive_scale
from bitplan.quant.quantizers import WeightQuantizer
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
        layout, groups = _described(modules, name)
        weight, quantizer = learned.get(name) or (_weight(model, modules, name), None)
        counted = _counted(weight, quantizer)
        if groups > 1:
            weight, layout = _ungrouped(weight, groups), "out_in"
        found[name] = Weights(as_tensor(name, weight), layout, *counted)
    return found


def _counted(weight: Any, quantizer: WeightQuantizer | None) -> tuple[Any, int, Any]:
    """The steps of a weight, their bits, and what gives its codes where these do not."""
    if quantizer is None:
        return None, 0, None
    if type(quantizer) is not WeightQuantizer:
        return np.ones(1, np.float32), quantizer.bits, partial(_codes_at, weight.detach(), quantizer)
    step = positive_scale(quantizer.step.detach())
    return np.array(step.cpu().float().reshape(-1).numpy(), np.float32), quantizer.bits, None


def _codes_at(weight: Any, quantizer: WeightQuantizer, bits: int) -> Any:
    """The codes of a weight at so many bits, as where a group is lowered or raised."""
    made = copy.deepcopy(quantizer)
    made.rescale_(bits)
    return made.codes(weight).cpu().numpy()


def _described(modules: Mapping[str, torch.nn.Module], layer: str) -> tuple[WeightLayout, int]:
    """How a layer's weight lies and in how many groups its channels are, as the type of the module says that has it."""
    owner, parameter = split_name(layer)
    module = modules.get(layer, modules.get(owner))
    layer_type = None if module is None else type_for_class(module)
    if module is None or layer_type is None:
        return "out_in", 1
    is_its_weight = layer in modules or any(map(layer_type.holds, weight_names(parameter)))
    return (layer_type.layout, layer_type.channels(module).groups) if is_its_weight else ("out_in", 1)


def _ungrouped(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """(groups · in, out, …), each group with channels of its own → (groups · out, in, …)."""
    by_group = weight.detach().view(groups, -1, *weight.shape[1:])  # (groups, in, out, …)
    return by_group.transpose(1, 2).flatten(0, 1).contiguous()


def _weight(model: torch.nn.Module, modules: dict[str, Any], name: str) -> Any:
    weight = getattr(modules.get(name), OWN_WEIGHT, None)  # a parametrized one too
    if weight is None:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        weight = next((parameters[known] for known in weight_names(name) if known in parameters), None)
    if weight is None:
        raise UnknownName("layer", name, modules, hint="The graph must come from this model")
    return weight


def _learned_weights(model: torch.nn.Module) -> dict[str, tuple[Any, WeightQuantizer]]:
    """Layer → weight and quantizer of a quantized model; empty for a float one."""
    if not is_quantized(model):
        return {}
    weights = weights_of(model)
    quantizers = {name: both.weight for name, both in quantizers_of(model).items() if both.weight is not None}
    return {name: (weights[name], own) for name, own in quantizers.items()}

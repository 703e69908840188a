"""A quantized model → a copy that computes in integers, by the kernels that PyTorch has, with the same answers.

Its layers keep their parameters, quantizers and names; only the class of those that have a kernel changes. Whatever
looks at the copy without data, or with its quantizers off, sees the network as it was quantized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitplan.core.errors import InputError
from bitplan.core.naming import OWN_WEIGHT
from bitplan.quant.convert import copied, plan_of, unquantized
from bitplan.quant.finite import check_finite
from bitplan.quant.integer import settle_
from bitplan.quant.integer_modules import IntegerLayer, IntegerSequence, PassedNorm
from bitplan.quant.integer_places import find_integers
from bitplan.quant.kernels import ConvolutionKernel, Kernel, Operands, why_not_here
from bitplan.quant.layers import adopt_, quantized_as, release_
from bitplan.quant.lsq import in_use
from bitplan.quant.proof import named
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.quantizing import why_no_multiples
from bitplan.quant.root import INTEGER, root_of, sites_of
from bitplan.quant.sites import Place, Site

_log = logging.getLogger(__name__)
_HIGHEST_BITS = 8


@dataclass(frozen=True)
class IntegerLayers:
    """The layers of a plan that compute in integers, and of each of the others why it does not.

    `norms` are the batch normalizations that are part of the convolution before them.
    """

    computed: tuple[str, ...]
    left: Mapping[str, str]
    norms: tuple[str, ...] = ()


def integer(model: nn.Module, example: Any = None, *, channels_last: bool = True) -> nn.Module:
    """A copy of a quantized, calibrated model for inference, whose layers compute in integers; the given one stays.

    Layers without a kernel (more than 8 bits, embeddings, products of activations, weights handed to functions), and
    all of them on a CPU that cannot add such products up, stay as they are: a log line names them, `integer_layers`
    says why. Batch normalizations that directly follow a convolution become part of it, as far as the trace saw them
    that the plan is from; of a plan from elsewhere an `example` tells, an input as `trace` takes it. What convolutions
    in two dimensions make lies in channels_last, as their kernels write it; a network that calls `view` on it needs
    `channels_last=False`, which costs time.
    """
    check_finite(model)
    made = copied(model).eval()
    root, sites = root_of(made), sites_of(made)
    settle_(root)
    followers = _norms_after(root, example)
    left = {layer: why for layer, site in sites.items() if (why := _convert_(layer, site, channels_last))}
    norms = tuple(
        norm
        for layer, norm in followers.items()
        if layer in sites and _fold_(sites[layer].owner, root.get_submodule(norm))
    )
    setattr(root, INTEGER, IntegerLayers(tuple(layer for layer in sites if layer not in left), left, norms))
    root.register_load_state_dict_pre_hook(_refuse_state)
    _join_(made)
    for why in dict.fromkeys(left.values()):
        _log.warning("not in integers: %s (%s)", named([layer for layer in left if left[layer] == why]), why)
    return made


def _norms_after(root: nn.Module, example: Any) -> Mapping[str, str]:
    """Layers and the batch normalizations that alone read what they make."""
    known = plan_of(root).integers
    if known is None and example is not None:
        with unquantized(root):
            known = find_integers(root, example)
    return {} if known is None else known.norms


def integer_layers(model: nn.Module) -> IntegerLayers:
    """Which layers of a copy made by `integer` compute in integers, and which do not, and why."""
    found: IntegerLayers | None = getattr(root_of(model), INTEGER, None)
    if found is None:
        raise InputError("no layer of this model computes in integers: make a copy that does, with integer(model)")
    return found


def _convert_(layer: str, site: Site, channels_last: bool) -> str:
    """Let a layer compute in integers wherever it can; gives why it does not, wherever that is."""
    if site.kind == "product":
        return "both of its operands are activations"
    reasons: dict[str, None] = {}
    for place in site.places:
        kernel = _kernel(layer, place)
        if isinstance(kernel, str):
            reasons[kernel] = None
        elif not isinstance(place.module, IntegerLayer):  # which it is where a layer has the module twice
            release_(place.module)
            adopt_(place.module, IntegerLayer)
            vars(place.module).update(kernel=kernel, channels_last=channels_last)
    return "; ".join(reasons)


def _fold_(layer: nn.Module, norm: nn.Module) -> bool:
    """Make a batch normalization part of the convolution before it; tell whether that could be done."""
    kernel = layer.kernel if isinstance(layer, IntegerLayer) else None
    watched = [*layer._forward_hooks.values(), *norm._forward_pre_hooks.values()]  # by somebody who wants the values
    if not isinstance(kernel, ConvolutionKernel) or not _only_normalizes(norm) or watched:
        return False
    vars(layer).update(kernel=kernel.scaled(*_scale_and_shift(norm)), normed=True)
    adopt_(norm, PassedNorm)
    return True


def _join_(model: nn.Module) -> None:
    """Have sequences leave to convolutions what those can do of the work of the modules behind them."""
    for module in model.modules():
        plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if plain and any(isinstance(child, IntegerLayer) for child in module.children()):
            adopt_(module, IntegerSequence)


def _only_normalizes(norm: nn.Module) -> bool:
    """Tell whether a module does nothing else than normalize, as those of timm with an activation inside do."""
    plain = isinstance(norm, _BatchNorm) and type(norm).forward is _BatchNorm.forward
    return plain and "forward" not in vars(norm)


def _scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """k = γ/√(σ² + ε) and β − μ·k of a batch normalization in inference, in double precision."""
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def _kernel(layer: str, place: Place) -> Kernel | str:
    """The kernel that computes a layer at one of its places, or why there is none."""
    layer_type = quantized_as(place.module, place.own)
    if layer_type is None or place.own != OWN_WEIGHT:
        return "a function is given its weight"
    module: Any = place.module
    weight, inputs = module.weight_quantizer, module.input_quantizer
    if not isinstance(weight, WeightQuantizer) or not isinstance(inputs, InputQuantizer):
        return f"its {'input' if isinstance(weight, WeightQuantizer) else 'weight'} is not quantized"
    why = why_not_here() or _why_not(module, weight, inputs)
    return why or layer_type.integer(module, _operands(layer, module, weight, inputs))


def _why_not(module: Any, weight: WeightQuantizer, inputs: InputQuantizer) -> str:
    """Why a quantized layer cannot be given to an integer kernel as it is; empty where it can."""
    if max(weight.bits, inputs.bits) > _HIGHEST_BITS:
        return f"{max(weight.bits, inputs.bits)} bits are more than the 8 of integer kernels"
    if why := why_no_multiples(weight):
        return f"{why}, of its weight"
    if why := why_no_multiples(inputs):
        return f"{why}, of its input"
    if inputs.range is None:
        return "its input step is not set: calibrate_ the model first"
    if module._parameters.get(OWN_WEIGHT) is None:
        return "its weight is computed as it runs"
    if module.weight.dtype != torch.float32:
        return f"it computes in {str(module.weight.dtype).removeprefix('torch.')}"
    return "" if module.weight.device.type == "cpu" else f"it is on {module.weight.device}"


def _operands(layer: str, module: Any, weight: WeightQuantizer, inputs: InputQuantizer) -> Operands:
    limits = inputs.range
    assert limits is not None
    bias = getattr(module, "bias", None)
    return Operands(
        layer,
        weight.codes(module.weight),
        weight.steps_for(module.weight).flatten(),
        None if bias is None else bias.detach(),
        in_use(inputs.step.item()),
        *limits,
    )


# It is found by its name when a model is unpickled.
def _refuse_state(root: nn.Module, *_: Any) -> None:
    if hasattr(root, INTEGER):
        raise InputError(
            "a copy that computes in integers takes no other weights: load them into the quantized model, and make a "
            "copy of it again, with integer(model)"
        )

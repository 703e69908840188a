"""Make a quantized network one for integer kernels, beside its layers: norms that follow convolutions, and additions.

Biases are rounded where they are added (`quant/grids.py`). docs/decisions/0017 says what ONNX Runtime needs, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor, nn

from bitplan.core.integers import Addition, Integers
from bitplan.core.naming import CALL_QUANTIZERS, INPUT_QUANTIZER, WEIGHT_QUANTIZER, inside
from bitplan.quant.calls import AdditionCall, WeightedCall
from bitplan.quant.factory import NONE, Factory
from bitplan.quant.grids import settle_bias_
from bitplan.quant.integer_places import argument_names
from bitplan.quant.layers import family
from bitplan.quant.norms import NormLayer, follow_, settle_norm_
from bitplan.quant.owning import own_
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import Site

_log = logging.getLogger(__name__)
_BITS = 8


def install_integers_(model: nn.Module, integers: Integers, sites: Mapping[str, Site], factory: Factory) -> None:
    """Put norms on the grids of their convolutions, and 8 bits before the additions, all beside quantized layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer, path in integers.norms.items():
        site = sites.get(layer)
        if site is not None and _is_quantized(site) and _is_alone(site):
            follow_(modules[path], site.owner)
            site.owner.weight_quantizer.integer = False  # type: ignore[union-attr]
    for addition in integers.additions:
        if any(layer in sites and _is_quantized(sites[layer]) for layer in addition.layers):
            _install_addition_(modules[addition.module], addition, factory)
    if integers.floats:
        shown = ", ".join(integers.floats[:3]) + (" …" if len(integers.floats) > 3 else "")
        _log.info("%d additions stay float, no convolution makes an operand: %s", len(integers.floats), shown)


def additions_of(model: nn.Module) -> dict[str, AdditionCall]:
    """The additions of a quantized network that integer kernels execute, by name."""
    found: dict[str, AdditionCall] = {}
    for path, module in model.named_modules():
        calls = module._modules.get(CALL_QUANTIZERS)
        for key, call in calls.named_children() if calls is not None else ():
            if isinstance(call, AdditionCall):
                found[inside(path, key)] = call
    return found


def operands_of(call: AdditionCall) -> tuple[InputQuantizer, InputQuantizer]:
    """The quantizers of both operands."""
    assert isinstance(call.left, InputQuantizer)
    assert isinstance(call.right, InputQuantizer)
    return call.left, call.right


def settle_(model: nn.Module) -> None:
    """Make what inference rounds the model's own figures: plain norms and constant biases then compute the same."""
    for module in list(model.modules()):
        if isinstance(module, NormLayer):
            settle_norm_(module)
    for module in model.modules():
        inputs, weight = getattr(module, INPUT_QUANTIZER, None), getattr(module, WEIGHT_QUANTIZER, None)
        if isinstance(inputs, InputQuantizer) and isinstance(weight, WeightQuantizer) and weight.integer:
            bias = _whole_bias(module, weight)
            if bias is not None:
                settle_bias_(bias, inputs, weight)


def _whole_bias(module: nn.Module, weight: WeightQuantizer) -> Tensor | None:
    """The bias that is always added as a whole, or in parts that share a step; None where there is none."""
    if isinstance(module, WeightedCall):
        return module.bias if weight.step.numel() == 1 else None
    return module._parameters.get("bias") if _rounds_bias(module) else None


def _install_addition_(module: nn.Module, addition: Addition, factory: Factory) -> None:
    names, calls = argument_names(module), own_(module)
    kept = factory.kept.get(addition.name, NONE).inputs
    known = {
        name: quantizer
        for call in calls.values()
        if isinstance(call, AdditionCall)
        for name, (_, quantizer) in call.entries.items()
    }
    made: list[nn.Module] = []
    for place, argument in enumerate((addition.left, addition.right)):
        before = kept[place] if kept else None
        quantizer = known.get(argument) or factory.activation(addition.name, _BITS, before)
        if argument:
            known[argument] = quantizer
        made.append(quantizer)
    entries = {name: (names.index(name), known[name]) for name in (addition.left, addition.right) if name}
    calls[addition.call] = AdditionCall(made[0], made[1], entries)


def _is_quantized(site: Site) -> bool:
    """Tell whether a layer multiplies integers: both its weight and its input are quantized."""
    owner = site.owner if site.kind == "module" else site.owner.get_submodule(CALL_QUANTIZERS).get_submodule(site.key)
    return isinstance(owner.weight_quantizer, WeightQuantizer) and isinstance(owner.input_quantizer, InputQuantizer)


def _is_alone(site: Site) -> bool:
    """Tell whether a layer's weight is that of one module, which lies (out, in, …): a norm can change its signs."""
    own = site.kind == "module" and len(site.places) == 1 and bool(site.places[0].own)
    layer_type = family(site.owner)
    return (
        own and not site.key and _rounds_bias(site.owner) and layer_type is not None and layer_type.layout == "out_in"
    )


def _rounds_bias(module: nn.Module) -> bool:
    layer_type = family(module)
    return layer_type is not None and layer_type.rounds_bias

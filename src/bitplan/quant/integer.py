"""Make a quantized network one for integer kernels: norms that follow convolutions, and additions.

Biases are rounded where they are added (`quant/scales.py`). docs/decisions/integer-training.md explains what ONNX
Runtime needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.naming import CALL_QUANTIZERS, INPUT_QUANTIZER, WEIGHT_QUANTIZER, join_names
from bitplan.core.records import Addition, Integers
from bitplan.forward.operations import Functions
from bitplan.quant.call_interception import intercept_calls_
from bitplan.quant.calls import AdditionCall, WeightedCall
from bitplan.quant.integer_places import argument_names
from bitplan.quant.layers import Adopted, adopt_, release_, type_for_forward
from bitplan.quant.lsq import FLOOR
from bitplan.quant.methods import QuantizerFactory
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen
from bitplan.quant.scales import LARGEST, grid_of, round_to_grid, write_rounded_bias_
from bitplan.quant.sites import NONE, Site

_log = logging.getLogger(__name__)
_BITS = 8


def install_integers_(
    model: nn.Module, integers: Integers, sites: Mapping[str, Site], factory: QuantizerFactory
) -> None:
    """Put norms on the grids of their convolutions, and 8 bits before additions, all beside quantized layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for layer, path in integers.norms.items():
        site = sites.get(layer)
        if site is not None and _is_quantized(site) and _is_alone(site):
            follow_convolution_(modules[path], site.owner)
            site.owner.weight_quantizer.integer = False  # type: ignore[union-attr]
    for addition in integers.additions:
        if any(layer in sites and _is_quantized(sites[layer]) for layer in addition.layers):
            _install_addition_(modules[addition.module], addition, factory)
    if integers.floats:
        shown = ", ".join(integers.floats[:3]) + (" …" if len(integers.floats) > 3 else "")
        _log.info("%d additions stay float, no convolution makes an operand: %s", len(integers.floats), shown)


def additions_of(model: nn.Module) -> dict[str, AdditionCall]:
    """Return the additions of a quantized network that integer kernels execute, by name."""
    found: dict[str, AdditionCall] = {}
    for path, module in model.named_modules():
        calls = module._modules.get(CALL_QUANTIZERS)
        for key, call in calls.named_children() if calls is not None else ():
            if isinstance(call, AdditionCall):
                found[join_names(path, key)] = call
    return found


def operands_of(call: AdditionCall) -> tuple[InputQuantizer, InputQuantizer]:
    """Return the quantizers of both operands."""
    assert isinstance(call.left, InputQuantizer)
    assert isinstance(call.right, InputQuantizer)
    return call.left, call.right


def write_rounded_(model: nn.Module) -> None:
    """Write rounded values into norms and biases, so that plain norms and constant biases compute the same."""
    for module in list(model.modules()):
        if isinstance(module, NormLayer):
            write_rounded_norm_(module)
    for module in model.modules():
        inputs, weight = getattr(module, INPUT_QUANTIZER, None), getattr(module, WEIGHT_QUANTIZER, None)
        if isinstance(inputs, InputQuantizer) and isinstance(weight, WeightQuantizer) and weight.integer:
            bias = _whole_bias(module, weight)
            if bias is not None:
                write_rounded_bias_(bias, inputs, weight)


def _whole_bias(module: nn.Module, weight: WeightQuantizer) -> Tensor | None:
    """Return the bias that is always added whole, or in parts that share a scale, or None."""
    if isinstance(module, WeightedCall):
        return module.bias if weight.step.numel() == 1 else None
    return module._parameters.get("bias") if _rounds_bias(module) else None


def _install_addition_(module: nn.Module, addition: Addition, factory: QuantizerFactory) -> None:
    names, calls = argument_names(module), intercept_calls_(module)
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
    """Tell whether a norm can change the signs of a layer's weight: one module uses it, as (out, in, …)."""
    own = site.kind == "module" and len(site.places) == 1 and bool(site.places[0].own)
    layer_type = type_for_forward(site.owner)
    return (
        own and not site.key and _rounds_bias(site.owner) and layer_type is not None and layer_type.layout == "out_in"
    )


def _rounds_bias(module: nn.Module) -> bool:
    layer_type = type_for_forward(module)
    return layer_type is not None and layer_type.rounds_bias


# Batch normalization that an integer kernel takes into the convolution before it.

CONVOLUTION = "convolution"
"""Where a norm refers to the convolution before it, which is no part of it."""


class NormLayer(Adopted):
    """x (B, channels, …) → the same shape, whatever else the base's forward does beside normalizing."""

    convolution: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base's forward; its call of F.batch_norm normalizes on the grid."""
        with Functions(self._call_function):
            return super().forward(*args, **kwargs)

    def _call_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._normalize_on_grid(*args, **kwargs) if func is F.batch_norm else func(*args, **kwargs)

    def _normalize_on_grid(  # the signature is torch's
        self,
        x: Tensor,  # (B, channels, …)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalize as torch does, with a positive scale and a shift on the grid."""
        grid = _grid(self)
        with unseen():
            scale = _scale(self, grid)
        if grid is None or (training and x.numel() <= x.shape[1]):  # one value is no batch, which torch refuses
            return F.batch_norm(x, running_mean, running_var, scale, bias, training, momentum, eps)
        with unseen():
            if training:
                out, mean, inverse = torch.native_batch_norm(
                    x, scale, bias, running_mean, running_var, True, momentum, eps
                )
                shift = _shift_correction(self, grid, scale, mean, inverse)
                return out.add_(shift.to(out.dtype).view(-1, *[1] * (x.dim() - 2)))
            assert running_mean is not None
            assert running_var is not None
            assert bias is not None
            shift = _shift_correction(self, grid, scale, running_mean, (running_var + eps).rsqrt())
            return F.batch_norm(x, running_mean, running_var, scale, bias + shift.to(bias.dtype), False, momentum, eps)


def follow_convolution_(norm: nn.Module, convolution: nn.Module) -> None:
    """Let a norm round its shift to the grid of the convolution before it, whose bias becomes part of that shift.

    Channels with a negative scale change sign, in the convolution and in the norm: the network computes the same.
    """
    figures, layer = _tensors_by_name(norm), _tensors_by_name(convolution)
    with torch.no_grad():
        sign = torch.where(figures["weight"] < 0, -1.0, 1.0)
        for values in (figures["weight"], figures["running_mean"], layer.get("bias")):
            if values is not None:
                values.mul_(sign.to(values.dtype))
        layer["weight"].mul_(sign.to(layer["weight"].dtype).view(-1, *[1] * (layer["weight"].dim() - 1)))
    adopt_(norm, NormLayer)
    vars(norm)[CONVOLUTION] = convolution


def release_norm_(norm: NormLayer) -> None:
    """Give a norm back its class; it keeps the scale that was in use."""
    weight = _tensors_by_name(norm)["weight"]
    with torch.no_grad():
        weight.copy_(_scale(norm, _grid(norm)))
    release_(norm)
    vars(norm).pop(CONVOLUTION)


def write_rounded_norm_(norm: NormLayer) -> None:
    """Write scale and shift, as inference rounds them, into the norm: a plain norm then computes the same."""
    figures, grid = _tensors_by_name(norm), _grid(norm)
    with torch.no_grad():
        if grid is not None:
            scale = _scale(norm, grid)
            inverse = (figures["running_var"] + _epsilon(norm)).rsqrt()
            figures["bias"].add_(_shift_correction(norm, grid, scale, figures["running_mean"], inverse))
    release_norm_(norm)


def _shift_correction(norm: NormLayer, grid: Tensor, scale: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return the change of the shift by rounding, (channels); it has no gradient, so gradients pass through."""
    with torch.no_grad():
        wide = torch.promote_types(grid.dtype, scale.dtype)
        factor = scale.to(wide) * inverse.to(wide)
        shift = _bias(norm) - mean.to(wide) + _tensors_by_name(norm)["bias"].to(wide) / factor
        return (round_to_grid(shift, grid) - shift) * factor


def _scale(norm: NormLayer, grid: Tensor | None) -> Tensor:
    """Return |γ|, at least so large that the integer value of the shift fits; the gradient is that of |γ|, 1 at 0."""
    figures = _tensors_by_name(norm)
    gamma, beta = figures["weight"], figures["bias"].detach()
    size = gamma * torch.where(gamma < 0, -1.0, 1.0).to(gamma.dtype)
    least = torch.full_like(beta, FLOOR)
    if grid is not None:
        deviation = (figures["running_var"].detach() + _epsilon(norm)).sqrt()
        least = torch.maximum(least, beta.abs() * deviation / (grid * LARGEST))
    return size + (torch.maximum(size.detach(), least) - size.detach()).to(gamma.dtype)


def _grid(norm: NormLayer) -> Tensor | None:
    return grid_of(norm.convolution.input_quantizer, norm.convolution.weight_quantizer)  # type: ignore[arg-type]


def _bias(norm: NormLayer) -> Tensor | float:
    bias = norm.convolution.bias
    return bias.detach() if isinstance(bias, Tensor) else 0.0


def _epsilon(norm: nn.Module) -> float:
    epsilon = norm.eps
    assert isinstance(epsilon, float)
    return epsilon


def _tensors_by_name(module: nn.Module) -> dict[str, Any]:
    """Return the parameters and statistics of a module by name."""
    return {**module._parameters, **module._buffers}

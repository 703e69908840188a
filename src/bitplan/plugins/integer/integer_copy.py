"""A quantized model → a copy that computes in integers, by the kernels that PyTorch has, with the same answers.

Its layers keep their parameters, quantizers and names; only the class of those that have a kernel changes. Whatever
looks at the copy without data, or with its quantizers off, sees the network as it was quantized.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from bitplan.adapters.torch import uncompiled
from bitplan.core.errors import InputError
from bitplan.core.naming import OWN_WEIGHT
from bitplan.plugins.integer.kernels import NOTHING, ConvolutionKernel, CutOff, Kernel, Operands, why_not_here
from bitplan.quant.convert import deep_copy, plan_of, without_quantizers
from bitplan.quant.finite import check_finite
from bitplan.quant.integer import write_rounded_
from bitplan.quant.integer_places import find_integers
from bitplan.quant.layers import Adopted, adopt_, quantized_as, release_, type_for_forward
from bitplan.quant.lsq import scale_in_use
from bitplan.quant.proof import list_layers
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, unseen, why_not_uniform
from bitplan.quant.sites import INTEGER, Place, Site, sites_of, unwrap

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
    made = deep_copy(model).eval()
    root, sites = unwrap(made), sites_of(made)
    write_rounded_(root)
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
        _log.warning("not in integers: %s (%s)", list_layers([layer for layer in left if left[layer] == why]), why)
    return made


def _norms_after(root: nn.Module, example: Any) -> Mapping[str, str]:
    """Layers and the batch normalizations that alone read what they make."""
    known = plan_of(root).integers
    if known is None and example is not None:
        with without_quantizers(root):
            known = find_integers(root, example)
    return {} if known is None else known.norms


def integer_layers(model: nn.Module) -> IntegerLayers:
    """Which layers of a copy made by `integer` compute in integers, and which do not, and why."""
    found: IntegerLayers | None = getattr(unwrap(model), INTEGER, None)
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
    if why := why_not_uniform(weight):
        return f"{why}, of its weight"
    if why := why_not_uniform(inputs):
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
        scale_in_use(inputs.step.item()),
        *limits,
    )


# It is found by its name when a model is unpickled.
def _refuse_state(root: nn.Module, *_: Any) -> None:
    if hasattr(root, INTEGER):
        raise InputError(
            "a copy that computes in integers takes no other weights: load them into the quantized model, and make a "
            "copy of it again, with integer(model)"
        )


# --- What the modules of a copy that computes in integers do as they run: layers, norms that are part of one,
# sequences.

_NORMED: Final = "_bitplan_normed"


class IntegerLayer(Adopted):
    """A layer that is computed by its kernel, for inference only."""

    kernel: Kernel
    channels_last: bool
    normed: bool = False
    while_adopted = ("kernel", "channels_last", "normed")

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Compute in integers; without data, or with quantizers off, as its quantized counterpart does."""
        quantizer = self.quantizer
        if is_fake(x) or not quantizer.enabled:
            counterpart = type_for_forward(self)
            assert counterpart is not None
            assert counterpart.quantized is not None
            out: Tensor = counterpart.quantized.forward(self, x)
            return out
        if self.training or quantizer.observation is not None:
            raise InputError(
                "this copy computes in integers, which cannot be trained or calibrated: do that with the quantized "
                "model, and make a copy of it again, with integer(model)"
            )
        if x.device.type != "cpu":
            raise InputError(f"a copy that computes in integers runs on the CPU, and its input is on {x.device}")
        with unseen():
            out = _NoGradient.apply(x, self._computed) if _needs_gradient(x) else self._computed(x)
            return _normed(out) if self.normed else out

    @property
    def quantizer(self) -> InputQuantizer:
        """What its input passes through."""
        found: InputQuantizer = self.input_quantizer  # type: ignore[assignment]
        return found

    def _computed(self, x: Tensor) -> Tensor:
        out = self.kernel(x).to(x.dtype)
        both = out.dim() == 4 and (self.channels_last or not x.is_contiguous())
        return out if both else out.contiguous()


class PassedNorm(Adopted):
    """A batch normalization that is part of the convolution before it, where that one was computed by its kernel."""

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Give back what is normalized already, as another tensor: what becomes of it is not."""
        return x[...] if getattr(x, _NORMED, False) else super().forward(x)


class IntegerSequence(Adopted):
    """Modules one after the other, with as little as possible between the kernels of convolutions that meet there."""

    parts: tuple[list[nn.Module], list[nn.Module | _Together]] | None = None
    """The modules as they were, and what they are run as; a copy finds out by itself."""

    while_adopted = ("parts",)

    def forward(self, input: Any) -> Any:  # named as in nn.Sequential, since exported files show the name
        """Run all modules; those that torch compiles, or that somebody may look at, one by one."""
        if torch.compiler.is_compiling() or is_fake(input) or _has_any_global_hook():
            return super().forward(input)
        modules = _unrolled(self)
        if self.parts is None or self.parts[0] != modules:
            vars(self)["parts"] = modules, _parts_of(modules)
        assert self.parts is not None
        x = input
        for part in self.parts[1]:
            x = part(x)
        return x

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "parts"}


class _Together:
    """Convolutions in two dimensions that read each other, with norms that are part of them and ReLUs between them.

    Each cuts off itself what the ReLU behind it would; `behind` has one for each convolution, or None.
    """

    def __init__(self, modules: list[Any], behind: list[nn.Module | None]) -> None:
        self._modules = modules
        self._attributes = [vars(module) for module in modules]
        self._layers = [module for module in modules if isinstance(module, IntegerLayer)]
        self._quantizers = [layer.quantizer for layer in self._layers]
        self._steps = [(layer.kernel, cutting) for layer, cutting in zip(self._layers, behind, strict=True)]
        self._ends_normed = modules[-1] is self._layers[-1] and self._layers[-1].normed

    def __call__(self, x: Tensor) -> Tensor:
        """Run the kernels, or, where that would not be the same or somebody looks at what is between, all modules."""
        if _are_watched(self._attributes) or not self._computes(x):
            for module in self._modules:
                x = module(x)
            return x
        with unseen():
            for kernel, cutting in self._steps:
                x = kernel(x, _cut_off_by(cutting))  # type: ignore[call-arg]
            return _normed(x) if self._ends_normed else x

    def _computes(self, x: Tensor) -> bool:
        """Tell whether every layer would compute in integers what it gets where x is the first one's input."""
        if x.dtype is not torch.float32 or x.dim() != 4 or not x.is_cpu or _needs_gradient(x):
            return False
        at_work = all(one.enabled and one.observation is None for one in self._quantizers)
        return at_work and not any(layer.training for layer in self._layers)


def _unrolled(sequence: nn.Module) -> list[Any]:
    """The modules of a sequence, with those of the sequences in it in their places."""
    found: list[Any] = []
    for module in sequence._modules.values():
        if isinstance(module, IntegerSequence) and not _are_watched([vars(module)]):
            found += _unrolled(module)
        else:
            found.append(module)
    return found


def _parts_of(modules: list[Any]) -> list[nn.Module | _Together]:
    """The modules, those of convolutions that follow each other together."""
    parts: list[nn.Module | _Together] = []
    place = 0
    while place < len(modules):
        start, behind = place, []
        while place < len(modules) and _can_be_joined(modules[place]):
            layer, place = modules[place], place + 1
            if layer.normed and place < len(modules) and isinstance(modules[place], PassedNorm):
                place += 1
            cuts = place < len(modules) and type(modules[place]) in _CUTTING
            behind.append(modules[place] if cuts else None)
            place += cuts
        parts.append(_Together(modules[start:place], behind) if behind else modules[place])
        place += not behind
    return parts


def _can_be_joined(module: Any) -> bool:
    kernel = module.kernel if isinstance(module, IntegerLayer) and module.channels_last else None
    return isinstance(kernel, ConvolutionKernel) and len(kernel.stride) == 2 and not kernel.may_give_nan


def _cut_off_by(module: Any) -> CutOff:
    """What one of _CUTTING cuts off now; its limits may be changed."""
    if module is None:
        return NOTHING
    return _RELU if type(module) is nn.ReLU else CutOff("hardtanh", (module.min_val, module.max_val))


def _are_watched(modules: list[dict[str, Any]]) -> bool:
    """Tell by their attributes whether somebody sees, or changes, what one of some modules is given or gives."""
    return any(own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own for own in modules)


def _normed(x: Tensor) -> Tensor:
    """Mark a tensor as normalized already, for the norm that will be given it."""
    setattr(x, _NORMED, True)
    return x


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


_RELU: Final = CutOff("relu")
_CUTTING: Final = (nn.ReLU, nn.ReLU6, nn.Hardtanh)


class _NoGradient(torch.autograd.Function):
    """Says so where a gradient is asked for, instead of giving none in silence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, compute: Any) -> Tensor:
        out: Tensor = compute(x)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise InputError("this copy computes in integers, which has no gradient: take it through the quantized model")

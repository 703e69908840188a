"""Put quantizers where a plan's layers are, keeping what an earlier plan had learned there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bitplan.adapters.torch import device_of
from bitplan.core.errors import InputError
from bitplan.core.naming import (
    ATTENTION,
    CALL_QUANTIZERS,
    INPUT_QUANTIZER,
    OWN_WEIGHT,
    WEIGHT_QUANTIZER,
    function_of,
    layer_of,
    split,
)
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.core.records import Plan
from bitplan.quant.calls import AttentionCall, ProductCall, WeightedCall
from bitplan.quant.layers import Adopted, Channels, LayerType, adopt_, channels_of, quantized_as, release_
from bitplan.quant.owners import BORROWED, Bystander, Owner
from bitplan.quant.quantizers import Features, InputQuantizer, Method, WeightQuantizer, weight_step
from bitplan.quant.sites import Place, Site

_SOFTMAX_BITS = 8
_PRODUCT_INPUTS = ("left", "right")
_ATTENTION_INPUTS = ("query", "key", "scores", "weights", "value")
_SHORTCUTS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Options:
    """How a model is quantized, beside its plan; `quantize` explains them."""

    per_channel: bool = False
    method: Method = "lsq"
    percentile: float = 99.9
    features: Features = "sample"
    fused: bool = False

    def __post_init__(self) -> None:
        if self.method not in ("lsq", "faq"):
            raise InputError(f"the method is lsq or faq, not {self.method!r}")
        if self.features not in ("sample", "batch"):
            raise InputError(f"features are counted per sample or batch, not {self.features!r}")
        if not 0 < self.percentile <= 100:
            raise InputError(f"the percentile must be above 0 and at most 100, not {self.percentile}")


class Quantizers(NamedTuple):
    """What quantizes a layer: its weight (None: left alone) and its inputs (two or more for products)."""

    weight: WeightQuantizer | None
    inputs: tuple[InputQuantizer, ...]


_NONE = Quantizers(None, ())


def install_(
    model: nn.Module, plan: Plan, sites: Mapping[str, Site], options: Options, kept: Mapping[str, Quantizers]
) -> None:
    """Quantize every layer of the plan in place."""
    factory = _Factory(options, kept, device_of(model))
    leaders = {name: link[0] for link in plan.links for name in link}
    shared: dict[str, nn.Module] = {}
    for layer, site in sites.items():
        precision = plan.precisions[layer]
        if site.kind == "product":
            _install_product_(site, precision, factory)
            continue
        leader = leaders.get(layer, layer)
        if leader not in shared:
            members = [name for name in plan.precisions if leaders.get(name, name) == leader]
            shared[leader] = factory.inputs(leader, precision.act_bits, members)
        _install_weighted_(site, precision, shared[leader], factory)
    without = {id(site.owner) for site in sites.values() if not site.softmax}
    for owner in [module for module in model.modules() if isinstance(module, Owner)]:
        _finish_products_(owner, factory, softmax=id(owner) not in without)
    _close_shortcuts_(model)


def strip_(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, Quantizers]:
    """Undo a quantization in place; what quantized each layer is returned."""
    kept = {layer: quantizers_at(site) for layer, site in sites.items()}
    for module in list(model.modules()):
        if isinstance(module, Adopted):
            release_(module)
            for name in (WEIGHT_QUANTIZER, INPUT_QUANTIZER, BORROWED):
                module._modules.pop(name, None)
                vars(module).pop(name, None)
        module._modules.pop(CALL_QUANTIZERS, None)  # also beside a weight that only others use
    return kept


def quantizers_at(site: Site) -> Quantizers:
    """The quantizers installed at a site."""
    holder: nn.Module | None = call_at(site) if site.key else site.owner
    if holder is None:
        return _NONE
    if site.kind == "product":
        operands = [module for module in holder.children() if isinstance(module, InputQuantizer)]
        return Quantizers(None, tuple(operands))
    # What is left alone has an identity there.
    weight, inputs = getattr(holder, WEIGHT_QUANTIZER, None), getattr(holder, INPUT_QUANTIZER, None)
    return Quantizers(
        weight if isinstance(weight, WeightQuantizer) else None,
        (inputs,) if isinstance(inputs, InputQuantizer) else (),
    )


def call_at(site: Site) -> nn.Module | None:
    """What a site's owner has for its call."""
    calls = getattr(site.owner, CALL_QUANTIZERS, {})
    return dict(calls.items()).get(site.key)


def type_at(site: Site) -> LayerType | None:
    """The layer type that quantizes a site's weight; None where functions are given it."""
    return quantized_as(site.owner, site.parameter) if site.kind == "module" else None


class _Factory:
    """Makes quantizers: afresh, or with the steps that were kept, rescaled to the new precision."""

    def __init__(self, options: Options, kept: Mapping[str, Quantizers], device: torch.device) -> None:
        self.options = options
        self.kept = kept
        self.device = device

    def weight(self, site: Site, bits: int) -> nn.Module:
        """A quantizer for a site's weight; left alone, an identity."""
        weight = site.weight
        if bits >= LEFT_ALONE_BITS or weight is None:
            return nn.Identity()
        kept = self.kept.get(site.layer, _NONE).weight
        bits_before = kept.bits if kept else bits
        first = partial(_first_step, channels=channels_of(site.module, weight), bits=bits_before, options=self.options)
        step = first(weight)
        if kept is not None:
            before = kept.step.detach()
            fits = before.shape == step.shape or before.numel() == 1
            step = before.expand_as(step) if fits else before.mean()  # from one per channel to one: their mean
        learned = self.options.method == "lsq"
        made = WeightQuantizer(bits_before, step, learned=learned, fused=self.options.fused)
        made.rescale_(bits)
        if site.computed is not False and kept is None:
            made.first_step = first
        return made

    def inputs(self, layer: str, bits: int, members: list[str]) -> nn.Module:
        """The one quantizer of an activation that these members read; left alone, an identity."""
        if bits >= LEFT_ALONE_BITS:
            return nn.Identity()
        kept = [quantizer for name in members for quantizer in self.kept.get(name, _NONE).inputs]
        return self.activation(layer, bits, kept[0] if kept else None)

    def activation(self, layer: str, bits: int, kept: InputQuantizer | None, *, masked: bool = False) -> InputQuantizer:
        """A quantizer for one activation."""
        made = InputQuantizer(
            kept.bits if kept else bits,
            layer,
            method=self.options.method,
            percentile=self.options.percentile,
            features=self.options.features,
            fused=self.options.fused,
            masked=masked,
        )
        if kept is not None:
            made.load_state_dict(kept.state_dict())
        made.rescale_(bits)
        return made.to(self.device)


def _first_step(weight: Tensor, *, channels: Channels | None, bits: int, options: Options) -> Tensor:
    """A scalar; or one step per output channel, then of the weight's dimensions, 1 where a step is shared.

    Within a group channels are numbered from 0 again: (groups · a, b, …) is seen as (groups, a, b, …).
    """
    percentile = options.percentile if options.method == "faq" else None
    if not options.per_channel or channels is None:
        return weight_step(weight, bits, tuple(range(weight.dim())), percentile)
    if channels.groups > 1:
        weight = weight.view(channels.groups, -1, *weight.shape[1:])
    shared = tuple(axis for axis in range(weight.dim()) if axis not in channels.axes)
    return weight_step(weight, bits, shared, percentile)


def _install_weighted_(site: Site, precision: Precision, inputs: nn.Module, factory: _Factory) -> None:
    assert site.parameter is not None
    weight = factory.weight(site, precision.weight_bits)
    if not any(place.reads for place in site.places):
        inputs = nn.Identity()
    if isinstance(weight, nn.Identity) and isinstance(inputs, nn.Identity):
        return
    call = WeightedCall(weight, inputs, site.module, split(site.parameter)[1], computed=site.computed)
    if site.kind == "call":
        _calls(site.owner)[site.key] = call
    for place in site.places:
        if place.own:
            _adopt_with_(place, weight, inputs, registered=site.kind == "module" and place.module is site.owner)
        else:
            _let_call_(place.module, call)


def _adopt_with_(place: Place, weight: nn.Module, inputs: nn.Module, *, registered: bool) -> None:
    """Let a module's counterpart run with these quantizers; a module with several weights comes here for each.

    Those that another module has registered, to whose weight its own is tied, are only referred to.
    """
    module, layer_type = place.module, quantized_as(place.module, place.own)
    assert layer_type is not None
    assert layer_type.quantized is not None
    if not isinstance(module, layer_type.quantized):
        adopt_(module, layer_type.quantized)
        parameters = [name for name, _ in module.named_parameters(recurse=False) if layer_type.holds(name)]
        for name in parameters:  # until their turn comes, and where the plan leaves them alone, nothing is done to them
            if name != OWN_WEIGHT:
                _calls(module)[layer_of(name)] = WeightedCall(nn.Identity(), nn.Identity(), module, name)
    if place.own != OWN_WEIGHT:
        _calls(module)[layer_of(place.own)] = WeightedCall(weight, inputs, module, place.own)
    elif registered:
        module.weight_quantizer, module.input_quantizer = weight, inputs
    else:
        vars(module).update({WEIGHT_QUANTIZER: weight, INPUT_QUANTIZER: inputs})


def _let_call_(module: nn.Module, call: WeightedCall) -> None:
    """Let a module quantize this call, which may be kept by another."""
    calls = _own_(module)
    if call not in calls.values():
        vars(module).setdefault(BORROWED, []).append(call)


def _install_product_(site: Site, precision: Precision, factory: _Factory) -> None:
    if not precision.quantizes_inputs:
        return
    is_attention = function_of(site.key) == ATTENTION
    kept = factory.kept.get(site.layer, _NONE).inputs
    made: dict[str, InputQuantizer] = {}
    for place, name in enumerate(_ATTENTION_INPUTS if is_attention else _PRODUCT_INPUTS):
        before = kept[place] if place < len(kept) else None
        is_scores = name == "scores"  # what the softmax reads, masks among it
        bits = _SOFTMAX_BITS if is_scores else precision.act_bits
        made[name] = factory.activation(site.layer, bits, before, masked=is_scores)
    call = AttentionCall(made) if is_attention else ProductCall(made["left"], made["right"])
    _own_(site.owner)[site.key] = call


def _finish_products_(owner: Owner, factory: _Factory, *, softmax: bool) -> None:
    """Add the quantizer of a softmax between two products, and set the modules inside apart."""
    products = [site for site in owner.call_quantizers.values() if isinstance(site, ProductCall)]
    if len(products) > 1 and softmax:
        layer = products[0].left.name
        kept = factory.kept.get(layer, _NONE).inputs  # left, right, and perhaps that of a softmax
        before = kept[2] if len(kept) > 2 else None
        products[0].softmax = factory.activation(layer, _SOFTMAX_BITS, before, masked=True)
    if not any(isinstance(site, ProductCall | AttentionCall) for site in owner.call_quantizers.values()):
        return
    for module in owner.modules():
        ours = type(module).__module__.startswith(("torch.nn.", "bitplan.quant."))
        if module is not owner and not ours and not isinstance(module, Adopted):
            adopt_(module, Bystander)


def _close_shortcuts_(model: nn.Module) -> None:
    """Make torch's encoder layers call their parts in inference too, where a fused routine bypasses them."""
    for module in list(model.modules()):
        if isinstance(module, _SHORTCUTS) and any(isinstance(part, Adopted) for part in module.modules()):
            _own_(module)


def _own_(module: nn.Module) -> nn.ModuleDict:
    """Make a module the owner of calls, which are returned."""
    if not isinstance(module, Owner):
        if isinstance(module, Bystander):
            release_(module)
        adopt_(module, Owner)
    return _calls(module)


def _calls(module: nn.Module) -> nn.ModuleDict:
    """The calls whose quantizers a module has."""
    if CALL_QUANTIZERS not in module._modules:
        module.call_quantizers = nn.ModuleDict()
    calls = module.call_quantizers
    assert isinstance(calls, nn.ModuleDict)
    return calls

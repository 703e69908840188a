"""Put quantizers where a plan's layers are, keeping what an earlier plan had learned there."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bitplan.adapters.torch import device_of
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
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.quant.call_interception import BORROWED, Owner, calls_of, own_, set_apart_
from bitplan.quant.calls import AttentionCall, ProductCall, WeightedCall
from bitplan.quant.integer import NormLayer, additions_of, install_integers_, operands_of, unfollow_
from bitplan.quant.layers import Adopted, LayerType, adopt_, quantized_as, release_
from bitplan.quant.methods import NONE, Factory, Quantizers
from bitplan.quant.methods import Options as Options
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import Place, Site

_SOFTMAX_BITS = 8
_PRODUCT_INPUTS = ("left", "right")
_ATTENTION_INPUTS = ("query", "key", "scores", "weights", "value")
_SHORTCUTS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


def install_(
    model: nn.Module, plan: Plan, sites: Mapping[str, Site], options: Options, kept: Mapping[str, Quantizers]
) -> None:
    """Quantize every layer of the plan in place."""
    factory = Factory(options, kept, device_of(model))
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
    if options.integer:
        assert plan.integers is not None
        install_integers_(model, plan.integers, sites, factory)
    without = {id(site.owner) for site in sites.values() if not site.softmax}
    for owner in [module for module in model.modules() if isinstance(module, Owner)]:
        _finish_products_(owner, factory, softmax=id(owner) not in without)
    _close_shortcuts_(model)


def strip_(model: nn.Module, sites: Mapping[str, Site]) -> dict[str, Quantizers]:
    """Undo a quantization in place; what quantized each layer is returned."""
    kept = {layer: quantizers_at(site) for layer, site in sites.items()}
    kept |= {name: Quantizers(None, operands_of(call)) for name, call in additions_of(model).items()}
    for norm in [module for module in model.modules() if isinstance(module, NormLayer)]:
        unfollow_(norm)
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
        return NONE
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


def _install_weighted_(site: Site, precision: Precision, inputs: nn.Module, factory: Factory) -> None:
    assert site.parameter is not None
    weight = factory.weight(site, precision.weight_bits)
    if not any(place.reads for place in site.places):
        inputs = nn.Identity()
    if isinstance(weight, nn.Identity) and isinstance(inputs, nn.Identity):
        return
    call = WeightedCall(weight, inputs, site.module, split(site.parameter)[1], computed=site.computed)
    if site.kind == "call":
        calls_of(site.owner)[site.key] = call
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
                calls_of(module)[layer_of(name)] = WeightedCall(nn.Identity(), nn.Identity(), module, name)
    if place.own != OWN_WEIGHT:
        calls_of(module)[layer_of(place.own)] = WeightedCall(weight, inputs, module, place.own)
    elif registered:
        module.weight_quantizer, module.input_quantizer = weight, inputs
    else:
        vars(module).update({WEIGHT_QUANTIZER: weight, INPUT_QUANTIZER: inputs})


def _let_call_(module: nn.Module, call: WeightedCall) -> None:
    """Let a module quantize this call, which may be kept by another."""
    calls = own_(module)
    if call not in calls.values():
        vars(module).setdefault(BORROWED, []).append(call)


def _install_product_(site: Site, precision: Precision, factory: Factory) -> None:
    if not precision.quantizes_inputs:
        return
    is_attention = function_of(site.key) == ATTENTION
    kept = factory.kept.get(site.layer, NONE).inputs
    made: dict[str, InputQuantizer] = {}
    for place, name in enumerate(_ATTENTION_INPUTS if is_attention else _PRODUCT_INPUTS):
        before = kept[place] if place < len(kept) else None
        is_scores = name == "scores"  # what the softmax reads, masks among it
        bits = _SOFTMAX_BITS if is_scores else precision.act_bits
        made[name] = factory.activation(site.layer, bits, before, masked=is_scores)
    call = AttentionCall(made) if is_attention else ProductCall(made["left"], made["right"])
    own_(site.owner)[site.key] = call


def _finish_products_(owner: Owner, factory: Factory, *, softmax: bool) -> None:
    """Add the quantizer of a softmax between two products, and set the modules inside apart."""
    products = [site for site in owner.call_quantizers.values() if isinstance(site, ProductCall)]
    if len(products) > 1 and softmax:
        layer = products[0].left.name
        kept = factory.kept.get(layer, NONE).inputs  # left, right, and perhaps that of a softmax
        before = kept[2] if len(kept) > 2 else None
        products[0].softmax = factory.activation(layer, _SOFTMAX_BITS, before, masked=True)
    set_apart_(owner)


def _close_shortcuts_(model: nn.Module) -> None:
    """Make torch's encoder layers call their parts in inference too, where a fused routine bypasses them."""
    for module in list(model.modules()):
        if isinstance(module, _SHORTCUTS) and any(isinstance(part, Adopted) for part in module.modules()):
            own_(module)

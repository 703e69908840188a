"""The sites of a plan's layers in a model: the module that keeps their quantizers, and every place where they run.

A name leads to a weight, and to the module that usually uses it. The `uses` of a plan, which come from a trace, say
what else the network does with the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.naming import (
    CALL_QUANTIZERS,
    INPUT_QUANTIZER,
    LOOK_UPS,
    OWN_WEIGHT,
    WEIGHT_QUANTIZER,
    holder_of,
    is_product,
    join_names,
    layer_of,
    split_name,
)
from bitplan.core.records import Plan, Use, Uses
from bitplan.quant.layers import LayerType, quantized_as, type_for_class
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class WeightLocation:
    """A weight in its module: the path of the module, the module, and the weight's name there."""

    path: str
    module: nn.Module
    name: str


@dataclass(frozen=True)
class Place:
    """A module whose forward multiplies a weight.

    If the module calls the weight `own`, its quantized counterpart runs instead. Else the module's calls are quantized.
    `computed` is True if these get a tensor that is computed from the weight, and None if that is not known.
    `reads` is False if they read indices only.
    """

    module: nn.Module
    own: str = ""
    computed: bool | None = False
    reads: bool = True


@dataclass(frozen=True)
class Site:
    """One layer of a plan in a model: the module that keeps its quantizers, and the places where it runs.

    `key` is the name of a call in that module. `parameter` is the weight's path from that module; products have none.
    """

    layer: str
    kind: Literal["module", "call", "product"]
    owner: nn.Module
    key: str
    parameter: str | None
    places: tuple[Place, ...] = ()
    softmax: bool = True

    @property
    def weight(self) -> Tensor | None:
        """The weight as it is stored, None for a product."""
        if self.parameter is None:
            return None
        weight = getattr(self.module, split_name(self.parameter)[1])
        assert isinstance(weight, Tensor)
        return weight

    @property
    def module(self) -> nn.Module:
        """The module the weight belongs to: the owner, or one inside it whose weight it hands out."""
        path, _ = split_name(self.parameter or "")
        return self.owner.get_submodule(path)

    @property
    def computed(self) -> bool | None:
        """True if the network computes the tensor that it multiplies; None if that is not known."""
        computed = {place.computed for place in self.places if not place.own}
        return True if True in computed else None if None in computed else False


def find_sites(model: nn.Module, layers: Iterable[str], uses: Uses | None = None) -> dict[str, Site]:
    """Return the site of every layer; raise an error with near names if there is none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {layer_of(join_names(held.path, held.name)): held for held in _weights(modules)}
    named = set(layers)
    sites: dict[str, Site] = {}
    for layer in layers:
        traced = (uses or {}).get(layer, ())
        held = weights.get(layer)
        if held is not None and traced:
            sites[layer] = _site(layer, held, _traced_places(layer, held, traced, modules), modules)
        elif held is not None:
            others = [] if uses is not None else [weights[name] for name in weights if name not in named]
            places = _usual_places(held, others, modules, computed=None if uses is None else False)
            sites[layer] = _site(layer, held, places, modules)
        elif is_product(layer) and split_name(layer)[0] in modules:
            path, call = split_name(layer)
            softmax = all(use.softmax for use in traced)
            sites[layer] = Site(layer, "product", modules[path], call, None, softmax=softmax)
        else:
            hint = "A plan's layers are named as trace names them: make the plan from a graph of this model"
            raise UnknownName("layer", layer, weights, hint=hint)
    return sites


def guess_use(held: WeightLocation, modules: Modules) -> Use:
    """Return the use that a weight's name suggests: by its module, or by a parent that is known to hand it out."""
    parent, child = split_name(held.path)
    layer_type = type_for_class(modules[parent]) if held.path else None
    if layer_type is not None and child in layer_type.hands_out:
        return Use(module=parent, function="linear")
    own = bool(held.path) and quantized_as(held.module, held.name) is not None  # the model itself is no layer
    return Use(module=held.path, function="" if own else "linear")


def find_own_name(module: nn.Module, weight: Tensor, held: WeightLocation) -> str:
    """Return the name by which a module's counterpart quantizes a weight, empty if it does not."""
    names = [name for name, own in module.named_parameters(recurse=False) if own is weight]
    names += [held.name] if module is held.module else []
    return next((name for name in names if quantized_as(module, name) is not None), "")


def _weights(modules: Modules) -> Iterator[WeightLocation]:
    """Yield every matrix of a module, stored or computed; `weight` comes last, since it gives a layer its name."""
    for path, module in modules.items():
        names = [name for name, value in module.named_parameters(recurse=False) if value.dim() >= 2]
        names += [name for name in getattr(module, "parametrizations", ()) if getattr(module, name).dim() >= 2]
        plain = [name for name in names if holder_of(name)[1] == name != OWN_WEIGHT]
        yield from (
            WeightLocation(path, module, name)
            for name in plain
            if split_name(layer_of(join_names(path, name)))[0] == path
        )
    for path, module in modules.items():
        if _has_weight(module):
            yield WeightLocation(path, module, OWN_WEIGHT)


def _traced_places(layer: str, held: WeightLocation, uses: Iterable[Use], modules: Modules) -> tuple[Place, ...]:
    """Return the places where the trace saw a weight used."""
    places: dict[Place, None] = {}
    for use in uses:
        module = modules.get(use.module)
        own = "" if module is None or use.function else find_own_name(module, getattr(held.module, held.name), held)
        if module is None or not (use.function or own):
            raise InputError(
                f"the plan says that {use.module or 'the model'} uses {layer}, which it does not: trace again"
            )
        places[Place(module, own, use.computed, _reads(module, own, use))] = None
    return tuple(places)


def _usual_places(
    held: WeightLocation, others: Iterable[WeightLocation], modules: Modules, *, computed: bool | None
) -> tuple[Place, ...]:
    """Return the places of a weight by its name, and those of other weights that are tied to it."""
    weight = held.module._parameters.get(held.name)
    tied = [
        other
        for other in others
        if weight is not None and other.module is not held.module and other.module._parameters.get(other.name) is weight
    ]
    uses = [(each, guess_use(each, modules)) for each in (held, *tied)]
    return tuple(_usual_place(each, use, modules[use.module], computed) for each, use in uses)


def _usual_place(held: WeightLocation, use: Use, module: nn.Module, computed: bool | None) -> Place:
    own = "" if use.function else held.name
    return Place(module, own, computed, _reads(module, own, use))


def _reads(module: nn.Module, own: str, use: Use) -> bool:
    layer_type = quantized_as(module, own) if own else None
    return use.function not in LOOK_UPS if layer_type is None else layer_type.float_input


def _site(layer: str, held: WeightLocation, places: tuple[Place, ...], modules: Modules) -> Site:
    """Return a site whose owner is the layer's module, the parent that hands it out, or the module of its weight."""
    parent, child = split_name(held.path)
    key = "" if held.name == OWN_WEIGHT else split_name(layer)[1]
    if any(place.own and place.module is held.module for place in places):
        return Site(layer, "module", held.module, key, held.name, places)
    if held.path and not key and all(place.module is modules[parent] and not place.own for place in places):
        return Site(layer, "call", modules[parent], child, join_names(child, OWN_WEIGHT), places)
    return Site(layer, "call", held.module, key or OWN_WEIGHT, held.name, places)


def _has_weight(module: nn.Module) -> bool:
    """Tell whether the module has a weight matrix, stored or computed from other parameters."""
    own = {holder_of(name)[1] for name, _ in module.named_parameters(recurse=False)}
    if OWN_WEIGHT not in own and OWN_WEIGHT not in getattr(module, "parametrizations", ()):
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and weight.dim() >= 2


# A quantized model inside its wrappers.

PLAN = "_bitplan_plan"
OPTIONS = "_bitplan_options"
INTEGER = "_bitplan_integer"
"""The attribute of a copy that computes in integers: which of its layers do."""


def is_quantized(model: nn.Module) -> bool:
    """Tell whether the model, or the model in this wrapper, follows a plan."""
    return any(hasattr(module, PLAN) for module in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the quantized model without its wrappers (DDP, averages, compiled)."""
    root = next((module for module in model.modules() if hasattr(module, PLAN)), None)
    if root is None:
        raise InputError("this model is not quantized: make it one with quantize(model, plan)")
    return root


def sites_of(model: nn.Module) -> dict[str, Site]:
    """Return the sites of the layers that the plan of a quantized model quantizes."""
    root = unwrap(model)
    plan: Plan = getattr(root, PLAN)
    return find_sites(root, quantized_layers(plan), plan.uses)


def quantized_layers(plan: Plan) -> list[str]:
    """Return the layers that get quantizers: 16 bits on both sides leave a layer in float."""
    return [name for name, precision in plan.precisions.items() if not precision.left_alone]


# The quantizers at a site.


class Quantizers(NamedTuple):
    """The quantizers of a layer: of its weight (None: left in float) and of its inputs (two or more for products)."""

    weight: WeightQuantizer | None
    inputs: tuple[InputQuantizer, ...]


NONE = Quantizers(None, ())


def quantizers_at(site: Site) -> Quantizers:
    """Return the quantizers installed at a site."""
    holder: nn.Module | None = call_at(site) if site.key else site.owner
    if holder is None:
        return NONE
    if site.kind == "product":
        operands = [module for module in holder.children() if isinstance(module, InputQuantizer)]
        return Quantizers(None, tuple(operands))
    # A tensor that is left in float has an identity there.
    weight, inputs = getattr(holder, WEIGHT_QUANTIZER, None), getattr(holder, INPUT_QUANTIZER, None)
    return Quantizers(
        weight if isinstance(weight, WeightQuantizer) else None,
        (inputs,) if isinstance(inputs, InputQuantizer) else (),
    )


def call_at(site: Site) -> nn.Module | None:
    """Return the call of a site, which its owner keeps."""
    calls = getattr(site.owner, CALL_QUANTIZERS, {})
    return dict(calls.items()).get(site.key)


def type_at(site: Site) -> LayerType | None:
    """Return the layer type that quantizes a site's weight; None if functions are given the weight."""
    return quantized_as(site.owner, site.parameter) if site.kind == "module" else None

"""Where a plan's layers are in a model: where their quantizers are kept, and every place at which they run.

A name alone leads to a weight, and to the module that usually uses it. What else a network does with its weights the
uses tell that came with the plan from its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.naming import LOOK_UPS, OWN_WEIGHT, holder_of, inside, is_product, layer_of, split
from bitplan.core.records import Plan, Use, Uses
from bitplan.quant.layers import kin, quantized_as

Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Held:
    """A weight where it is kept: the path of its module, that module, and the weight's name there."""

    path: str
    module: nn.Module
    name: str


@dataclass(frozen=True)
class Place:
    """Where a weight is multiplied: in the forward of a module, which is its counterpart's where it has the name `own`.

    Elsewhere the module's calls are quantized; `computed` says that what they are given is computed from the weight,
    None that nobody looked, and `reads` that they also read floats, not only indices.
    """

    module: nn.Module
    own: str = ""
    computed: bool | None = False
    reads: bool = True


@dataclass(frozen=True)
class Site:
    """One layer of a plan in a model: the module that has its quantizers, for a call their key there, and its places.

    `parameter` is the weight's path from that module; products have none.
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
        """The weight before the forward pass does anything with it."""
        if self.parameter is None:
            return None
        weight = getattr(self.module, split(self.parameter)[1])
        assert isinstance(weight, Tensor)
        return weight

    @property
    def module(self) -> nn.Module:
        """The module the weight belongs to: the owner, or one inside it whose weight it hands out."""
        path, _ = split(self.parameter or "")
        return self.owner.get_submodule(path)

    @property
    def computed(self) -> bool | None:
        """Whether what is multiplied is computed as the network runs; None where that is not known."""
        found = {place.computed for place in self.places if not place.own}
        return True if True in found else None if None in found else False


def find_sites(model: nn.Module, layers: Iterable[str], uses: Uses | None = None) -> dict[str, Site]:
    """A site for every layer; a name that leads nowhere is an error with near names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    weights = {layer_of(inside(held.path, held.name)): held for held in _weights(modules)}
    named = set(layers)
    found: dict[str, Site] = {}
    for layer in layers:
        told = (uses or {}).get(layer, ())
        held = weights.get(layer)
        if held is not None and told:
            found[layer] = _site(layer, held, _told_places(layer, held, told, modules), modules)
        elif held is not None:
            others = [] if uses is not None else [weights[name] for name in weights if name not in named]
            places = _usual_places(held, others, modules, computed=None if uses is None else False)
            found[layer] = _site(layer, held, places, modules)
        elif is_product(layer) and split(layer)[0] in modules:
            path, call = split(layer)
            softmax = all(use.softmax for use in told)
            found[layer] = Site(layer, "product", modules[path], call, None, softmax=softmax)
        else:
            hint = "A plan's layers are named as trace names them: make the plan from a graph of this model"
            raise UnknownName("layer", layer, weights, hint=hint)
    return found


def usual_use(held: Held, modules: Modules) -> Use:
    """The use that a weight's name suggests: by the module that has it, or by the one that is known to hand it out."""
    parent, child = split(held.path)
    layer_type = kin(modules[parent]) if held.path else None
    if layer_type is not None and child in layer_type.hands_out:
        return Use(module=parent, function="linear")
    own = bool(held.path) and quantized_as(held.module, held.name) is not None  # the model itself is no layer
    return Use(module=held.path, function="" if own else "linear")


def own_name(module: nn.Module, weight: Tensor, held: Held) -> str:
    """What a module calls a weight that its counterpart quantizes; empty where it has none of its own."""
    names = [name for name, own in module.named_parameters(recurse=False) if own is weight]
    names += [held.name] if module is held.module else []
    return next((name for name in names if quantized_as(module, name) is not None), "")


def _weights(modules: Modules) -> Iterator[Held]:
    """Every matrix that a module has, or that is computed for it; its `weight` last, which gives a layer its name."""
    for path, module in modules.items():
        names = [name for name, value in module.named_parameters(recurse=False) if value.dim() >= 2]
        names += [name for name in getattr(module, "parametrizations", ()) if getattr(module, name).dim() >= 2]
        plain = [name for name in names if holder_of(name)[1] == name != OWN_WEIGHT]
        yield from (Held(path, module, name) for name in plain if split(layer_of(inside(path, name)))[0] == path)
    for path, module in modules.items():
        if _has_weight(module):
            yield Held(path, module, OWN_WEIGHT)


def _told_places(layer: str, held: Held, uses: Iterable[Use], modules: Modules) -> tuple[Place, ...]:
    """Where the trace saw a weight used."""
    places: dict[Place, None] = {}
    for use in uses:
        module = modules.get(use.module)
        own = "" if module is None or use.function else own_name(module, getattr(held.module, held.name), held)
        if module is None or not (use.function or own):
            raise InputError(
                f"the plan says that {use.module or 'the model'} uses {layer}, which it does not: trace again"
            )
        places[Place(module, own, use.computed, _reads(module, own, use))] = None
    return tuple(places)


def _usual_places(held: Held, others: Iterable[Held], modules: Modules, *, computed: bool | None) -> tuple[Place, ...]:
    """Where a weight is used as far as names tell: usually, and among others where they are tied to it."""
    weight = held.module._parameters.get(held.name)
    tied = [
        other
        for other in others
        if weight is not None and other.module is not held.module and other.module._parameters.get(other.name) is weight
    ]
    uses = [(each, usual_use(each, modules)) for each in (held, *tied)]
    return tuple(_usual_place(each, use, modules[use.module], computed) for each, use in uses)


def _usual_place(held: Held, use: Use, module: nn.Module, computed: bool | None) -> Place:
    own = "" if use.function else held.name
    return Place(module, own, computed, _reads(module, own, use))


def _reads(module: nn.Module, own: str, use: Use) -> bool:
    layer_type = quantized_as(module, own) if own else None
    return use.function not in LOOK_UPS if layer_type is None else layer_type.float_input


def _site(layer: str, held: Held, places: tuple[Place, ...], modules: Modules) -> Site:
    """Where the quantizers of a layer are kept: in its module, the parent that hands it out, or beside its weight."""
    parent, child = split(held.path)
    key = "" if held.name == OWN_WEIGHT else split(layer)[1]
    if any(place.own and place.module is held.module for place in places):
        return Site(layer, "module", held.module, key, held.name, places)
    if held.path and not key and all(place.module is modules[parent] and not place.own for place in places):
        return Site(layer, "call", modules[parent], child, inside(child, OWN_WEIGHT), places)
    return Site(layer, "call", held.module, key or OWN_WEIGHT, held.name, places)


def _has_weight(module: nn.Module) -> bool:
    """Tell whether the module has a weight matrix, its own or one that is computed from other parameters."""
    own = {holder_of(name)[1] for name, _ in module.named_parameters(recurse=False)}
    if OWN_WEIGHT not in own and OWN_WEIGHT not in getattr(module, "parametrizations", ()):
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and weight.dim() >= 2


# --- A quantized model among what wraps it: the module that `quantize` returned, and where the layers of its plan
# are.

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

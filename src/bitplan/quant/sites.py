"""Where a plan's layer names lead: to a module, to a parameter that a function is given, or to a product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from bitplan.core.errors import UnknownName
from bitplan.core.naming import OWN_WEIGHT, inside, is_product, layer_of, split
from bitplan.quant.calls import resolve
from bitplan.quant.layers import family

# torch's attention, and that of torchvision's Swin (named, so that torchvision need not be imported).
_HAND_OUT_WEIGHTS = {"MultiheadAttention", "ShiftedWindowAttention"}


@dataclass(frozen=True)
class Site:
    """One layer of a plan in a model: the module that owns it, and for a call its key there.

    `parameter` is the weight's path from the owner; products have none.
    """

    layer: str
    kind: Literal["module", "call", "product"]
    owner: nn.Module
    key: str
    parameter: str | None

    @property
    def weight(self) -> Tensor | None:
        """The weight as the forward pass sees it before quantization."""
        return None if self.parameter is None else resolve(self.owner, self.parameter)

    @property
    def module(self) -> nn.Module:
        """The module the weight belongs to: the owner, or attention's output projection inside it."""
        path, _ = split(self.parameter or "")
        return self.owner.get_submodule(path)


def find_sites(model: nn.Module, layers: Iterable[str]) -> dict[str, Site]:
    """A site for every layer; a name that leads nowhere is an error with near names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    known = _parameter_sites(modules) | _module_sites(modules)
    found: dict[str, Site] = {}
    for layer in layers:
        site = known.get(layer) or _product_site(layer, modules)
        if site is None:
            hint = "A plan's layers are named as trace names them: make the plan from a graph of this model"
            raise UnknownName("layer", layer, known, hint=hint)
        found[layer] = site
    return found


def _module_sites(modules: dict[str, nn.Module]) -> dict[str, Site]:
    sites: dict[str, Site] = {}
    for name, module in modules.items():
        if not _has_weight(module):
            continue
        layer = layer_of(inside(name, OWN_WEIGHT))
        parent_name, child = split(name)
        parent = modules.get(parent_name) if name else None
        if parent is not None and _hands_out_weights(parent):
            sites[layer] = Site(layer, "call", parent, child, inside(child, OWN_WEIGHT))
        elif family(module) is None or not name:  # the model itself is no layer, its weight is
            sites[layer] = Site(layer, "call", module, OWN_WEIGHT, OWN_WEIGHT)
        else:
            sites[layer] = Site(layer, "module", module, "", OWN_WEIGHT)
    return sites


def _parameter_sites(modules: dict[str, nn.Module]) -> dict[str, Site]:
    sites: dict[str, Site] = {}
    for name, module in modules.items():
        for path, parameter in module.named_parameters(recurse=False):
            layer = layer_of(inside(name, path))
            owner, key = split(layer)
            if parameter.dim() >= 2 and owner == name:  # otherwise it is the weight of a whole module
                sites[layer] = Site(layer, "call", module, key, path)
    return sites


def _product_site(layer: str, modules: dict[str, nn.Module]) -> Site | None:
    owner, call = split(layer)
    if owner not in modules or not is_product(layer):
        return None
    return Site(layer, "product", modules[owner], call, None)


def _hands_out_weights(parent: nn.Module) -> bool:
    """Tell whether a module gives its children's weights to functions instead of calling the children."""
    return any(base.__name__ in _HAND_OUT_WEIGHTS for base in type(parent).__mro__)


def _has_weight(module: nn.Module) -> bool:
    """Tell whether the module has a weight matrix, its own or one that a parametrization computes."""
    if module._parameters.get(OWN_WEIGHT) is None and OWN_WEIGHT not in getattr(module, "parametrizations", ()):
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and weight.dim() >= 2

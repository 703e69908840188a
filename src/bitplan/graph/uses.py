"""Which uses of layers a graph tells: those that `quantize` would not find by the names of layers alone."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from bitplan.core.naming import COMPLEX, LOOK_UPS, WEIGHTED, holder_of
from bitplan.core.uses import Use, Uses
from bitplan.graph.watch import Watch
from bitplan.quant.sites import Held, own_name, usual_use


def told_uses(model: nn.Module, watch: Watch) -> Uses:
    """All uses of the layers whose uses are not the one that their name suggests."""
    modules = dict(model.named_modules(remove_duplicate=False))
    told: Uses = {}
    for seen in watch.layers.values():
        if seen.parameter:
            path, name = holder_of(seen.parameter)
            held = Held(path, modules[path], name)
            uses = tuple(dict.fromkeys(_as_quantized(use, held, modules) for use in seen.uses))
            usual = usual_use(held, modules)
            if not all(_says_nothing(use, usual) for use in uses):
                told[seen.name] = uses
    told |= {name: tuple(watch.layers[name].uses) for name in watch.complex_products()}
    for name in watch.products_without_softmax():
        told[name] = tuple(use.model_copy(update={"softmax": False}) for use in watch.layers[name].uses)
    return told


def _as_quantized(use: Use, held: Held, modules: Mapping[str, nn.Module]) -> Use:
    """A use by a module whose own forward a counterpart will run needs no function."""
    named = use.module and not use.function.startswith(COMPLEX)
    own = own_name(modules[use.module], getattr(held.module, held.name), held) if named else ""
    return Use(module=use.module, function="") if own else use


def _says_nothing(use: Use, usual: Use) -> bool:
    """Tell whether a use is the one that is taken for granted."""
    if use.module != usual.module or bool(use.function) != bool(usual.function):
        return False
    return not use.function or (use.function in WEIGHTED - LOOK_UPS and not use.computed)

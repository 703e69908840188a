"""Modules become owners of calls, and what is inside them is set apart."""

from __future__ import annotations

from torch import nn

from bitplan.core.naming import CALL_QUANTIZERS
from bitplan.quant.calls import AdditionCall, AttentionCall, ProductCall
from bitplan.quant.layers import Adopted, adopt_, release_
from bitplan.quant.owners import Bystander, Owner


def own_(module: nn.Module) -> nn.ModuleDict:
    """Make a module the owner of calls, which are returned."""
    if not isinstance(module, Owner):
        if isinstance(module, Bystander):
            release_(module)
        adopt_(module, Owner)
    return calls_of(module)


def calls_of(module: nn.Module) -> nn.ModuleDict:
    """The calls whose quantizers a module has."""
    if CALL_QUANTIZERS not in module._modules:
        module.call_quantizers = nn.ModuleDict()
    calls = module.call_quantizers
    assert isinstance(calls, nn.ModuleDict)
    return calls


def set_apart_(owner: Owner) -> None:
    """Have the calls of modules inside an owner not taken for its own, where those are numbered."""
    calls = owner.call_quantizers.values()
    if not any(isinstance(call, ProductCall | AttentionCall | AdditionCall) for call in calls):
        return
    adds = any(isinstance(call, AdditionCall) for call in calls)
    for module in owner.modules():
        if module is not owner and not isinstance(module, Adopted) and not _calls_nothing(module, adds=adds):
            adopt_(module, Bystander)


def _calls_nothing(module: nn.Module, *, adds: bool) -> bool:
    """Tell whether a module is one of ours, or of torch's that computes nothing which is numbered.

    Of torch's only those with parts may add activations, unless they merely call their parts.
    """
    home = type(module).__module__
    composed = adds and any(module.children()) and home != nn.Sequential.__module__
    return home.startswith("bitplan.quant.") or (home.startswith("torch.nn.") and not composed)

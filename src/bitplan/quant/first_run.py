"""A quantized network is proven by its first run, whoever runs it, in training and in inference (`proof.py`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import is_fake

from bitplan.adapters.torch import uncompiled
from bitplan.core.parsing import first_line
from bitplan.core.records import Plan
from bitplan.quant.proof import PROVES, Proof, Unreached, prove_run, take_proof_off_
from bitplan.quant.quantizers import InputQuantizer
from bitplan.quant.root import PLAN, quantized_layers, root_of

PROVEN = "_bitplan_proven"
Quantizes = tuple[bool, bool]
"""Whether a layer's weights are quantized, and whether its inputs are."""

_log = logging.getLogger(__name__)


def prove_when_run_(root: nn.Module) -> None:
    """Have a model proven by the arguments of its first run, whoever runs it."""
    setattr(root, PROVEN, {})
    root.register_forward_pre_hook(_prove_first, with_kwargs=True)


def is_proven(root: nn.Module, plan: Plan) -> bool:
    """Tell whether what a plan quantizes was proven already, if at other bits."""
    proven: Mapping[str, Quantizes] = getattr(root, PROVEN, {})
    return bool(proven) and all(proven.get(layer) == own for layer, own in _quantizes(plan).items())


def allow_unreached_(model: nn.Module) -> None:
    """Let the first run of a quantized model, if it is to prove its plan, only warn of layers not reached."""
    root = root_of(model)
    if take_proof_off_(root):
        root.register_forward_pre_hook(_prove_reached, with_kwargs=True)


# Hooks are found by their names when a model is unpickled.
@uncompiled
def _prove_first(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    plan: Plan = getattr(root, PLAN)
    inputs = [module for module in root.modules() if isinstance(module, InputQuantizer)]
    is_new = root.training and all(quantizer.range is None for quantizer in inputs)
    # What a trace saw is reached; a part that a task does not use was told by calibration, or is by nobody.
    _prove_once(root, args, kwargs, "raise" if is_new and plan.uses is None else "warn")


@uncompiled
def _prove_reached(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _prove_once(root, args, kwargs, "warn")


for _hook in (_prove_first, _prove_reached):
    setattr(_hook, PROVES, True)


def _prove_once(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], unreached: Unreached) -> None:
    """Prove a run in the mode that it is in, and the other mode too: a network may multiply otherwise in training."""
    if any(is_fake(parameter) for parameter in root.parameters()):  # a shadow, or a capture: somebody else's business
        return
    take_proof_off_(root)
    try:
        proof = prove_run(root, args, kwargs, training=root.training)
    except Exception as error:
        root.register_forward_hook(partial(_tell_unproven, first_line(error)))
        return
    proof.check(unreached)
    try:
        other = prove_run(root, args, kwargs, training=not root.training)
    except Exception:  # in that mode it wants other arguments, or more than one sample
        other = Proof(proof.quantized, {})
    Proof(proof.quantized, other.in_float).check(unreached="warn")
    setattr(root, PROVEN, _quantizes(getattr(root, PLAN)))


def _tell_unproven(why: str, root: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
    """Warn once, after a run that came to an end: one that fails says itself what is wrong."""
    for key, hook in list(root._forward_hooks.items()):
        if getattr(hook, "func", None) is _tell_unproven:
            del root._forward_hooks[key]
    _log.warning("it could not be proven that the plan is executed: %s", why)


def _quantizes(plan: Plan) -> dict[str, Quantizes]:
    precisions = {layer: plan.precisions[layer] for layer in quantized_layers(plan)}
    return {layer: (one.quantizes_weights, one.quantizes_inputs) for layer, one in precisions.items()}

"""A model's fingerprint: short hashes of what it is and of its weights, for files that belong to one model alone."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.quant.convert import is_quantized, options_of, plan_of, quantizers_of
from bitplan.quant.sharing import state_in_full
from bitplan.weights.torch_tensors import hash_of_tensors


@dataclass(frozen=True)
class Fingerprint:
    """`network` is of names, shapes, plan and options; `weights` of the values themselves."""

    network: str
    weights: str


def fingerprint(model: nn.Module) -> Fingerprint:
    """Both hashes; two models that have the same compute the same."""
    shapes = [(name, tuple(value.shape), str(value.dtype)) for name, value in state_in_full(model).items()]
    plan = _plan_and_options(model) if is_quantized(model) else None
    return Fingerprint(hashlib.sha256(repr((shapes, plan)).encode()).hexdigest()[:12], hash_of_weights(model))


def _plan_and_options(model: nn.Module) -> tuple[object, ...]:
    options = options_of(model)
    both = (plan_of(model).id, options)
    off = [
        name for name, found in quantizers_of(model).items() if found.weight is not None and not found.weight.enabled
    ]
    return (*both, *["integer"][: options.integer], *off)  # these are not shown: others are what they were


def hash_of_weights(model: nn.Module) -> str:
    """Of every tensor's name and bytes, tied ones once."""
    return hash_of_tensors(state_once(model)[0], length=6)


def state_once(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor of the model once, and who is tied to whom."""
    own: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise InputError(f"{name} in the model's state is a {type(value).__name__}, which a checkpoint cannot hold")
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)], own[name] = name, value
    return own, tied


def put_state_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model all of its tensors.

    A state dict says which version of each module's code wrote it, and files do not: some networks, such as
    torchvision's MNASNet, refuse a state without it. Theirs is that of the code that is here.
    """
    state = OrderedDict(tensors)
    versions = getattr(model.state_dict(), "_metadata", None)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    model.load_state_dict(state)

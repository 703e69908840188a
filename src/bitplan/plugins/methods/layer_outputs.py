"""What the layers of a network give out on some batches, seen as it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode

from bitplan.core.errors import InputError
from bitplan.core.naming import split_name
from bitplan.core.spend import Spend, charge
from bitplan.forward.operations import tensors_in
from bitplan.tasks.base import samples_in

_NORMS = {"batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm"}
_ACTIVATIONS = {
    "relu", "relu_", "relu6", "hardtanh", "hardtanh_", "leaky_relu", "leaky_relu_", "prelu", "elu", "elu_", "selu",
    "celu", "gelu", "silu", "mish", "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus",
}  # fmt: skip

See = Callable[[str, Tensor], None]
"""Told of a layer what it gave out, each time that it did."""


@contextmanager
def watch_outputs(model: nn.Module, layers: Sequence[str], see: See) -> Iterator[None]:
    """Show what each layer gives out until the block ends.

    Of a layer that is no module which is called, such as a matrix of a recurrent layer or of an attention, it is what
    the nearest module around it gives out.
    """
    modules, unseen = dict(model.named_modules()), set(layers)
    within: dict[str, list[str]] = {}  # path of a module → the layers that it is, or that are in it
    for name in layers:
        for path in _paths(name):
            within.setdefault(path, []).append(name)

    def shown(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def show(_: nn.Module, __: Any, out: Any) -> None:
            if any(map(is_fake, tensors_in(out))):  # of a copy without data, by which a first run proves the plan
                return
            for name in within[path]:
                if name == path or name in unseen:
                    see(name, tensors_in(out)[0])
                    unseen.discard(name)
            if not path:  # the next pass begins
                unseen.update(layers)

        return show

    hooks = [modules[path].register_forward_hook(shown(path)) for path in within if path in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def watch_activations(model: nn.Module, layers: Sequence[str], see: See) -> Iterator[None]:
    """The same behind the norms and activations that directly follow a layer: told each time, the last counts."""
    mode = _Behind(see)
    with watch_outputs(model, layers, mode.begin), mode:
        yield


class _Behind(TorchFunctionMode):
    """Follows what a layer gave out through norms and activations."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self._see = see
        self._now: dict[int, tuple[Tensor, str]] = {}  # tensors are held, so that no address is used twice

    def begin(self, name: str, out: Tensor) -> None:
        """A layer gave something out."""
        self._see(name, out)
        self._now[id(out)] = out, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = getattr(func, "__name__", "") in _NORMS | _ACTIVATIONS
        if known and args and isinstance(result, Tensor) and id(args[0]) in self._now:
            self.begin(self._now.pop(id(args[0]))[1], result)
        return result


def split_by_sample(name: str, out: Tensor, samples: int) -> Tensor:
    """What a layer gave out, a row for each sample of the batch; (B · windows, …) belongs to samples in turn."""
    if out.shape[0] % samples:
        raise InputError(
            f"layer {name} gives out {tuple(out.shape)} for {samples} samples: they must come first, as in "
            "(samples, channels, …)"
        )
    return out.detach().reshape(samples, -1)


def check_model(model: Any, method: str) -> nn.Module:
    """The network, where there is one that can be run."""
    if not isinstance(model, nn.Module):
        shown = "only its graph" if model is None else f"a file ({getattr(model, 'path', model)})"
        raise InputError(f"{method} runs the network, so it needs the model itself, not {shown}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(f"{method} runs the network, and this one has no weights: load some first")
    return model


def _paths(layer: str) -> Iterator[str]:
    """The path of a layer, and those of all modules around it, down to the model's own."""
    path = layer
    while path:
        yield path
        path = split_name(path)[0]
    yield ""


def run(task: Any, model: nn.Module, batches: Sequence[Any], before: Callable[[Any], None] | None = None) -> None:
    """Run batches in inference; `before` is told each."""
    with torch.no_grad():
        for batch in batches:
            if before is not None:
                before(batch)
            task.forward(model, batch)
            charge(Spend(forwards=samples_in(batch)))

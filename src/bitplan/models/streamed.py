"""A network in a folder of safetensors that is never in memory whole: blocks are read as they run, and let go again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.adapters.pretrained import says_network
from bitplan.adapters.torch import parameters_without_data
from bitplan.adapters.transformers import network_of
from bitplan.core.errors import FileError, InputError
from bitplan.weights.opened import OpenedCheckpoint
from bitplan.weights.tensors import FLOATS
from bitplan.weights.torch_tensors import as_torch


def skeleton_of(opened: OpenedCheckpoint) -> nn.Module:
    """The network that the configuration beside an opened file describes, its parameters without data."""
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    if not says_network(folder):
        raise InputError(
            f"{opened.path} cannot be run: no config.json beside it says which network of transformers' it is; give "
            "the network itself"
        )
    with parameters_without_data():
        network = network_of(Path(folder))
    names = _names(network)
    lacking = [name for name, known in names.items() if not any(one in opened.tensors for one in known)]
    if lacking:
        raise FileError(f"{opened.path} lacks tensor {lacking[0]!r}, which the network of its config.json has")
    return network


@contextmanager
def streaming(model: nn.Module, opened: OpenedCheckpoint) -> Iterator[None]:
    """Every block of a network without data has that of a file while it runs, in float32, until the block ends.

    A block is a module of a list; what is outside of lists is read module by module. Of tied parameters the file has
    one.
    """
    names = _names(model)
    hooks = []
    for path, unit in _units(model):
        reading = _Reading(unit, path, names, opened)
        hooks.append(unit.register_forward_pre_hook(reading.read, prepend=True))
        hooks.append(unit.register_forward_hook(reading.let_go, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Reading:
    """One unit: which parameters it has where, and under which names the file may have them."""

    def __init__(self, unit: nn.Module, path: str, names: dict[str, list[str]], opened: OpenedCheckpoint) -> None:
        self._opened = opened
        self._places: list[tuple[nn.Module, str, nn.Parameter, list[str]]] = []
        for inside, module in unit.named_modules():
            for name, parameter in module._parameters.items():
                full = ".".join(part for part in (path, inside, name) if part)
                if parameter is not None and full in names:
                    self._places.append((module, name, parameter, names[full]))

    def read(self, *_: Any) -> None:
        """Fill what the unit holds."""
        for module, name, _parameter, known in self._places:
            tensor = next(self._opened.tensors[one] for one in known if one in self._opened.tensors)
            if tensor.dtype not in FLOATS:
                raise FileError(f"{self._opened.path}: tensor {tensor.name!r} holds no floats ({tensor.dtype})")
            module._parameters[name] = nn.Parameter(as_torch(tensor).float(), requires_grad=False)
            tensor.done(0, tensor.size)

    def let_go(self, *_: Any) -> None:
        """Put back what has no data."""
        for module, name, parameter, _known in self._places:
            module._parameters[name] = parameter


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the outermost lists, and outside of these every module that has parameters of its own."""
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, nn.ModuleList):
            for name, block in module.named_children():
                inside.update(block.modules())
                yield f"{path}.{name}" if path else name, block
        elif any(parameter is not None for parameter in module._parameters.values()):
            yield path, _alone(module, path)


def _alone(module: nn.Module, path: str) -> nn.Module:
    """A module outside of lists; one that has parameters and modules with others would read them all."""
    if any(child._parameters for child in module.children()):
        raise InputError(f"{path or 'the network itself'} has parameters beside those of its parts: load the network")
    return module


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Each parameter's name → the names that it and those tied to it have; what has data already is not among them."""
    every = dict(model.named_parameters(remove_duplicate=False))
    by_identity: dict[int, list[str]] = {}
    for name, parameter in every.items():
        by_identity.setdefault(id(parameter), []).append(name)
    return {name: by_identity[id(parameter)] for name, parameter in every.items() if parameter.is_meta}

"""A network in a folder of safetensors that is never in memory whole: blocks are read as they run, and let go again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from bitplan.adapters.torch import parameters_without_data
from bitplan.adapters.transformers import network_of
from bitplan.core.errors import FileError, InputError
from bitplan.weights.opened import OpenedCheckpoint
from bitplan.weights.pretrained_folders import says_network
from bitplan.weights.tensors import FLOATS
from bitplan.weights.torch_tensors import as_torch

Names = dict[str, str]
"""What a parameter is called in the network → in the file."""


def skeleton_of(opened: OpenedCheckpoint) -> nn.Module:
    """The network that the configuration beside an opened file describes, its parameters without data."""
    folder = opened.folder
    if not says_network(folder):
        raise InputError(
            f"{opened.path} cannot be run: no config.json beside it says which network of transformers' it is; give "
            "the network itself"
        )
    with parameters_without_data():
        network = network_of(Path(folder), opened.bytes_held)
    names = _names(network, opened)
    lacking = [name for name, parameter in network.named_parameters() if parameter.is_meta and name not in names]
    if lacking:
        raise FileError(f"{opened.path} lacks tensor {lacking[0]!r}, which the network of its config.json has")
    return network


@contextmanager
def streaming(model: nn.Module, opened: OpenedCheckpoint) -> Iterator[None]:
    """Every block of a network without data has that of a file while it runs, in float32, until the block ends.

    A block is a module of a list; what is outside of lists is read module by module. Of tied parameters the file has
    one. What the file does not have, such as steps that were added since, is left as it is.
    """
    hooks = []
    for unit in units_of(model, opened):
        hooks.append(unit.module.register_forward_pre_hook(unit.read, prepend=True))
        hooks.append(unit.module.register_forward_hook(unit.let_go, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class ReadUnit:
    """A part of a network that is read at once: which parameters it has where, and what the file calls them."""

    def __init__(self, module: nn.Module, path: str, names: Names, opened: OpenedCheckpoint, *, is_block: bool) -> None:
        self.module, self.is_block, self._opened = module, is_block, opened
        self._places: list[tuple[nn.Module, str, nn.Parameter, str]] = []
        for inside, module in self.module.named_modules():
            for name, parameter in module._parameters.items():
                full = ".".join(part for part in (path, inside, name) if part)
                if parameter is not None and full in names:
                    self._places.append((module, name, parameter, names[full]))

    def read(self, *_: Any) -> None:
        """Fill what it holds."""
        for module, name, _parameter, stored in self._places:
            tensor = self._opened.tensors[stored]
            if tensor.dtype not in FLOATS:
                raise FileError(f"{self._opened.path}: tensor {tensor.name!r} holds no floats ({tensor.dtype})")
            module._parameters[name] = nn.Parameter(as_torch(tensor).float(), requires_grad=False)
            tensor.done(0, tensor.size)

    def let_go(self, *_: Any) -> None:
        """Put back what has no data."""
        for module, name, parameter, _stored in self._places:
            module._parameters[name] = parameter

    @contextmanager
    def reading(self) -> Iterator[None]:
        """It has its data until the block ends."""
        self.read()
        try:
            yield
        finally:
            self.let_go()


def units_of(model: nn.Module, opened: OpenedCheckpoint) -> list[ReadUnit]:
    """The blocks, which are the modules of the outermost lists, and every other module with parameters in the file."""
    names, inside = _names(model, opened), set[nn.Module]()
    units = []
    for path, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, nn.ModuleList):
            for name, block in module.named_children():
                inside.update(block.modules())
                where = f"{path}.{name}" if path else name
                units.append(ReadUnit(block, where, names, opened, is_block=True))
        elif any(f"{path}.{name}".strip(".") in names for name in module._parameters):
            inside.update(module.modules())
            units.append(ReadUnit(module, path, names, opened, is_block=False))
    return units


def _names(model: nn.Module, opened: OpenedCheckpoint) -> Names:
    """Parameters without data by name → the name that they, or others that they are tied to, have in the file."""
    every = {name: one for name, one in model.named_parameters(remove_duplicate=False) if one.is_meta}
    stored: dict[int, str] = {}
    for name, parameter in every.items():
        if name in opened.tensors:
            stored.setdefault(id(parameter), name)
    return {name: stored[id(parameter)] for name, parameter in every.items() if id(parameter) in stored}

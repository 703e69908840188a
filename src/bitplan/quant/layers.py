"""The table of layer types that can be quantized, and how a module changes its class and gets it back.

A module keeps its object, its parameters and its names: `adopt_` only changes its class to a subclass of the one it
had, so `isinstance`, hooks, ties and state dictionaries hold. bitplan's own types are the files of
`quant/layer_types/`; anybody's are found by the same entry points (docs/extend.md, "A quantized layer type").
"""

from __future__ import annotations

import fnmatch
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.registry import LAYERS

WeightLayout = Literal["out_in", "in_out"]
"""How a weight lies: (out, in, …), or (in, out, …)."""


class Adopted(nn.Module):
    """A module whose class was changed for quantization; the original class is its second base."""

    while_adopted: ClassVar[tuple[str, ...]] = ()
    """Attributes that a module has no longer than this class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin, base = type(self).__bases__
        return _revive, (mixin, base), self.__getstate__()


@dataclass(frozen=True)
class Channels:
    """The axes of a weight that number output channels.

    With `groups` above 1 they are axes of the weight with its first axis split: (groups, rest of it, …).
    """

    axes: tuple[int, ...]
    groups: int = 1


class LayerType(ABC):
    """How modules of one type are quantized: a class registered in `bitplan.layers`, made without arguments.

    `modules` are the classes of which it knows the forward: a module is quantized by the nearest of them among its
    bases, as long as the forward that runs is still that one. `quantized` is the class whose forward then runs in its
    place, on quantized tensors; None where only the weights are described, and calls are quantized as they come.

    `weights` are the names of the parameters that are quantized, by shell wildcards. The quantizers of one called
    "weight" are the module's own `weight_quantizer` and `input_quantizer`; those of any other, such as the several of
    a recurrent layer, have these names in `call_quantizers[name]` (the name without a "_weight" at its end).
    """

    modules: ClassVar[tuple[type[nn.Module], ...]] = ()
    quantized: ClassVar[type[Adopted] | None] = None
    weights: ClassVar[str] = "weight"
    hands_out: ClassVar[tuple[str, ...]] = ()
    """Modules inside whose weights its forward gives to functions, instead of calling them."""
    layout: ClassVar[WeightLayout] = "out_in"
    float_input: ClassVar[bool] = True
    """False where the input is no float tensor, such as indices, so that only weights are quantized."""
    rounds_bias: ClassVar[bool] = False
    """True where the counterpart adds the module's `bias` by `on_grid` (`quant/scales.py`), and nothing else."""
    kind: ClassVar[str] = "layer of its own type"
    """What recipes for other tools call it: they know "linear", "embedding" and "(in, out) matrix"."""

    @abstractmethod
    def example(self) -> tuple[nn.Module, Tensor]:
        """A small module of this type, or one around it, and an input for it: for the contract tests."""

    def recognizes(self, module: nn.Module) -> bool:
        """Tell whether a module is of this type if its class cannot be named in `modules`."""
        return False

    def channels(self, module: nn.Module) -> Channels:
        """Return the axes of a weight of this module that number its output channels."""
        return Channels((0,) if self.layout == "out_in" else (1,))

    def captured(self, module: nn.Module, path: str) -> type[Adopted]:
        """Return the class whose forward is captured for a graph; it must give its quantizer every weight whole."""
        assert self.quantized is not None
        return self.quantized

    def integer(self, module: nn.Module, operands: Any) -> Any:
        """Return the kernel that computes such a module from integer values, or why there is none.

        `operands` has the codes and makes the kernels: `operands.linear()` (`bitplan.plugins.integer.kernels`).
        """
        return f"PyTorch has no integer kernel for {original_class(module).__name__}"

    def holds(self, parameter: str) -> bool:
        """Tell whether a parameter of such a module is one of the weights."""
        return fnmatch.fnmatchcase(parameter, self.weights)


def type_for_forward(module: nn.Module) -> LayerType | None:
    """Return the type that knows the forward which a module runs, or None if the module must run its own."""
    table, kind = _known_types(LAYERS.known), original_class(module)
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and base in table.by_class and base.forward is kind.forward:
            found = table.by_class[base]
            return found if found.quantized is not None else None
    return next((found for found in table.types if found.quantized is not None and found.recognizes(module)), None)


def type_for_class(module: nn.Module) -> LayerType | None:
    """Return the type that knows the layout of a module's weights, whichever forward it runs, or None."""
    table = _known_types(LAYERS.known)
    by_base = (table.by_class[base] for base in original_class(module).__mro__ if base in table.by_class)
    recognized = (found for found in table.types if found.recognizes(module))
    return next(by_base, None) or next(recognized, None)


def quantized_as(module: nn.Module, parameter: str | None) -> LayerType | None:
    """Return the type whose counterpart quantizes this parameter, or None if a function is given the parameter."""
    found = type_for_forward(module)
    return found if found is not None and parameter is not None and found.holds(parameter) else None


def channels_of(module: nn.Module, weight: Tensor) -> Channels | None:
    """Return the axes of a weight that number output channels, or None if it can have one scale only."""
    found = type_for_class(module)
    return None if found is None or weight.dim() < 2 else found.channels(module)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was adopted."""
    return type(module).__bases__[1] if isinstance(module, Adopted) else type(module)


def adopt_(module: nn.Module, mixin: type[Adopted]) -> None:
    """Make a module behave as `mixin` on top of the class it had."""
    module.__class__ = _merge_classes(mixin, type(module))  # type: ignore[arg-type]


def release_(module: nn.Module) -> None:
    """Give a module back the class it had."""
    for name in type(module).while_adopted if isinstance(module, Adopted) else ():
        vars(module).pop(name, None)
    module.__class__ = original_class(module)


@dataclass(frozen=True)
class _KnownTypes:
    """All types in the order of their names, and those that name classes by class."""

    types: tuple[LayerType, ...]
    by_class: dict[type, LayerType]


@cache
def _known_types(known: tuple[tuple[str, Any], ...]) -> _KnownTypes:
    """Return all registered types; they are built again when one was registered since."""
    names = [name for name, _ in known]
    if "linear" not in names:  # without its own types bitplan would take every module for one of an unknown type
        raise InputError("bitplan's own layer types are not installed (entry points bitplan.layers): pip install again")
    types = {name: _make_type(name) for name in names}
    by_class: dict[type, LayerType] = {}
    for name, found in types.items():
        for kind in found.modules:
            if kind in by_class:
                other = LAYERS.name_of(by_class[kind])
                raise InputError(f"the layer types {other!r} and {name!r} both quantize {kind.__name__}: keep one")
            by_class[kind] = found
    return _KnownTypes(tuple(types.values()), by_class)


def _make_type(name: str) -> LayerType:
    kind = LAYERS.get(name)
    if not (isinstance(kind, type) and issubclass(kind, LayerType)):
        raise InputError(f"the layer type {name!r} is not derived from bitplan.LayerType (docs/extend.md)")
    try:
        made: LayerType = kind()
    except TypeError as error:
        raise InputError(f"the layer type {name!r} cannot be made: {error}") from None
    return made


@cache
def _merge_classes(mixin: type[Adopted], base: type[nn.Module]) -> type[nn.Module]:
    @wraps(base.forward)  # whose arguments are what a batch or an exporter asks a model for
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    held: dict[str, Any] = {"__module__": __name__, "__doc__": mixin.__doc__}
    if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(mixin.forward).parameters.values()):
        held["forward"] = forward
    return type(f"Quantized{base.__name__}", (mixin, base), held)


def _revive(mixin: type[Adopted], base: type[nn.Module]) -> nn.Module:
    kind = _merge_classes(mixin, base)  # type: ignore[arg-type]
    return kind.__new__(kind)

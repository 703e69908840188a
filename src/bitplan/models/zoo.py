"""Models by name: bitplan's own, torchvision's, timm's (`timm/NAME`), or the user's (`package.module:factory`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitplan.adapters import timm, torchvision
from bitplan.core.errors import FileError, InputError, MissingExtra, UnknownName
from bitplan.core.parsing import first_line
from bitplan.core.registry import MODELS
from bitplan.core.trust import import_factory, names_code


def load_model(name: str, *, weightless: bool = False) -> tuple[nn.Module, Any]:
    """Build a model; return it with its example input, or None if the factory gives none.

    `weightless` builds it on the meta device if possible: for tracing, without time or memory.
    """
    made = _built(name, weightless)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned {type(model).__name__}, not a torch model (or a model and its example)")
    return model, example


def _built(name: str, weightless: bool) -> Any:
    """Call the factory of that name; its errors are reported with the name."""
    factory = find_factory(name)
    _check_needs_nothing(name, factory)
    try:
        return _on_meta(factory) if weightless else factory()
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a script that was written to be run ends with the latter
        cause = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
        raise InputError(f"{name} cannot be built, its code raised {cause}") from error


def _check_needs_nothing(name: str, factory: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of builtin code, which does not say
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]
    if needed:
        raise InputError(
            f"{name} needs the argument{'s' * (len(needed) > 1)} {', '.join(needed)}, and a factory is called without "
            f"any: write a function that calls it, def build(): return {name.rpartition(':')[2]}(…)"
        )


def model_names() -> list[str]:
    """Return every installed name that `load_model` knows (timm's have the prefix `timm/`)."""
    return list(dict.fromkeys([*MODELS, *network_names()]))


def find_factory(name: str) -> Callable[[], Any]:
    """Return the function that builds the model of that name."""
    if names_code(name):
        return import_factory(name)
    factory: Callable[[], Any] | None = MODELS.get(name) if name in MODELS else find_network(name)
    if factory is None:
        raise _unknown(name)
    return factory


def _unknown(name: str) -> InputError:
    hint = "A model of your own is written package.module:factory; `bitplan list models` shows the zoo"
    if any(mark in name for mark in "/\\.") and not name.startswith("timm/"):  # it looks like a path
        return FileError(f"there is no file or folder {name}. {hint}")
    missing = missing_libraries()
    if missing:
        hint = f"Those of {' and '.join(missing)} are not known here: pip install 'bitplan[vision]'. {hint}"
    return UnknownName("model", name, model_names(), hint)


def _on_meta(factory: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            return factory()
    except (NotImplementedError, RuntimeError):  # it reads numbers while it is built
        return factory()


Factory = Callable[[], Any]

# What torchvision's networks were made for, where it is not 224×224.
_SIZES = {"inception_v3": 299, "efficientnet_b1": 240, "efficientnet_b2": 288, "efficientnet_b3": 300}


# What the names of torchvision's networks begin with, so that one of them is known where torchvision is not there.
_FAMILIES = (
    "alexnet", "convnext", "densenet", "efficientnet", "googlenet", "inception", "maxvit", "mnasnet", "mobilenet",
    "regnet", "resnet", "resnext", "shufflenet", "squeezenet", "swin", "vgg", "vit_", "wide_resnet",
)  # fmt: skip


def network_names() -> list[str]:
    """Return every name of an installed library."""
    names: list[str] = []
    if torchvision.is_installed():
        names += torchvision.model_names()
    if timm.is_installed():
        names += [f"timm/{name}" for name in timm.model_names()]
    return names


def missing_libraries() -> list[str]:
    """Return the libraries that are not installed."""
    return [library.__name__.rpartition(".")[2] for library in (torchvision, timm) if not library.is_installed()]


def find_network(name: str) -> Factory | None:
    """Return the function that builds the network of that name with an example input, or None for an unknown name.

    Raises MissingExtra if the library of such names is not installed.
    """
    if name.startswith("timm/"):
        own = name.removeprefix("timm/")
        timm.timm(f"the model {name}")
        return (lambda: timm.build(own)) if own in timm.model_names() else None
    if name.startswith(_FAMILIES) and not torchvision.is_installed():
        raise MissingExtra("torchvision", "vision", f"the model {name}")
    if torchvision.is_installed() and name in torchvision.model_names():
        side = _SIZES.get(name, 224)
        return lambda: (torchvision.build(name), torch.empty(1, 3, side, side, device="meta"))
    return None

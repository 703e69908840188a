"""Networks of other libraries by name: torchvision's, and timm's as `timm/NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitplan.adapters import timm, torchvision
from bitplan.core.errors import MissingExtra

Factory = Callable[[], Any]

# What torchvision's networks were made for, where it is not 224×224.
_SIZES = {"inception_v3": 299, "efficientnet_b1": 240, "efficientnet_b2": 288, "efficientnet_b3": 300}


# What the names of torchvision's networks begin with, so that one of them is known where torchvision is not there.
_FAMILIES = (
    "alexnet", "convnext", "densenet", "efficientnet", "googlenet", "inception", "maxvit", "mnasnet", "mobilenet",
    "regnet", "resnet", "resnext", "shufflenet", "squeezenet", "swin", "vgg", "vit_", "wide_resnet",
)  # fmt: skip


def network_names() -> list[str]:
    """Every name that is installed."""
    names: list[str] = []
    if torchvision.installed():
        names += torchvision.model_names()
    if timm.installed():
        names += [f"timm/{name}" for name in timm.model_names()]
    return names


def missing_libraries() -> list[str]:
    """Those whose names are not known, since they are not installed."""
    return [library.__name__.rpartition(".")[2] for library in (torchvision, timm) if not library.installed()]


def find_network(name: str) -> Factory | None:
    """The function that builds the network of that name with an example input; None where there is none.

    Where the library is not installed that such a name is of, that is said.
    """
    if name.startswith("timm/"):
        own = name.removeprefix("timm/")
        timm.timm(f"the model {name}")
        return (lambda: timm.build(own)) if own in timm.model_names() else None
    if name.startswith(_FAMILIES) and not torchvision.installed():
        raise MissingExtra("torchvision", "vision", f"the model {name}")
    if torchvision.installed() and name in torchvision.model_names():
        side = _SIZES.get(name, 224)
        return lambda: (torchvision.build(name), torch.empty(1, 3, side, side, device="meta"))
    return None

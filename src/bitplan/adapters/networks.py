"""Networks of other libraries by name: torchvision's, and timm's as `timm/NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitplan.adapters import timm, torchvision

Factory = Callable[[], Any]

# What torchvision's networks were made for, where it is not 224×224.
_SIZES = {"inception_v3": 299, "efficientnet_b1": 240, "efficientnet_b2": 288, "efficientnet_b3": 300}


def network_names() -> list[str]:
    """Every name that is installed."""
    names: list[str] = []
    if torchvision.installed():
        names += torchvision.model_names()
    if timm.installed():
        names += [f"timm/{name}" for name in timm.model_names()]
    return names


def find_network(name: str) -> Factory | None:
    """The function that builds the network of that name with an example input; None where there is none."""
    if name.startswith("timm/"):
        own = name.removeprefix("timm/")
        if timm.installed() and own not in timm.model_names():
            return None
        return lambda: timm.build(own)  # says what to install where timm is missing
    if torchvision.installed() and name in torchvision.model_names():
        side = _SIZES.get(name, 224)
        return lambda: (torchvision.build(name), torch.empty(1, 3, side, side, device="meta"))
    return None

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
    names = torchvision.model_names() if torchvision.installed() else []
    return names + [f"timm/{name}" for name in (timm.model_names() if timm.installed() else [])]


def find_network(name: str) -> Factory | None:
    """The function that builds the network of that name with an example input; None where there is none."""
    if name.startswith("timm/"):
        own = name.removeprefix("timm/")
        known = not timm.installed() or own in timm.model_names()  # building it says what to install
        return (lambda: timm.build(own)) if known else None
    if torchvision.installed() and name in torchvision.model_names():
        side = _SIZES.get(name, 224)
        return lambda: (torchvision.build(name), torch.empty(1, 3, side, side, device="meta"))
    return None

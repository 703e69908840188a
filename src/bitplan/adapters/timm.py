"""timm's models, built without weights."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType

import torch

from bitplan.adapters.torchvision import torchvision
from bitplan.core.errors import MissingExtra


def installed() -> bool:
    """Tell whether timm is there, without importing it."""
    return importlib.util.find_spec("timm") is not None


def _timm() -> ModuleType:
    if not installed():
        raise MissingExtra("timm", "vision", "a model named timm/…")
    torchvision()  # timm imports it, and it may need help
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm
    return timm


def model_names() -> list[str]:
    """Names of timm's models."""
    names: list[str] = _timm().list_models()
    return names


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model by timm's name, and an example of the input it is made for."""
    model = _timm().create_model(name, pretrained=False)
    return model, torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")

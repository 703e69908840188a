"""timm's models, built without weights, and its LAMB."""

from __future__ import annotations

import importlib.util
import warnings
from types import ModuleType
from typing import Any

import torch

from bitplan.adapters.torchvision import torchvision
from bitplan.core.errors import MissingExtra


def is_installed() -> bool:
    """Tell whether timm is there, without importing it."""
    return importlib.util.find_spec("timm") is not None


def timm(purpose: str = "a model named timm/…") -> ModuleType:
    """Import timm, or say what to install."""
    if not is_installed():
        raise MissingExtra("timm", "vision", purpose)
    torchvision()  # timm imports it, and it may need help
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import timm as module
        import timm.optim
    return module


def model_names() -> list[str]:
    """Names of timm's models."""
    names: list[str] = timm().list_models()
    return names


def build(name: str, **options: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model by timm's name, and an example of the input it is made for."""
    model = timm().create_model(name, pretrained=False, **options)
    return model, torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")


def lamb(groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    """LAMB (You et al. 2020, algorithm 2), without the clipping of gradients that timm adds by default."""
    optimizer: torch.optim.Optimizer = timm("the optimizer lamb").optim.Lamb(groups, lr=lr, max_grad_norm=None)
    return optimizer

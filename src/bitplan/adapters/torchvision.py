"""torchvision, also where its compiled operators do not load."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch

from bitplan.core.errors import MissingExtra
from bitplan.core.worker_payload import BEFORE_WORK

# torchvision's Python code refers to these two when it is imported; its library defines them. Where that library
# does not load (a CPU-only torch under a CUDA build of torchvision), declaring them makes all else work.
_SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def is_installed() -> bool:
    """Tell whether torchvision is there, without importing it."""
    return importlib.util.find_spec("torchvision") is not None


@cache
def torchvision(purpose: str = "this model") -> ModuleType:
    """Import torchvision; the operators it lacks are declared only when the plain import fails."""
    if not is_installed():
        raise MissingExtra("torchvision", "vision", purpose)
    try:
        import torchvision as module
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        module = _import_with_declared_operators()
    return module


def _import_with_declared_operators() -> ModuleType:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name, schema in _SCHEMAS.items():
        torch.library.define(name, schema)
    import torchvision as module

    BEFORE_WORK.append(torchvision)  # networks of libraries that import it are unpickled elsewhere

    return module


def model_names() -> list[str]:
    """Names of the classification networks."""
    models = torchvision().models
    names: list[str] = models.list_models(module=models)
    return names


def build(name: str, **options: Any) -> torch.nn.Module:
    """A classification network by torchvision's name, without pretrained weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # on how GoogLeNet and Inception are initialized
        model: torch.nn.Module = torchvision().models.get_model(name, weights=None, **options)
    return model

"""torch: what several folders do with modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Every module of these models is in the mode it was, training or inference, when the block ends."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """The model in inference mode until the block ends."""
    with modes_kept(model):
        model.eval()
        yield


def device_of(model: nn.Module) -> torch.device:
    """Where a model is; one without parameters is on the CPU."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

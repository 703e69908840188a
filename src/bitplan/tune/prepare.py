"""What holds while a model is trained and is undone afterwards: modes, memory layout, random numbers, the device."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from bitplan.adapters.torch import modes_kept, multiplies_bf16, usable_device

_DEVICE = "ACCELERATE_TORCH_DEVICE"  # what accelerate asks
_log = logging.getLogger(__name__)


@cache
def warn_of_slow_products(precision: str, device: torch.device) -> None:
    """Say, once in a process, that a recipe's precision makes its training slower on this processor and not faster."""
    if precision == "bf16" and not multiplies_bf16(device):
        _log.warning(
            "this processor has no products of bfloat16, and trains longer by precision = bf16 than without, 2.2 "
            "to 2.4 times as long on the one that we measured: leave it out here"
        )


@contextmanager
def training_on(name: str | None) -> Iterator[None]:
    """The device that accelerate takes where this process trains for the first time; its own choice unless said."""
    if name is None:
        yield
        return
    before = os.environ.get(_DEVICE)
    os.environ[_DEVICE] = str(usable_device(name))
    try:
        yield
    finally:
        os.environ.pop(_DEVICE)
        if before is not None:
            os.environ[_DEVICE] = before


@contextmanager
def modes(model: nn.Module, teacher: nn.Module | None) -> Iterator[None]:
    """The model in training mode, its teacher in inference mode, until the block ends."""
    with modes_kept(model, *([] if teacher is None else [teacher])):
        model.train()
        if teacher is not None:
            teacher.eval()
        yield


@contextmanager
def layout(model: nn.Module, teacher: nn.Module | None, *, wanted: bool, device: torch.device) -> Iterator[None]:
    """Weights of convolutions as channels_last on a CPU: the images between layers follow them."""
    both = [one for one in (model, teacher) if one is not None and wanted and device.type == "cpu" and _convolves(one)]
    for one in both:
        one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        for one in both:
            one.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Algorithms that repeat, and random numbers that are the caller's again when the block ends."""
    backend = torch.backends.cudnn
    before = backend.deterministic, backend.benchmark
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            backend.deterministic, backend.benchmark = True, False
        try:
            yield
        finally:
            if device.type == "cuda":
                backend.deterministic, backend.benchmark = before


def _convolves(model: nn.Module) -> bool:
    """Whether there are images to lay out, none laid out so already."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    return bool(weights) and all(weight.is_contiguous() for weight in weights)


def mixed(*parts: object) -> int:
    """A seed of 31 bits that depends on all parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def seed_(seed: int, device: torch.device) -> None:
    """Seed dropout and the like; per step, so that no generator's state needs to be kept for a resumed run."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)

"""SAQ's sharpness step: train for the loss where quantized weights, moved a little, make it worst.

ε = ρ·g/‖g‖ with g = ∂L/∂ŵ over all quantized weights ŵ together, and the gradient that trains is that of L(ŵ + ε) (Liu
et al. 2021, Sharpness-aware quantization; as in ziplab/SAQ, ρ 0.3 to 0.4). It costs a second pass forward and back.
Every process of a training, and every piece of a batch, moves by its own gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.quant.quantizers import WeightQuantizer

Batchnorm = nn.modules.batchnorm._BatchNorm


def check_sharpness(model: nn.Module, radius: float) -> None:
    """Refuse a radius where nothing is quantized."""
    if radius and not any(isinstance(module, WeightQuantizer) for module in model.modules()):
        raise InputError(
            f"the recipe's sharpness ({radius:g}) moves quantized weights, and this model has none: quantize it first, "
            "or set sharpness to 0"
        )


@contextmanager
def noted(model: nn.Module, radius: float) -> Iterator[list[Tensor]]:
    """What the quantizers of weights make in the forward pass of this block, by call; nothing without a radius."""
    made: list[Tensor] = []

    def note(_: nn.Module, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            made.append(out)

    with _hooked(model if radius else None, note):
        yield made


def at_the_worst(
    model: nn.Module, radius: float, loss: Tensor, made: Sequence[Tensor], again: Callable[[], Tensor]
) -> Tensor:
    """The loss of the same pass once more, its quantized weights moved by `radius` to where the loss grows fastest."""
    slopes = torch.autograd.grad(loss, made, allow_unused=True)
    known = [slope for slope in slopes if slope is not None]
    norm = torch.stack([slope.float().norm() for slope in known]).norm() if known else torch.zeros(())
    scale = radius / norm.clamp_min(torch.finfo(torch.float32).tiny)
    moves = deque(None if slope is None else (slope * scale).to(slope.dtype) for slope in slopes)

    def move(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        change = moves.popleft() if out.requires_grad else None
        return out if change is None else out + change

    with _hooked(model, move), _statistics_kept(model):
        return again()


@contextmanager
def _hooked(model: nn.Module | None, hook: Callable[..., Any]) -> Iterator[None]:
    quantizers = [] if model is None else [one for one in model.modules() if isinstance(one, WeightQuantizer)]
    handles = [quantizer.register_forward_hook(hook) for quantizer in quantizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Running statistics stay as the pass with the weights as they are left them."""
    norms = [one for one in model.modules() if isinstance(one, Batchnorm) and one.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if count is not None and norm.training:
                count.sub_(1)

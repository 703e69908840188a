"""The optimizer of a recipe, and its learning rate at any step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bitplan.adapters import timm
from bitplan.core.errors import InputError
from bitplan.core.trials import Recipe
from bitplan.quant.blend import SHARES
from bitplan.quant.parameters import parameter_groups

_TINY = 1e-30  # instead of 0 / 0
POLY_POWER = 0.9  # as for PSPNet
SMALLEST = 1e-3
"""The root mean square that a weight is taken to have at least where moves are limited."""

_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "poly": lambda t: (1 - t) ** POLY_POWER,
    "linear": lambda t: 1 - t,
    "constant": lambda t: 1.0,
}


def rate(recipe: Recipe, step: int, total: int) -> float:
    """Return the learning rate of step 0 … total − 1: a straight line up to `lr`, then the schedule down towards 0."""
    warm = round(recipe.warmup * total)
    if step < warm:
        return recipe.lr * (step + 1) / (warm + 1)
    return recipe.lr * _SHAPES[recipe.schedule]((step - warm) / (total - warm))


def set_rate_(optimizer: torch.optim.Optimizer, recipe: Recipe, lr: float) -> None:
    """Give every parameter group its rate: LSQ's steps the recipe's multiple."""
    for group in optimizer.param_groups:
        group["lr"] = lr * recipe.step_lr if group["name"] == "steps" else lr


@contextmanager
def limit_moves(optimizer: torch.optim.Optimizer, share: float) -> Iterator[None]:
    """Limit the move of each weight and each step inside this block to a share of its own size; 0 is no limit.

    A network with batch normalization computes the same whatever the size of its weights, but a fixed rate moves small
    ones further. Vectors may be zero, and move freely.
    """
    moved = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if share and (group["name"] == "steps" or parameter.dim() > 1)
    ]
    before = [parameter.detach().clone() for parameter in moved]
    yield
    with torch.no_grad():
        for parameter, was in zip(moved, before, strict=True):
            move = parameter - was
            least = SMALLEST * math.sqrt(was.numel()) if parameter.dim() > 1 else 0.0  # where all are zero
            most = share * was.norm().clamp_min(least)
            parameter.copy_(was + move * (most / move.norm().clamp_min(_TINY)).clamp_max(1.0))


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer over everything that is not frozen; steps never decay; shares of choices are left out."""
    every = parameter_groups(
        model,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        step_lr=recipe.lr * recipe.step_lr,
        decay_vectors=recipe.decay_vectors,
    )
    groups = [group for group in every if group["name"] != SHARES]
    if not groups:
        raise InputError("the model has nothing to train: every parameter is frozen (requires_grad is False)")
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr)
    for group in groups:  # timm ties the trust ratio to weight decay; LAMB itself does not
        group["always_adapt"] = group["name"] == "weights"
    return timm.lamb(groups, lr=recipe.lr)

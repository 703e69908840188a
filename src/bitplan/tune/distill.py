"""The training loss: the task's own, mixed with what a teacher says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.trials import Recipe
from bitplan.tasks.base import Batch, Task

Logits = tuple[Tensor, ...]


def divergence(student: Logits, teacher: Logits, temperature: float) -> Tensor:
    """T²·KL(teacher ‖ student) of softened class scores (B, classes, …), a mean over all else and over the tuple.

    Hinton et al. 2015, section 2: T² keeps the size of the gradient independent of the temperature.
    """
    means = []
    for own, taught in zip(student, teacher, strict=True):
        log_p = F.log_softmax(taught / temperature, dim=1)  # (B, classes, …)
        log_q = F.log_softmax(own / temperature, dim=1)
        divergences = (log_p.exp() * (log_p - log_q)).sum(dim=1)  # (B, …)
        means.append(divergences.mean())
    return temperature**2 * torch.stack(means).mean()


def check_teacher(model: nn.Module, teacher: nn.Module | None, recipe: Recipe) -> None:
    """Refuse a teacher without a part in the recipe, and the reverse."""
    if teacher is None and recipe.distill:
        raise InputError(
            f"the recipe distills (distill = {recipe.distill:g}) but there is no teacher: give one, --teacher "
            "(in Python: teacher=…)"
        )
    if teacher is not None and not recipe.distill:
        raise InputError("there is a teacher but the recipe does not distill: set distill above 0, or pass no teacher")
    if teacher is model:
        raise InputError("the model cannot be its own teacher: pass a copy of it as it was (copy.deepcopy)")


def objective(task: Task, outputs: Any, batch: Batch, teacher: nn.Module | None, recipe: Recipe) -> Tensor:
    """(1 − distill)·loss + distill·divergence from the teacher."""
    if teacher is None:
        return task.loss(outputs, batch)
    with torch.no_grad():
        taught = task.logits(task.forward(teacher, batch))
    own = task.logits(outputs)
    _check_shapes(own, taught)
    soft = recipe.distill * divergence(own, taught, recipe.temperature)
    if recipe.distill == 1:
        return soft
    return (1 - recipe.distill) * task.loss(outputs, batch) + soft


def _check_shapes(student: Logits, teacher: Logits) -> None:
    own, taught = _shapes(student), _shapes(teacher)
    if own != taught:
        raise InputError(
            f"the teacher has other classes: its scores are {taught}, the model's {own}; "
            "take a teacher that was made for the same task"
        )


def _shapes(logits: Logits) -> str:
    return " and ".join(str(tuple(scores.shape)) for scores in logits)

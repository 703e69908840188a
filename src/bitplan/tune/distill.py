"""The training loss: the task's own, mixed with what a teacher says."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.adapters.torch import widened
from bitplan.core.errors import InputError
from bitplan.core.trials import TAUGHT, Recipe
from bitplan.tasks.base import Batch, Task
from bitplan.tune.states import States, difference, watched

Logits = tuple[Tensor, ...]


def divergence(student: Logits, teacher: Logits, temperature: float) -> Tensor:
    """T²·KL(teacher ‖ student) of softened class scores (B, classes, …), a mean over all else and over the tuple.

    Hinton et al. 2015, section 2: T² keeps the size of the gradient independent of the temperature.
    """
    means = []
    for own, taught in zip(student, teacher, strict=True):
        dim, own, taught = 1, widened(own), widened(taught)
        if own.dim() > 2 and own.stride(1) == 1:  # classes lie side by side, as words do: faster as the last axis
            dim, own, taught = -1, own.movedim(1, -1), taught.movedim(1, -1)
        log_p = F.log_softmax(taught / temperature, dim=dim)  # (B, classes, …)
        log_q = F.log_softmax(own / temperature, dim=dim)
        divergences = (log_p.exp() * (log_p - log_q)).sum(dim=dim)  # (B, …)
        means.append(divergences.mean())
    return temperature**2 * torch.stack(means).mean()


def check_teacher(model: nn.Module, teacher: nn.Module | None, recipe: Recipe) -> None:
    """Refuse a teacher without a part in the recipe, and the reverse."""
    if teacher is None and recipe.distills:
        told = next((name, getattr(stage, name)) for stage in recipe.stages for name in TAUGHT if getattr(stage, name))
        raise InputError(
            f"the recipe distills ({told[0]} = {told[1]:g}) but there is no teacher: give one, --recipe teacher=NAME "
            "(in Python: teacher=…)"
        )
    if teacher is not None and not recipe.distills:
        raise InputError("there is a teacher but the recipe does not distill: set distill above 0, or pass no teacher")
    if teacher is model:
        raise InputError("the model cannot be its own teacher: pass a copy of it as it was (copy.deepcopy)")


def objective(
    task: Task, outputs: Any, batch: Batch, teacher: nn.Module | None, recipe: Recipe, states: States | None = None
) -> Tensor:
    """(1 − distill)·loss + distill·divergence from the teacher, and how far `states` are from the teacher's.

    The gradient of the divergence is that of soft cross-entropy, which differs from it by what only the teacher says.
    """
    if teacher is None:
        return task.loss(outputs, batch)
    with torch.no_grad(), watched(teacher, recipe) as theirs:
        answers = task.forward(teacher, batch)
    if recipe.distill:
        taught, own = task.logits(answers), task.logits(outputs)
        _check_shapes(own, taught)
        loss = recipe.distill * divergence(own, taught, recipe.temperature)
    else:
        loss = task.loss(outputs, batch)
    if 0 < recipe.distill < 1:
        loss = (1 - recipe.distill) * task.loss(outputs, batch) + loss
    own_states = states or States()
    if recipe.distill_hidden:
        apart = difference(own_states.hidden, theirs.hidden, "hidden states", "distill_hidden")
        loss = loss + recipe.distill_hidden * apart
    if recipe.distill_attention:
        apart = difference(own_states.scores, theirs.scores, "attention scores", "distill_attention")
        loss = loss + recipe.distill_attention * apart
    return loss


def _check_shapes(student: Logits, teacher: Logits) -> None:
    own, taught = _shapes(student), _shapes(teacher)
    if own != taught:
        raise InputError(
            f"the teacher has other classes: its scores are {taught}, the model's {own}; "
            "take a teacher that was made for the same task"
        )


def _shapes(logits: Logits) -> str:
    return " and ".join(str(tuple(scores.shape)) for scores in logits)

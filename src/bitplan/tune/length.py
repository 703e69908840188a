"""The length of a training: its steps, their batches, and how these are shared by processes."""

from __future__ import annotations

from dataclasses import dataclass

from bitplan.core.errors import InputError
from bitplan.core.trials import Recipe
from bitplan.tasks.base import Task


@dataclass(frozen=True)
class Pace:
    """The number of steps in all and in an epoch, and the number of samples that one process sees at once."""

    total: int
    per_epoch: int
    piece: int
    processes: int


def steps_of(task: Task, recipe: Recipe) -> int:
    """Return how many steps a training by this recipe takes, in one process and over all stages."""
    return sum(_total(task, stage) for stage in recipe.stages)


def samples_of(task: Task, recipe: Recipe) -> int:
    """Return how many samples a training sees; a sample that is seen again is counted again."""
    return sum(_total(task, stage) * stage.batch_size for stage in recipe.stages)


def _total(task: Task, stage: Recipe) -> int:
    return pace_of(parts_of(task, stage)[0], stage, 1).total


def parts_of(task: Task, recipe: Recipe) -> tuple[Task, Task | None]:
    """Return the task to train on, and the task that scores the held-out part of it."""
    return task.hold_out(recipe.held_out) if recipe.held_out else (task, None)


def pace_of(task: Task, recipe: Recipe, processes: int) -> Pace:
    """Return the pace of a recipe of one stage; raise InputError if the batches cannot be shared."""
    samples = task.size("train")
    if samples < 1:
        raise InputError(f"the training split of task {task.name} is empty: there is nothing to train on")
    if recipe.batch_size > samples:
        raise InputError(
            f"batch_size {recipe.batch_size} is more than the {samples} training samples of task {task.name}: "
            f"lower it to {samples} or less"
        )
    piece, rest = divmod(recipe.batch_size, recipe.accumulate * processes)
    shared_evenly = piece > 0 and rest == 0
    if not shared_evenly:
        raise InputError(
            f"batch_size {recipe.batch_size} cannot be shared by {processes} processes in {recipe.accumulate} pieces "
            f"each: make it a multiple of {recipe.accumulate * processes}"
        )
    per_epoch = samples // recipe.batch_size
    total = recipe.steps or max(1, round((recipe.epochs or 0) * per_epoch))
    return Pace(total, per_epoch, piece, processes)

"""Fine-tune copies of a network with some groups lowered: one job each, the same batches for all.

`Tuner.of(…)` checks everything first; `job` describes one training, `run` does those that are not in the store yet,
and `expected` tells beforehand how long they will take.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Drifts, Losses, Lowered, OutputErrors, Slopes, Tuned
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.core.trials import Recipe, Run
from bitplan.gains.base import Context
from bitplan.gains.lowering import By, check_task, check_top, finish, layers_of, lower, options_of_task, try_task
from bitplan.tasks.base import Task, draw, judged_by, measure_, samples_in, samples_per_epoch
from bitplan.tune.distillation import check_teacher
from bitplan.tune.length import samples_of, steps_of
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import evaluate, finetune_
from bitplan.tune.resume import describe_run

_TIMED = 4  # steps that are measured to tell how long all will take; the first one is slower and left out


@dataclass(frozen=True)
class Expected:
    """What a method is going to do: its jobs, how many are in the store already, and what is left to spend.

    `seconds` are those of one worker on this machine, by a few steps that were measured; `called` are its jobs.
    """

    jobs: int
    done: int
    steps: int
    samples: int
    seconds: float
    called: str = "trainings"

    def __str__(self) -> str:
        clock = f"{self.seconds / 60:.0f} minutes" if self.seconds > 90 else f"{self.seconds:.0f} seconds"
        done = f"{self.jobs:,} {self.called} ({self.done:,} of them done)"
        return f"{done}, {self.samples:,} samples left: about {clock} of one worker"


@dataclass(frozen=True)
class Finetune:
    """The work of one job: lower a copy of the network, train it, say how that went."""

    model: nn.Module
    task: Task
    teacher: nn.Module | None = None

    def __call__(self, job: Lowered) -> Tuned:
        """Train by the job's own recipe and seed."""
        start = time.perf_counter()
        model = lower(self.model, job.layers)
        log = finetune_(model, self.task, job.run.recipe, teacher=self.teacher, seed=job.run.seed)
        charge(Spend(trainings=1, evaluations=1))
        steps = len(log.lines)
        return Tuned(
            **self._measured(model, log, job.run.recipe.batch_size),
            score=evaluate(model, self.task) if job.scored else None,
            steps=steps,
            samples=samples_of(self.task, job.run.recipe),
            seconds=time.perf_counter() - start,
        )

    def _measured(self, model: nn.Module, log: TrainLog, batch_size: int) -> dict[str, Any]:
        """How training went, or how good its network is on what was held out, where samples were."""
        if judged_by(self.task) == "test":
            loss, score = held_out_measures(model, self.task, batch_size)
            return {"mean_loss": loss, "mean_score": score, "last_loss": loss, "last_score": score}
        last_tenth = TrainLog(log.lines[-math.ceil(len(log.lines) / 10) :], log.complete)
        return {
            "mean_loss": log.mean_loss,
            "mean_score": log.mean_score if math.isfinite(log.mean_score) else None,
            "last_loss": last_tenth.mean_loss,
            "last_score": last_tenth.mean_score if math.isfinite(last_tenth.mean_score) else None,
        }


def held_out_measures(model: nn.Module, task: Task, batch_size: int) -> tuple[float, float | None]:
    """The loss and the score of all samples that were held out; no score where a batch has none."""
    count = task.size("test")
    whole = draw(model, task, -(-count // batch_size), batch_size, None, "test")
    sizes = [samples_in(batch) for batch in whole]
    losses, scores = measure_(model, task, whole)
    return _weighed(losses, sizes), None if scores is None else _weighed(scores, sizes)


def _weighed(values: Sequence[float], sizes: Sequence[int]) -> float:
    return math.fsum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


@dataclass(frozen=True)
class Tuner:
    """Where all jobs of a method start: a network, a task, and a recipe, all of them checked."""

    method: str
    graph: Graph
    context: Context
    work: Finetune
    run_of_all: Run
    task_options: Mapping[str, str]

    @classmethod
    def of(
        cls, method: str, model: Any, graph: Graph, choices: Sequence[Precision], context: Context, recipe: Recipe,
        *, by: By = "loss",
    ) -> Tuner:  # fmt: skip
        """Check model, task and recipe; what cannot work is one clear line, before anything is trained."""
        task = check_task(context.task, method, "fine-tunes")
        check_top(model, graph, choices, method)
        later = not recipe.distills and context.recipe is not None and context.recipe.distills
        teacher = None if later else context.teacher  # only a stage that is left out here has a use for it
        check_teacher(model, teacher, recipe)
        steps_of(task, recipe)
        try_task(lower(model, {}), task, by, method)
        run = describe_run(model, task, recipe, teacher, context.seed)
        return cls(method, graph, context, Finetune(model, task, teacher), run, options_of_task(task))

    def job(
        self, lowered: Mapping[str, Precision], *, seed: int = 0, steps: int | None = None, scored: bool = False
    ) -> Lowered:
        """The training with these groups lowered; `seed` counts from the context's, `steps` replaces the length."""
        run = self.run_of_all
        recipe = run.recipe if steps is None else shortened(run.recipe, steps=steps)
        return Lowered(
            groups=tuple(group.name for group in self.graph.selectable if group.name in lowered),
            layers=layers_of(self.graph, lowered),
            run=run.model_copy(update={"recipe": recipe, "seed": self.context.seed + seed}),
            task_options=dict(self.task_options),
            scored=scored,
        )

    def run(self, jobs: Sequence[Lowered]) -> list[Tuned]:
        """Train what is not in the store yet, on the context's engine; outcomes in the order of the jobs."""
        done = finish(self.work, jobs, Tuned, self.context, self.method)
        return [done[job.id] for job in jobs]

    def expected(self, jobs: Sequence[Lowered]) -> Expected:
        """How much there is to do, by measuring a few steps of the first job that is not done."""
        by_id = {job.id: job for job in jobs}  # a training that is asked for twice is done once
        shelf = self.context.shelf
        done = set() if shelf is None else shelf.ids()
        left = [job for name, job in by_id.items() if name not in done]
        steps = sum(steps_of(self.work.task, job.run.recipe) for job in left)
        samples = sum(samples_of(self.work.task, job.run.recipe) for job in left)
        seconds = steps * self._seconds_per_step(left[0]) if left else 0.0
        return Expected(len(by_id), len(by_id) - len(left), steps, samples, seconds)

    def _seconds_per_step(self, job: Lowered) -> float:
        """The median of a few steps after the first."""
        steps = iter(range(_TIMED))
        log = finetune_(
            lower(self.work.model, job.layers), self.work.task, job.run.recipe, teacher=self.work.teacher,
            seed=job.run.seed, stop=lambda: next(steps, None) is None,
        )  # fmt: skip
        since_start = [line.seconds for line in log.lines]
        each = [later - earlier for earlier, later in pairwise(since_start)]
        return statistics.median(each or since_start)  # a training of one step has only the first


def shortened(
    recipe: Recipe, *, epochs: float | None = None, steps: int | None = None, lr_factor: float = 1.0
) -> Recipe:
    """The same recipe for another length, always of one stage; schedule and warmup span the new one."""
    return Recipe(**(dict(recipe) | {"epochs": epochs, "steps": steps, "lr": recipe.lr * lr_factor, "then": None}))


def recipe_for(method: str, context: Context, *, epochs: float | None, steps: int | None, lr_factor: float) -> Recipe:
    """The recipe of a method's trainings: the context's, shortened; one epoch unless a length is given."""
    check_task(context.task, method, "fine-tunes")
    if context.recipe is None:
        raise InputError(
            f"{method} fine-tunes by the recipe that the network was trained with: give it, --recipe "
            "(in Python: Context(recipe=Recipe(epochs=1, lr=0.01)))"
        )
    if epochs is None and steps is None:
        epochs = 1.0
    return shortened(context.recipe, epochs=epochs, steps=steps, lr_factor=lr_factor)


def check_length(method: str, epochs: float | None, steps: int | None, lr_factor: float) -> None:
    """Refuse a length given twice, and what is not above 0."""
    if epochs is not None and steps is not None:
        raise InputError(f"{method}: give the length of a fine-tuning once, as epochs or as steps")
    for name, value in (("epochs", epochs), ("steps", steps), ("lr_factor", lr_factor)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{method}: {name} must be above 0, not {value}")


def seconds_of(outcomes: Iterable[Tuned | Losses | Drifts | Slopes | OutputErrors]) -> float:
    """What jobs took together."""
    return math.fsum(outcome.seconds for outcome in outcomes)


def counts_of(outcomes: Sequence[Tuned], task: Task) -> dict[str, int]:
    """What was spent: trainings, their steps and samples, and how many samples an epoch of the task has."""
    return {
        "trainings": len(outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "samples": sum(outcome.samples for outcome in outcomes),
        "samples_per_epoch": samples_per_epoch(task),
    }

"""Fine-tune copies of a network with some groups lowered: one job each, the same batches for all.

`Tuner.of(…)` checks everything first; `job` describes one training, `run` does those that are not in the store yet.
`Trainings` are jobs that are still to be done, and estimate their time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.core.trials import Recipe
from bitplan.gains.base import Context
from bitplan.gains.jobs import do_jobs, options_of_task, with_lowered
from bitplan.gains.lowering import By, check_task, check_top, lower, try_task
from bitplan.tasks.base import Task, draw, measure_, measuring_split, samples_in, samples_per_epoch
from bitplan.tune.distillation import check_teacher
from bitplan.tune.length import samples_of, steps_of
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import evaluate, finetune_
from bitplan.tune.resume import describe_run

_TIMED = 4  # steps that are timed to estimate the time of all; the first one is slower and left out


@dataclass(frozen=True)
class TimeEstimate:
    """How many trainings there are, how many are done, and the steps, samples and seconds that are left.

    `seconds` are those of one worker on this machine: the time of one step × the steps.
    """

    jobs: int
    done: int
    steps: int
    samples: int
    seconds: float

    def __str__(self) -> str:
        clock = f"{self.seconds / 60:.0f} minutes" if self.seconds > 90 else f"{self.seconds:.0f} seconds"
        done = f"{self.jobs:,} trainings ({self.done:,} of them done)"
        return f"{done}, {self.samples:,} samples left: about {clock} of one worker"


@dataclass(frozen=True)
class Finetune:
    """Lower a copy of the network for a job, train it, and return how that went.

    `mean_loss` and `mean_score` are means over all steps, `last_loss` and `last_score` over the last tenth. If samples
    are held out, all of them are measured on those after training. `score` is that on the test split, if the job asks
    for it. Scores are left out if the task has none for a batch.
    """

    model: nn.Module
    task: Task
    teacher: nn.Module | None = None

    def __call__(self, job: Job) -> Numbers:
        """Train by the job's own recipe and seed."""
        model, recipe = lower(self.model, job.layers), recipe_of(job)
        log = finetune_(model, self.task, recipe, teacher=self.teacher, seed=job.seed)
        charge(Spend(trainings=1, evaluations=1))
        measures = self._measure(model, log, recipe.batch_size)
        measures |= {"steps": len(log.lines), "samples": samples_of(self.task, recipe)}
        if job.option("scored"):
            measures["score"] = evaluate(model, self.task)
        return {name: (value,) for name, value in measures.items() if value is not None}

    def _measure(self, model: nn.Module, log: TrainLog, batch_size: int) -> dict[str, float | None]:
        """Return how training went, or how good the network is on the samples that were held out."""
        if measuring_split(self.task) == "test":
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
    """Return the loss and the score of all held-out samples; the score is None if a batch has none."""
    count = task.size("test")
    batches = draw(model, task, -(-count // batch_size), batch_size, None, "test")
    sizes = [samples_in(batch) for batch in batches]
    losses, scores = measure_(model, task, batches)
    return _weighted_mean(losses, sizes), None if scores is None else _weighted_mean(scores, sizes)


def _weighted_mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    return math.fsum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


@dataclass(frozen=True)
class Tuner:
    """The start of all trainings of a method: a network, a task and a recipe, all of them checked.

    `first` is the training of the network as it is: jobs are like it.
    """

    method: str
    graph: Graph
    context: Context
    work: Finetune
    first: Job

    @classmethod
    def of(
        cls, method: str, model: Any, graph: Graph, choices: Sequence[Precision], context: Context, recipe: Recipe,
        *, by: By = "loss",
    ) -> Tuner:  # fmt: skip
        """Check model, task and recipe, so that errors come before anything is trained."""
        task = check_task(context.task, method, "fine-tunes")
        check_top(model, graph, choices, method)
        only_later = not recipe.distills and context.recipe is not None and context.recipe.distills
        teacher = None if only_later else context.teacher  # only a stage that is left out here has a use for it
        check_teacher(model, teacher, recipe)
        steps_of(task, recipe)
        try_task(lower(model, {}), task, by, method)
        run = describe_run(model, task, recipe, teacher, context.seed)
        first = Job(
            work="finetune", network=run.network, weights=run.weights, teacher=run.teacher, task=run.task,
            task_options=options_of_task(task), recipe=recipe, seed=run.seed, options={"scored": False},
        )  # fmt: skip
        return cls(method, graph, context, Finetune(model, task, teacher), first)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the trainings."""
        return recipe_of(self.first)

    def job(
        self, lowered: Mapping[str, Precision], *, seed: int = 0, steps: int | None = None, scored: bool = False
    ) -> Job:
        """Return the training with these groups lowered; `seed` counts from the context's, `steps` is its length."""
        changes = {
            "recipe": self.recipe if steps is None else shorten(self.recipe, steps=steps),
            "seed": self.first.seed + seed,
            "options": {"scored": scored},
        }
        in_order = {group.name: lowered[group.name] for group in self.graph.selectable if group.name in lowered}
        return with_lowered(self.first.model_copy(update=changes), self.graph, in_order)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Do the trainings that are not in the store yet; return outcomes in the order of the jobs."""
        done = do_jobs(self.work, jobs, self.context, self.method)
        return [done[job.id] for job in jobs]


@dataclass(frozen=True)
class Trainings:
    """The trainings that a method is going to do."""

    tuner: Tuner
    jobs: Sequence[Job]

    def estimate_time(self) -> TimeEstimate:
        """Estimate the time of the trainings that are not stored yet: one step of the first of them × their steps."""
        by_id = {job.id: job for job in self.jobs}  # a training that is asked for twice is done once
        shelf, task = self.tuner.context.shelf, self.tuner.work.task
        done = set() if shelf is None else shelf.ids()
        left = [job for name, job in by_id.items() if name not in done]
        steps = sum(steps_of(task, recipe_of(job)) for job in left)
        samples = sum(samples_of(task, recipe_of(job)) for job in left)
        seconds = steps * self._time_step(left[0]) if left else 0.0
        return TimeEstimate(len(by_id), len(by_id) - len(left), steps, samples, seconds)

    def _time_step(self, job: Job) -> float:
        """Return the seconds of a step of a training: the median of a few steps after the first."""
        work, steps = self.tuner.work, iter(range(_TIMED))
        log = finetune_(
            lower(work.model, job.layers), work.task, recipe_of(job), teacher=work.teacher, seed=job.seed,
            stop=lambda: next(steps, None) is None,
        )  # fmt: skip
        since_start = [line.seconds for line in log.lines]
        each = [later - earlier for earlier, later in pairwise(since_start)]
        return statistics.median(each or since_start)  # a training of one step has only the first


def recipe_of(job: Job) -> Recipe:
    """Return the recipe of a job that trains."""
    assert job.recipe is not None, "a job that trains has a recipe"
    return job.recipe


def shorten(recipe: Recipe, *, epochs: float | None = None, steps: int | None = None, lr_factor: float = 1.0) -> Recipe:
    """Return the recipe at another length, always of one stage; schedule and warmup span the new one."""
    return Recipe(**(dict(recipe) | {"epochs": epochs, "steps": steps, "lr": recipe.lr * lr_factor, "then": None}))


def recipe_for(method: str, context: Context, *, epochs: float | None, steps: int | None, lr_factor: float) -> Recipe:
    """Return the recipe of a method's trainings: the context's at another length, one epoch unless it is given."""
    check_task(context.task, method, "fine-tunes")
    if context.recipe is None:
        raise InputError(
            f"{method} fine-tunes by the recipe that the network was trained with: give it, --recipe "
            "(in Python: Context(recipe=Recipe(epochs=1, lr=0.01)))"
        )
    if epochs is None and steps is None:
        epochs = 1.0
    return shorten(context.recipe, epochs=epochs, steps=steps, lr_factor=lr_factor)


def check_length(method: str, epochs: float | None, steps: int | None, lr_factor: float) -> None:
    """Refuse a length that is given twice, and numbers that are not above 0."""
    if epochs is not None and steps is not None:
        raise InputError(f"{method}: give the length of a fine-tuning once, as epochs or as steps")
    for name, value in (("epochs", epochs), ("steps", steps), ("lr_factor", lr_factor)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{method}: {name} must be above 0, not {value}")


def counts_of(outcomes: Sequence[Outcome], task: Task) -> dict[str, int]:
    """Return the counts of trainings, their steps and samples, and the samples in an epoch of the task."""
    return {
        "trainings": len(outcomes),
        "steps": sum(int(outcome.value("steps")) for outcome in outcomes),
        "samples": sum(int(outcome.value("samples")) for outcome in outcomes),
        "samples_per_epoch": samples_per_epoch(task),
    }

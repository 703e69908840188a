"""Drop: a group gains what the network loses when that group is lowered, with no fine-tuning at all."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Dropped, Losses
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.trials import Recipe
from bitplan.gains.alps import Goodness
from bitplan.gains.base import Context, LayerGains
from bitplan.gains.lowering import by_first_layer, check_top, layers_of, lower
from bitplan.gains.measuring import By, check_by, check_task, draw, finish, measure_, options_of_task, try_task
from bitplan.tasks.base import Batch, Task
from bitplan.tune.resume import describe_run


@dataclass(frozen=True)
class Drop:
    """From the network at the highest choice, lower one group and look at the loss on a few hundred samples.

    value(c) = loss(c0) − loss(c), in inference mode, on the same training batches for every group (shuffled and
    augmented by the seed: a split in its own order may be sorted by class). Standard errors come from the differences
    between batches. `by` "score" takes the score instead. The loss is the task's own, without a teacher.
    """

    samples: int = 512
    batch_size: int = 64
    by: By = "loss"

    def __post_init__(self) -> None:
        check_by(self.by)
        if self.samples < 1 or self.batch_size < 1:
            raise InputError(
                f"drop needs at least one sample and a batch_size of at least 1, not {self.samples} and "
                f"{self.batch_size}"
            )

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One pass per group and lower choice, and one of the network as it is."""
        good, samples = self.measure(model, graph, choices, context)
        gains = good - good[:, :1]  # (G, C, B)
        names = [group.name for group in graph.selectable]
        batches = gains.shape[2]
        errors = gains.std(axis=2, ddof=1) / np.sqrt(batches) if batches > 1 else None
        return LayerGains(
            values=by_first_layer(graph, dict(zip(names, gains.mean(axis=2).tolist(), strict=True))),
            errors=None if errors is None else by_first_layer(graph, dict(zip(names, errors.tolist(), strict=True))),
            counts={"passes": 1 + good.shape[0] * (good.shape[1] - 1), "samples": samples, "batches": batches},
        )

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> tuple[Goodness, int]:
        """How good each group is at each choice on each batch, (G, C, B), more is better; and the samples seen."""
        task = check_task(context.task, "drop", "runs the network on data")
        check_top(model, graph, choices, "drop")
        try_task(lower(model, {}), task, self.by, "drop")
        size = min(self.batch_size, self.samples, task.size("train"))
        count = min(self.samples, task.size("train")) // size
        run = describe_run(model, task, Recipe(steps=1), None, context.seed)
        jobs = [
            Dropped(
                groups=tuple(lowered), layers=layers_of(graph, lowered), network=run.network, weights=run.weights,
                task=run.task, task_options=options_of_task(task), seed=context.seed, batches=count, batch_size=size,
            )
            for lowered in ({}, *({group.name: choice} for group in graph.selectable for choice in choices[:-1]))
        ]  # fmt: skip
        done = finish(_Measure(model, task), jobs, Losses, context, "drop")
        sign = 1.0 if self.by == "score" and task.higher_is_better else -1.0
        found = sign * np.array([_batchwise(done[job.id], self.by) for job in jobs])  # (1 + G (C − 1), B)
        low = found[1:].reshape(len(graph.selectable), len(choices) - 1, count)
        top = np.broadcast_to(found[0], (len(low), 1, count))
        return np.concatenate([low, top], axis=1), len(jobs) * count * size


@dataclass(frozen=True)
class _Measure:
    """The work of one job: lower a copy of the network and run it; batches are drawn once per process."""

    model: nn.Module
    task: Task

    def __call__(self, job: Dropped) -> Losses:
        start = time.perf_counter()
        losses, scores = measure_(lower(self.model, job.layers), self.task, self._drawn(job))
        if not np.isfinite(losses).all():
            raise InputError("the loss is NaN or infinite once it is lowered: look at its steps, or use alps")
        return Losses(
            losses=tuple(losses),
            scores=None if scores is None else tuple(scores),
            seconds=time.perf_counter() - start,
        )

    def _drawn(self, job: Dropped) -> list[Batch]:
        key = job.batches, job.batch_size, job.seed
        if key not in self._batches:
            self._batches[key] = draw(self.model, self.task, job.batches, job.batch_size, seed=_mixed(job.seed))
        return self._batches[key]

    @cached_property
    def _batches(self) -> dict[tuple[int, int, int], list[Batch]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "task": self.task}


def _mixed(seed: int) -> int:
    """Another order than that of a training with the same seed."""
    return int.from_bytes(hashlib.sha256(f"drop {seed}".encode()).digest()[:4], "big") >> 1


def _batchwise(outcome: Losses, by: By) -> tuple[float, ...]:
    if by == "loss":
        return outcome.losses
    if outcome.scores is None:
        raise InputError("the task has no score for a batch: use by=loss")
    return outcome.scores

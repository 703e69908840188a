"""Drop: a group gains what the network loses when that group is lowered, with no fine-tuning at all."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import nn

from bitplan.core.about import About
from bitplan.core.errors import InputError
from bitplan.core.jobs import Dropped, Losses
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.gains.alps import Goodness
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.finetuned import seconds_of
from bitplan.gains.lowering import by_first_layer, check_top, layers_of, lower
from bitplan.gains.measuring import By, check_by, check_task, finish, options_of_task, sign_of, try_task
from bitplan.quant.fingerprint import fingerprint
from bitplan.tasks.base import Batch, Task, title_of
from bitplan.tasks.choosing import judged_by
from bitplan.tasks.measured import draw, measure_

Job = TypeVar("Job", bound=Dropped)


@dataclass(frozen=True)
class MeasuredBatches:
    """How good each group is at each choice on each batch, (G, C, B), more is better; what that took."""

    good: Goodness
    samples: int
    seconds: float

    def gains(self, graph: Graph, *, passes: int) -> LayerGains:
        """Gains over the lowest choice, with standard errors from the differences between batches."""
        names = [group.name for group in graph.selectable]
        gains = self.good - self.good[:, :1]  # (G, C, B)
        batches = gains.shape[2]
        values = dict(zip(names, gains.mean(axis=2).tolist(), strict=True))
        errors = None
        if batches > 1:
            deviations = gains.std(axis=2, ddof=1) / np.sqrt(batches)  # (G, C)
            errors = by_first_layer(graph, dict(zip(names, deviations.tolist(), strict=True)))
        return LayerGains(
            values=by_first_layer(graph, values),
            errors=errors,
            counts={"passes": passes, "samples": self.samples, "batches": batches},
            work=self.seconds,
        )


@dataclass(frozen=True)
class Drop(Gain):
    """From the network at the highest choice, lower one group and look at the loss on a few hundred samples.

    value(c) = loss(c0) − loss(c), in inference mode, on the same training batches for every group (shuffled and
    augmented by the seed: a split in its own order may be sorted by class). Standard errors come from the differences
    between batches. `by` "score" takes the score instead. The loss is the task's own, without a teacher.
    """

    about: ClassVar[About] = About(True, True, passes="N·(1 + G·(C − 1))", source="bitplan")
    calibrates: ClassVar[bool] = True

    samples: int = 512
    batch_size: int = 64
    by: By = "loss"

    def __post_init__(self) -> None:
        check_by(self.by)
        check_samples("drop", self.samples, self.batch_size)

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One pass per group and lower choice, and one of the network as it is."""
        lowerings = len(one_at_a_time(graph, choices))
        return self.measure(model, graph, choices, context).gains(graph, passes=1 + lowerings)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """Run all, on the same batches."""
        task = check_task(context.task, "drop", "runs the network on data")
        check_top(model, graph, choices, "drop")
        try_task(lower(model, {}), task, self.by, "drop")
        every = [{}, *one_at_a_time(graph, choices)]
        jobs = lowered_jobs(Dropped, model, graph, context, every, self.samples, self.batch_size)
        done = finish(Measure(model, task), jobs, Losses, context, "drop")
        measured = np.array([batchwise(done[job.id], self.by) for job in jobs])  # (1 + G (C − 1), B)
        good = sign_of(self.by, task) * measured
        low = good[1:].reshape(len(graph.selectable), len(choices) - 1, -1)
        top = np.broadcast_to(good[0], (len(low), 1, low.shape[2]))  # the network as it is, alike for all groups
        samples = sum(job.batches * job.batch_size for job in jobs)
        return MeasuredBatches(np.concatenate([low, top], axis=1), samples, seconds_of(done.values()))


@dataclass(frozen=True)
class Draws:
    """Batches for jobs, drawn once per process."""

    model: nn.Module
    task: Task

    def drawn(self, job: Dropped) -> list[Batch]:
        """The batches that a job asks for."""
        key = job.batches, job.batch_size, job.seed
        if key not in self._batches:
            self._batches[key] = draw(
                self.model, self.task, job.batches, job.batch_size, _mixed(job.seed), judged_by(self.task)
            )
        return self._batches[key]

    @cached_property
    def _batches(self) -> dict[tuple[int, int, int], list[Batch]]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "task": self.task}


@dataclass(frozen=True)
class Measure(Draws):
    """The work of one job: lower a copy of the network and run it."""

    def __call__(self, job: Dropped) -> Losses:
        """Lower, run, and say how good each batch was."""
        start = time.perf_counter()
        losses, scores = measure_(lower(self.model, job.layers), self.task, self.drawn(job))
        charge(Spend(forwards=job.batches * job.batch_size, evaluations=1, labels=True))
        if not np.isfinite(losses).all():
            raise InputError("the loss is NaN or infinite once it is lowered: look at its steps, or use alps")
        return Losses(
            losses=tuple(losses),
            scores=None if scores is None else tuple(scores),
            seconds=time.perf_counter() - start,
        )


def check_samples(method: str, samples: int, batch_size: int) -> None:
    """Refuse what leaves nothing to run on."""
    if samples < 1 or batch_size < 1:
        raise InputError(
            f"{method} needs at least one sample and a batch_size of at least 1, not {samples} and {batch_size}"
        )


def one_at_a_time(graph: Graph, choices: Sequence[Precision]) -> list[dict[str, Precision]]:
    """Each group at each choice below the highest, in this order."""
    return [{group.name: choice} for group in graph.selectable for choice in choices[:-1]]


def lowered_jobs(
    kind: type[Job], model: nn.Module, graph: Graph, context: Context, every: Sequence[Mapping[str, Precision]],
    samples: int, batch_size: int, **more: Any,
) -> list[Job]:  # fmt: skip
    """A job for each set of lowered groups, all on the same batches: whole ones, of at most so many samples."""
    task: Task = context.task
    available = min(samples, task.size(judged_by(task)))
    size = min(batch_size, available)
    own = fingerprint(model)
    alike = {
        "network": own.network, "weights": own.weights, "task": title_of(task), "task_options": options_of_task(task),
        "seed": context.seed, "batches": available // size, "batch_size": size, **more,
    }  # fmt: skip
    return [kind(groups=tuple(lowered), layers=layers_of(graph, lowered), **alike) for lowered in every]


def _mixed(seed: int) -> int:
    """Another order than that of a training with the same seed."""
    return int.from_bytes(hashlib.sha256(f"drop {seed}".encode()).digest()[:4], "big") >> 1


def batchwise(outcome: Losses, by: By) -> tuple[float, ...]:
    """The measure that is asked for, of each batch."""
    if by == "loss":
        return outcome.losses
    if outcome.scores is None:
        raise InputError("the task has no score for a batch: use by=loss")
    return outcome.scores

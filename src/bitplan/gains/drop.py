"""Drop: a group gains what the network loses when that group is lowered, with no fine-tuning at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from bitplan.gains.finetuning import seconds_of
from bitplan.gains.lowering import (
    By,
    by_first_layer,
    check_by,
    check_task,
    check_top,
    finish,
    layers_of,
    lower,
    lowered_choices,
    options_of_task,
    sign_of,
    try_task,
)
from bitplan.gains.rerun import Reruns
from bitplan.quant.checkpoint import fingerprint
from bitplan.tasks.base import Batch, Task, judged_by, measures, title_of

Job = TypeVar("Job", bound=Dropped)


@dataclass(frozen=True)
class MeasuredBatches:
    """How good each group is at each choice on each batch, (G, C, B), more is better; what that took."""

    good: Goodness
    passes: int
    samples: int
    seconds: float

    def gains(self, graph: Graph) -> LayerGains:
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
            counts={"passes": self.passes, "samples": self.samples, "batches": batches},
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
    from_float: ClassVar[bool] = True

    samples: int = 512
    batch_size: int = 64
    by: By = "loss"

    def __post_init__(self) -> None:
        check_by(self.by)
        check_samples("drop", self.samples, self.batch_size)

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One pass per group and lower choice, and one of the network as it is."""
        return self.measure(model, graph, choices, context).gains(graph)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """Run all, on the same batches."""
        task = check_task(context.task, "drop", "runs the network on data")
        check_top(model, graph, choices, "drop")
        try_task(lower(model, {}), task, self.by, "drop")
        every = [{}, *one_at_a_time(graph, lowered_choices(model, graph, choices))]
        jobs = lowered_jobs(Dropped, model, graph, context, every, self.samples, self.batch_size)
        done = finish(Measure(model, task), jobs, Losses, context, "drop")
        measured = np.array([batchwise(done[job.id], self.by) for job in jobs])  # (1 + G (C − 1), B)
        good = sign_of(self.by, task) * measured
        samples = sum(job.batches * job.batch_size for job in jobs)
        table = with_top(good[1:], good[0], len(graph.selectable), len(choices))
        return MeasuredBatches(table, len(jobs), samples, seconds_of(done.values()))


@dataclass(frozen=True)
class Measure(Reruns[tuple[float, float]]):
    """The work of one job: run the lowered network."""

    def ready(self, network: nn.Module, batch_size: int) -> nn.Module:
        """In inference mode."""
        return network.eval()

    def see(self, outputs: Any, batch: Batch) -> tuple[float, float]:
        """The loss and the score."""
        return measures(self.task, outputs, batch)

    def __call__(self, job: Dropped) -> Losses:
        """Lower, run, and say how good each batch was."""
        start = time.perf_counter()
        losses, scores = zip(*self.rerun(job).lowered(job.layers, record=len(job.groups) <= 1), strict=True)
        charge(Spend(forwards=job.batches * job.batch_size, evaluations=1, labels=True))
        if not np.isfinite(losses).all():
            raise InputError("the loss is NaN or infinite once it is lowered: look at its steps, or use alps")
        return Losses(
            losses=losses, scores=scores if np.isfinite(scores).all() else None, seconds=time.perf_counter() - start
        )


def check_samples(method: str, samples: int, batch_size: int) -> None:
    """Refuse what leaves nothing to run on."""
    if samples < 1 or batch_size < 1:
        raise InputError(
            f"{method} needs at least one sample and a batch_size of at least 1, not {samples} and {batch_size}"
        )


def one_at_a_time(graph: Graph, lowered: Sequence[Precision]) -> list[dict[str, Precision]]:
    """Each group at each of these choices, in this order."""
    return [{group.name: choice} for group in graph.selectable for choice in lowered]


def with_top(measured: Goodness, as_it_is: Goodness | float, groups: int, choices: int) -> Goodness:
    """What was measured of lowered groups one by one, as (G, C, B); what was not lowered is the network as it is."""
    low: Goodness = measured.reshape(groups, -1, measured.shape[-1])
    top = np.broadcast_to(as_it_is, (groups, choices - low.shape[1], low.shape[2]))
    return np.concatenate([low, top], axis=1)


def lowered_jobs(
    kind: type[Job], model: nn.Module, graph: Graph, context: Context, every: Sequence[Mapping[str, Precision]],
    samples: int, batch_size: int, **more: Any,
) -> list[Job]:  # fmt: skip
    """A job for each set of lowered groups, all on the same batches: whole ones, of at most so many samples."""
    task: Task = context.task
    batches, size = sizes_for(task, samples, batch_size)
    own = fingerprint(model)
    alike = {
        "network": own.network, "weights": own.weights, "task": title_of(task), "task_options": options_of_task(task),
        "seed": context.seed, "batches": batches, "batch_size": size, **more,
    }  # fmt: skip
    return [kind(groups=tuple(lowered), layers=layers_of(graph, lowered), **alike) for lowered in every]


def sizes_for(task: Task, samples: int, batch_size: int) -> tuple[int, int]:
    """How many batches of how many samples: whole ones, as far as there are samples."""
    available = min(samples, task.size(judged_by(task)))
    size = min(batch_size, available)
    return available // size, size


def batchwise(outcome: Losses, by: By) -> tuple[float, ...]:
    """The measure that is asked for, of each batch."""
    if by == "loss":
        return outcome.losses
    if outcome.scores is None:
        raise InputError("the task has no score for a batch: use by=loss")
    return outcome.scores

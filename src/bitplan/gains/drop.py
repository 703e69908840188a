"""Drop: a group gains what the network loses when that group is lowered, with no fine-tuning at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.gains.alps import Goodness
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.jobs import check_samples, do_jobs, lowered_jobs, one_at_a_time, seconds_of
from bitplan.gains.lowering import (
    By,
    check_by,
    check_task,
    check_top,
    lower,
    lowered_choices,
    rows_by_layer,
    sign_for,
    try_task,
)
from bitplan.gains.rerun import RerunWork
from bitplan.tasks.base import Batch, measure_batch


@dataclass(frozen=True)
class MeasuredBatches:
    """How good each group is at each choice on each batch, (G, C, B), more is better; and the cost of measuring it."""

    good: Goodness
    passes: int
    samples: int
    seconds: float

    def gains(self, graph: Graph) -> LayerGains:
        """Return gains over the lowest choice, with standard errors from the differences between batches."""
        names = [group.name for group in graph.selectable]
        gains = self.good - self.good[:, :1]  # (G, C, B)
        batches = gains.shape[2]
        values = dict(zip(names, gains.mean(axis=2).tolist(), strict=True))
        errors = None
        if batches > 1:
            deviations = gains.std(axis=2, ddof=1) / np.sqrt(batches)  # (G, C)
            errors = rows_by_layer(graph, dict(zip(names, deviations.tolist(), strict=True)))
        return LayerGains(
            values=rows_by_layer(graph, values),
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
        """Return the gains, by one pass per group and lower choice and one of the network as it is."""
        return self.measure(model, graph, choices, context).gains(graph)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """Run the network with each group lowered, on the same batches."""
        task = check_task(context.task, "drop", "runs the network on data")
        check_top(model, graph, choices, "drop")
        try_task(lower(model, {}), task, self.by, "drop")
        every = [{}, *one_at_a_time(graph, lowered_choices(model, graph, choices))]
        jobs = lowered_jobs("drop", model, graph, context, every, self.samples, self.batch_size)
        done = do_jobs(Measure(model, task), jobs, context, "drop")
        measured = np.array([measures_by_batch(done[job.id], self.by) for job in jobs])  # (1 + G (C − 1), B)
        good = sign_for(self.by, task) * measured
        samples = sum(job.samples for job in jobs)
        table = add_top(good[1:], good[0], len(graph.selectable), len(choices))
        return MeasuredBatches(table, len(jobs), samples, seconds_of(done.values()))


@dataclass(frozen=True)
class Measure(RerunWork[tuple[float, float]]):
    """Run the lowered network of a job, and return the loss of each batch, and the scores if the task has any."""

    def prepare(self, network: nn.Module, batch_size: int) -> nn.Module:
        """Put the network into inference mode."""
        return network.eval()

    def see(self, outputs: Any, batch: Batch) -> tuple[float, float]:
        """Return the loss and the score."""
        return measure_batch(self.task, outputs, batch)

    def __call__(self, job: Job) -> Numbers:
        """Return the losses and scores of all batches."""
        losses, scores = zip(*self.rerun(job).lowered(job.layers), strict=True)
        charge(Spend(forwards=job.samples, evaluations=1, labels=True))
        if not np.isfinite(losses).all():
            raise InputError("the loss is NaN or infinite once it is lowered: look at its steps, or use alps")
        return {"losses": losses} | ({"scores": scores} if np.isfinite(scores).all() else {})


def add_top(measured: Goodness, as_it_is: Goodness | float, groups: int, choices: int) -> Goodness:
    """Return the measures of groups lowered one by one as (G, C, B). Other choices are the network as it is."""
    low: Goodness = measured.reshape(groups, -1, measured.shape[-1])
    top = np.broadcast_to(as_it_is, (groups, choices - low.shape[1], low.shape[2]))
    return np.concatenate([low, top], axis=1)


def measures_by_batch(outcome: Outcome, by: By) -> tuple[float, ...]:
    """Return the losses or the scores of all batches."""
    if by == "loss":
        return outcome.numbers["losses"]
    if "scores" not in outcome.numbers:
        raise InputError("the task has no score for a batch: use by=loss")
    return outcome.numbers["scores"]

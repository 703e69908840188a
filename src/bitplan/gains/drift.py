"""Drift: a group gains what the network's answers move when that group is lowered; no labels, no fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import STREAMED
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, Streams
from bitplan.gains.drop import MeasuredBatches, add_top
from bitplan.gains.jobs import check_samples, do_jobs, lowered_jobs, one_at_a_time, seconds_of
from bitplan.gains.lowering import check_task, check_top, lowered_choices
from bitplan.gains.rerun import RerunWork
from bitplan.tasks.base import Batch, WithAnswers
from bitplan.tune.distillation import divergence
from bitplan.weights.opened import CheckpointLike


@dataclass(frozen=True)
class Drift(Gain):
    """From the network at the highest choice, lower one group and look how far its answers move.

    value(c) = d(c0) − d(c), where d is the divergence from the answers at the highest choice, T²·KL as in distillation,
    on the same training batches for every group. A float network whose weights alone are quantized is lowered from
    float, to the highest choice too. No label is looked at. The rise of the loss (`drop`) comes
    from the few samples that a trained network gets wrong; here every sample counts, so that far fewer are needed.
    BatchNorm takes the statistics of the batch, as it does in a fine-tuning. Errors are from differences between
    batches.
    """

    about: ClassVar[About] = About(True, passes="N·(1 + G·(C − 1))", source="bitplan")
    calibrates: ClassVar[bool] = True
    from_float: ClassVar[bool] = True
    streams: ClassVar[Streams] = "large"

    samples: int = 512
    batch_size: int = 64
    temperature: float = 4.0

    def __post_init__(self) -> None:
        check_samples("drift", self.samples, self.batch_size)
        if not 0 < self.temperature < math.inf:
            raise InputError(f"drift: temperature must be above 0, not {self.temperature}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Return the gains, by one pass per group and lower choice and one as it is; a file is run block by block."""
        if isinstance(model, CheckpointLike):
            return STREAMED.get("drift")(self, model, graph, choices, context).gains(graph)
        return self.measure(model, graph, choices, context).gains(graph)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """Measure how near each group's answers are, on the same batches: 0 the nearest."""
        task = check_task(context.task, "drift", "runs the network on data", WithAnswers)
        check_top(model, graph, choices, "drift")
        every = one_at_a_time(graph, lowered_choices(model, graph, choices))
        options = {"temperature": self.temperature}
        jobs = lowered_jobs("drift", model, graph, context, every, self.samples, self.batch_size, options=options)
        done = do_jobs(Compare(model, task), jobs, context, "drift")
        charge(price_of_reference(jobs))
        low = -np.array([done[job.id].numbers["divergences"] for job in jobs])  # (G (C − 1), B); from float (G C, B)
        samples = (1 + len(jobs)) * jobs[0].samples
        table = add_top(low, 0.0, len(graph.selectable), len(choices))  # from itself it does not diverge
        return MeasuredBatches(table, 1 + len(jobs), samples, seconds_of(done.values()))


@dataclass(frozen=True)
class Compare(RerunWork[tuple[Tensor, ...]]):
    """Compare a lowered network's answers with those of the network as it is, and return their divergences."""

    def prepare(self, network: nn.Module, batch_size: int) -> nn.Module:
        """Put the network into the mode of a fine-tuning, but without dropout."""
        return use_batch_statistics_(network, batch_size)

    def see(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        """Return the answers."""
        return self.task.logits(outputs)

    def __call__(self, job: Job) -> Numbers:
        """Return the divergence of each batch."""
        divergences: list[float] = []
        for before, after in self.rerun(job).pairs(job.layers):
            if not all(scores.isfinite().all() for scores in before):
                raise InputError("the network's own answers are NaN or infinite: train it first")
            divergences.append(float(divergence(after, before, job.option("temperature"))))
        if job.layers:
            charge(Spend(forwards=job.samples, evaluations=1))
        if not np.isfinite(divergences).all():
            raise InputError("the answers are NaN or infinite once it is lowered: look at its steps, or use alps")
        return {"divergences": divergences}


def price_of_reference(jobs: Sequence[Job]) -> Spend:
    """Return the price of running the network as it is, which all jobs on the same samples share."""
    return Spend(forwards=jobs[0].samples)


def use_batch_statistics_(model: nn.Module, batch_size: int) -> nn.Module:
    """Put a model into inference mode, but BatchNorm with the statistics of the batch if it has several samples."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and batch_size > 1:
            module.train()
    return model

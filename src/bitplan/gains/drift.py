"""Drift: a group gains what the network's answers move when that group is lowered; no labels, no fine-tuning."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitplan.core.about import About
from bitplan.core.errors import InputError
from bitplan.core.jobs import Drifted, Drifts
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.drop import Draws, MeasuredBatches, check_samples, lowered_jobs, one_at_a_time
from bitplan.gains.finetuned import seconds_of
from bitplan.gains.lowering import check_top, lower
from bitplan.gains.measuring import check_task, finish
from bitplan.tasks.base import WithAnswers
from bitplan.tune.distill import divergence


@dataclass(frozen=True)
class Drift(Gain):
    """From the network at the highest choice, lower one group and look how far its answers move.

    value(c) = d(c0) − d(c), where d is the divergence from the answers at the highest choice, T²·KL as in distillation,
    on the same training batches for every group. No label is looked at. The rise of the loss (`drop`) comes from the
    few samples that a trained network gets wrong; here every sample counts, so that far fewer are needed. BatchNorm
    takes the statistics of the batch, as it does in a fine-tuning. Errors are from differences between batches.
    """

    about: ClassVar[About] = About(True, passes="2·N·G·(C − 1)", source="bitplan")
    calibrates: ClassVar[bool] = True

    samples: int = 512
    batch_size: int = 64
    temperature: float = 4.0

    def __post_init__(self) -> None:
        check_samples("drift", self.samples, self.batch_size)
        if not 0 < self.temperature < math.inf:
            raise InputError(f"drift: temperature must be above 0, not {self.temperature}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Two passes per group and lower choice: the network as it is, and lowered."""
        lowerings = len(one_at_a_time(graph, choices))
        return self.measure(model, graph, choices, context).gains(graph, passes=2 * lowerings)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """How near each group's answers are, on the same batches: 0 the nearest."""
        task = check_task(context.task, "drift", "runs the network on data", WithAnswers)
        check_top(model, graph, choices, "drift")
        jobs = lowered_jobs(
            Drifted, model, graph, context, one_at_a_time(graph, choices), self.samples, self.batch_size,
            temperature=self.temperature,
        )  # fmt: skip
        done = finish(Compare(model, task), jobs, Drifts, context, "drift")
        low = -np.array([done[job.id].divergences for job in jobs])  # (G (C − 1), B)
        low = low.reshape(len(graph.selectable), len(choices) - 1, -1)
        top = np.zeros((len(low), 1, low.shape[2]))  # from itself it does not diverge
        samples = 2 * sum(job.batches * job.batch_size for job in jobs)
        return MeasuredBatches(np.concatenate([low, top], axis=1), samples, seconds_of(done.values()))


@dataclass(frozen=True)
class Compare(Draws):
    """The work of one job: run the network as it is and a lowered copy side by side."""

    def __call__(self, job: Drifted) -> Drifts:
        """Say how far the answers to each batch moved."""
        start = time.perf_counter()
        divergences: list[float] = []
        with torch.no_grad():
            as_it_is = ready(lower(self.model, {}), job.batch_size)
            lowered = ready(lower(self.model, job.layers), job.batch_size)
            for batch in self.drawn(job):
                before = self.task.logits(self.task.forward(as_it_is, batch))
                after = self.task.logits(self.task.forward(lowered, batch))
                if not all(scores.isfinite().all() for scores in before):
                    raise InputError("the network's own answers are NaN or infinite: train it first")
                divergences.append(float(divergence(after, before, job.temperature)))
        if not np.isfinite(divergences).all():
            raise InputError("the answers are NaN or infinite once it is lowered: look at its steps, or use alps")
        charge(Spend(forwards=2 * job.batches * job.batch_size, evaluations=1))
        return Drifts(divergences=tuple(divergences), seconds=time.perf_counter() - start)


def ready(model: nn.Module, batch_size: int) -> nn.Module:
    """In inference mode, but BatchNorm with the statistics of the batch where it has more than one sample."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and batch_size > 1:
            module.train()
    return model

"""Drift: a group gains what the network's answers move when that group is lowered; no labels, no fine-tuning."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bitplan.core.about import About
from bitplan.core.errors import InputError
from bitplan.core.jobs import Drifted, Drifts
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import STREAMED
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, Streams
from bitplan.gains.drop import MeasuredBatches, check_samples, lowered_jobs, one_at_a_time, with_top
from bitplan.gains.finetuning import Expected, seconds_of
from bitplan.gains.lowering import check_task, check_top, finish, lowered_choices
from bitplan.gains.rerun import Reruns
from bitplan.gains.time_estimate import foreseen, one_pass
from bitplan.tasks.base import Batch, Task, WithAnswers
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
        """One pass per group and lower choice, and one of the network as it is; of a file, block after block."""
        if isinstance(model, CheckpointLike):
            return STREAMED.get("drift")(self).layer_gains(model, graph, choices, context)
        return self.measure(model, graph, choices, context).gains(graph)

    def expected(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Expected | None:
        """By one batch through the network as it is, of which half is not run again, and one comparison of answers."""
        if isinstance(model, CheckpointLike):
            return STREAMED.get("drift")(self).expected(model, graph, choices, context)
        task, jobs = self._jobs(model, graph, choices, context)
        one = jobs[0]

        def compare(outputs: Any, _: Batch) -> None:
            divergence(task.logits(outputs), task.logits(outputs), self.temperature)

        def seconds() -> float:
            run, looked = (one_pass(model, context, one.batch_size, look) for look in (lambda *_: None, compare))
            return one.batches * (run / 2 + max(0.0, looked - run))

        return foreseen(jobs, context, "networks", one.batches * one.batch_size, seconds)

    def measure(self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context) -> MeasuredBatches:
        """How near each group's answers are, on the same batches: 0 the nearest."""
        task, jobs = self._jobs(model, graph, choices, context)
        done = finish(Compare(model, task), jobs, Drifts, context, "drift")
        charge(once_for(jobs))
        low = -np.array([done[job.id].divergences for job in jobs])  # (G (C − 1), B), or (G C, B) from a float network
        samples = (1 + len(jobs)) * jobs[0].batches * jobs[0].batch_size
        table = with_top(low, 0.0, len(graph.selectable), len(choices))  # from itself it does not diverge
        return MeasuredBatches(table, 1 + len(jobs), samples, seconds_of(done.values()))

    def _jobs(
        self, model: Any, graph: Graph, choices: Sequence[Precision], context: Context
    ) -> tuple[Task, list[Drifted]]:
        """The task, and each group at each lower choice."""
        task = check_task(context.task, "drift", "runs the network on data", WithAnswers)
        check_top(model, graph, choices, "drift")
        every = one_at_a_time(graph, lowered_choices(model, graph, choices))
        alike = {"temperature": self.temperature}
        return task, lowered_jobs(Drifted, model, graph, context, every, self.samples, self.batch_size, **alike)


@dataclass(frozen=True)
class Compare(Reruns[tuple[Tensor, ...]]):
    """The work of one job: compare a lowered network's answers with those of the network as it is.

    `around` are lowered layers from which those of most jobs differ in a few: nothing depends on it but the time.
    """

    around: Mapping[str, Precision] | None = None

    def ready(self, network: nn.Module, batch_size: int) -> nn.Module:
        """As a fine-tuning would have it, but in inference mode."""
        return ready(network, batch_size)

    def see(self, outputs: Any, batch: Batch) -> tuple[Tensor, ...]:
        """The answers."""
        return self.task.logits(outputs)

    def __call__(self, job: Drifted) -> Drifts:
        """Say how far the answers to each batch moved."""
        start = time.perf_counter()
        divergences: list[float] = []
        for before, after in self.rerun(job).pairs(job.layers, self.around):
            if not all(scores.isfinite().all() for scores in before):
                raise InputError("the network's own answers are NaN or infinite: train it first")
            divergences.append(float(divergence(after, before, job.temperature)))
        if job.layers:
            charge(Spend(forwards=job.batches * job.batch_size, evaluations=1))
        if not np.isfinite(divergences).all():
            raise InputError("the answers are NaN or infinite once it is lowered: look at its steps, or use alps")
        return Drifts(divergences=tuple(divergences), seconds=time.perf_counter() - start)


def once_for(jobs: Sequence[Drifted]) -> Spend:
    """What running the network as it is takes, which all jobs on the same samples share."""
    return Spend(forwards=jobs[0].batches * jobs[0].batch_size)


def ready(model: nn.Module, batch_size: int) -> nn.Module:
    """In inference mode, but BatchNorm with the statistics of the batch where it has more than one sample."""
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm) and batch_size > 1:
            module.train()
    return model

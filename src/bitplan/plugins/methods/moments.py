"""Moments: a layer gains what more bits take off the error of its outputs, weighted by what the layer reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import STREAMED
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, Streams
from bitplan.gains.jobs import BatchWork, check_samples, do_jobs, lowered_jobs, members_of, seconds_of
from bitplan.gains.lowering import check_seen, check_task, check_top
from bitplan.gains.rerun import FixedCopy
from bitplan.quant.convert import weights_of
from bitplan.quant.moments import WeightCall, WeightWatch
from bitplan.quant.other_precisions import lower_weights
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.tasks.base import Task, WithData
from bitplan.weights.opened import CheckpointLike


@dataclass(frozen=True)
class MomentsGain(Gain):
    """The squared error of a layer's outputs when its weights alone are quantized, over the squares of the outputs.

    e(c) = tr(ΔW_c·H·ΔW_cᵀ) / tr(W·H·Wᵀ), ΔW_c = Q_c(W) − W and H the second moments of what the layer reads in the
    network as it is; value(c) = e(c0) − e(c). It is the error that compensated rounding (GPTQ) makes smaller. H is not
    made: the layer is run again with each choice's weights on the same inputs, which is the same, takes any layer, and
    no memory. Without `relative` outputs count as large as they are, so that layers before a norm count by a scale
    that the norm takes out again. Errors of inputs are not looked at, and a weight that is cut or computed before it is
    multiplied counts as if its inputs were alike and independent. One pass, and for each choice the products of
    one; errors are from differences between batches.
    """

    about: ClassVar[About] = About(True, passes="N·(1 + C)", source="the objective of GPTQ, Frantar et al. 2022")
    calibrates: ClassVar[bool] = True
    from_float: ClassVar[bool] = True
    streams: ClassVar[Streams] = "always"

    samples: int = 128
    batch_size: int = 16
    relative: bool = True

    def __post_init__(self) -> None:
        check_samples("moments", self.samples, self.batch_size)

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """A job for each batch; a file is run block after block (`plugins/llm/streamed_moments.py`)."""
        check_seen("moments", choices, inputs=False)
        if isinstance(model, CheckpointLike):
            return self._streamed(model, graph, choices, context)
        task, jobs = self._jobs(model, graph, choices, context)
        done = do_jobs(CompareOutputs(model, task), jobs, context, "moments")
        outcomes = [done[job.id] for job in jobs]
        layers = [layer for names in jobs[0].members.values() for layer in names]
        gains = np.array([self._gains(layer, outcomes, len(choices)) for layer in layers])  # (L, C, B)
        errors = None
        if len(jobs) > 1:
            spread = gains.std(axis=2, ddof=1) / np.sqrt(len(jobs))
            errors = dict(zip(layers, map(tuple, spread.tolist()), strict=True))
        return LayerGains(
            values=dict(zip(layers, map(tuple, gains.mean(axis=2).tolist()), strict=True)),
            errors=errors,
            counts={"samples": jobs[0].samples, "batches": jobs[0].batches},
            work=seconds_of(outcomes),
        )

    def _jobs(
        self, model: nn.Module, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> tuple[Task, list[Job]]:
        """Return the task, and a job for each batch."""
        task = check_task(context.task, "moments", "looks at what layers read", WithData)
        check_top(model, graph, choices, "moments")
        (job,) = lowered_jobs(
            "moments", model, graph, context, [{}], self.samples, self.batch_size, members=members_of(graph),
            choices=choices, count=1,
        )  # fmt: skip
        numbers = range(job.batches)
        labels = [f"batch {number + 1} of {job.batches}" for number in numbers]
        return task, [
            job.model_copy(update={"first": n, "label": label}) for n, label in zip(numbers, labels, strict=True)
        ]

    def _streamed(
        self, file: CheckpointLike, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> LayerGains:
        """All samples in one batch, so that the file is read once."""
        outcome = STREAMED.get("moments")(file, graph, choices, context, self.samples)
        layers = [layer.name for group in graph.selectable for layer in group.layers]
        values = {name: tuple(self._gains(name, [outcome], len(choices))[:, 0].tolist()) for name in layers}
        return LayerGains(values, counts={"samples": self.samples, "batches": 1}, work=outcome.seconds)

    def _gains(self, layer: str, outcomes: Sequence[Outcome], choices: int) -> np.ndarray:
        """By choice and batch, (C, B); a layer without weights, a product of activations, has none."""
        if layer not in outcomes[0].numbers:
            return np.zeros((choices, len(outcomes)))
        powers, *rows = np.array([outcome.numbers[layer] for outcome in outcomes]).T  # (1 + C, B)
        errors = np.array(rows)  # (C, B)
        shares = errors / np.maximum(powers, np.finfo(np.float64).tiny) if self.relative else errors
        return shares[:1] - shares


@dataclass(frozen=True)
class CompareOutputs(BatchWork):
    """Run one batch, and every layer on what it then reads with the weights of each choice.

    Return for each layer with weights the squares of its outputs, and of their error at each choice, as sums.
    """

    def __call__(self, job: Job) -> Numbers:
        """Return sums of squares by layer."""
        network, quantizers = self._copy.network, self._copy.quantizers
        weights = {
            layer: quantizer
            for layers in job.members.values()
            for layer in layers
            if (quantizer := quantizers[layer].weight) is not None
        }
        lowered = {layer: lower_weights(layer, quantizers[layer], job.choices, self._copy.fresh) for layer in weights}
        watch = OutputWatch(lambda call: lowered[call.layer])
        with torch.no_grad(), watch.watching(weights):
            self.task.forward(network, self.drawn(job)[job.first])
        charge(Spend(forwards=job.batch_size * (1 + len(job.choices))))
        for layer in weights.keys() - watch.powers.keys():  # cut or computed before it is multiplied: inputs unseen
            weight = weights_of(network)[layer]
            watch.add_(layer, weight, [quantizer(weight) for quantizer in lowered[layer]])
        if not np.isfinite([*watch.powers.values(), *np.concatenate([[0.0], *watch.errors.values()])]).all():
            raise InputError("outputs are NaN or infinite: look at the data, or train the network first")
        return watch.numbers

    @cached_property
    def _copy(self) -> FixedCopy:
        return FixedCopy(self.model, nn.Module.eval)


class OutputWatch(WeightWatch):
    """Adds up squares of what layers give out, and of what other weights would change about it.

    `lowered` says of a layer that multiplies its weight which quantizers would make these.
    """

    def __init__(self, lowered: Callable[[WeightCall], Iterable[WeightQuantizer]]) -> None:
        super().__init__()
        self._lowered = lowered
        self.powers: dict[str, float] = {}
        self.errors: dict[str, tuple[float, ...]] = {}

    @property
    def numbers(self) -> dict[str, tuple[float, ...]]:
        """By layer its power, then its errors."""
        return {layer: (power, *self.errors[layer]) for layer, power in self.powers.items()}

    def see(self, call: WeightCall) -> None:
        """Run it again with the weights of each choice."""
        self.add_(call.layer, call.run(), (call.run(one(call.weight)) for one in self._lowered(call)))

    @torch.no_grad()
    def add_(self, layer: str, out: Tensor, changed: Iterable[Tensor]) -> None:
        """Count what a layer gives out, and what it would with other weights."""
        errors = [_squares(one - out) for one in changed]
        before = self.errors.get(layer, (0.0,) * len(errors))
        self.powers[layer] = self.powers.get(layer, 0.0) + _squares(out)
        self.errors[layer] = tuple(one + more for one, more in zip(before, errors, strict=True))


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2

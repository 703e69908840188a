"""Moments: a layer gains what more bits take off the error of its outputs, weighted by what the layer reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.core.about import About
from bitplan.core.errors import InputError
from bitplan.core.jobs import Misread, OutputErrors
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import STREAMED
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, Streams
from bitplan.gains.drop import check_samples, lowered_jobs
from bitplan.gains.finetuning import Expected, seconds_of
from bitplan.gains.lowering import check_seen, check_task, check_top, finish, lower
from bitplan.gains.rerun import Draws
from bitplan.gains.time_estimate import foreseen, one_pass
from bitplan.quant.convert import quantizers_of, weights_of
from bitplan.quant.moments import Multiplied, WeightWatch
from bitplan.quant.other_precisions import Fresh, lowered_weights, remember_weights_
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
            return STREAMED.get("moments")(self).layer_gains(model, graph, choices, context)
        task, jobs = self._jobs(model, graph, choices, context)
        one, members = jobs[0], jobs[0].members
        done = finish(SpoilOutputs(model, task), jobs, OutputErrors, context, "moments")
        outcomes = [done[job.id] for job in jobs]
        layers = [layer for names in members.values() for layer in names]
        gains = np.array([self.gains_of(layer, outcomes, len(choices)) for layer in layers])  # (L, C, B)
        errors = None
        if len(jobs) > 1:
            spread = gains.std(axis=2, ddof=1) / np.sqrt(len(jobs))
            errors = dict(zip(layers, map(tuple, spread.tolist()), strict=True))
        return LayerGains(
            values=dict(zip(layers, map(tuple, gains.mean(axis=2).tolist()), strict=True)),
            errors=errors,
            counts={"samples": one.batches * one.batch_size, "batches": one.batches},
            work=seconds_of(outcomes),
        )

    def expected(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> Expected | None:
        """By one batch through the network as it is; of a file, by its largest layer."""
        check_seen("moments", choices, inputs=False)
        if isinstance(model, CheckpointLike):
            return STREAMED.get("moments")(self).expected(model, graph, choices, context)
        _, jobs = self._jobs(model, graph, choices, context)
        size = jobs[0].batch_size
        passes = 1 + len(choices)
        return foreseen(
            jobs, context, "batches", size, lambda: passes * one_pass(model, context, size, lambda *_: None)
        )

    def _jobs(
        self, model: nn.Module, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> tuple[Task, list[Misread]]:
        """The task, and a job for each batch."""
        task = check_task(context.task, "moments", "looks at what layers read", WithData)
        check_top(model, graph, choices, "moments")
        members = {group.name: tuple(layer.name for layer in group.layers) for group in graph.selectable}
        alike = {"members": members, "choices": choices, "first": 0}
        one = lowered_jobs(Misread, model, graph, context, [{}], self.samples, self.batch_size, **alike)[0]
        return task, [Misread(**(dict(one) | {"first": number})) for number in range(one.batches)]

    def gains_of(self, layer: str, outcomes: Sequence[OutputErrors], choices: int) -> np.ndarray:
        """Return a layer's gains by choice and batch, (C, B); a product of activations, without weights, has none."""
        if layer not in outcomes[0].errors:
            return np.zeros((choices, len(outcomes)))
        errors = np.array([outcome.errors[layer] for outcome in outcomes]).T  # (C, B)
        powers = np.array([outcome.powers[layer] for outcome in outcomes])
        shares = errors / np.maximum(powers, np.finfo(np.float64).tiny) if self.relative else errors
        return shares[:1] - shares


@dataclass(frozen=True)
class SpoilOutputs(Draws):
    """The work of one job: run one batch, and every layer on what it then reads with the weights of each choice."""

    def __call__(self, job: Misread) -> OutputErrors:
        """Sums of squares, by layer."""
        start = time.perf_counter()
        found = quantizers_of(self._copy)
        weights = {
            layer: quantizer
            for layers in job.members.values()
            for layer in layers
            if (quantizer := found[layer].weight) is not None
        }
        lowered = {layer: lowered_weights(layer, found[layer], job.choices, self._fresh) for layer in weights}
        watch = OutputWatch(lambda call: lowered[call.layer])
        with torch.no_grad(), watch.watching(weights):
            self.task.forward(self._copy, self.drawn(job)[job.first])
        charge(Spend(forwards=job.batch_size * (1 + len(job.choices))))
        for layer in weights.keys() - watch.powers.keys():  # cut or computed before it is multiplied: inputs unseen
            watch.add_(
                layer, weights_of(self._copy)[layer], [one(weights_of(self._copy)[layer]) for one in lowered[layer]]
            )
        if not np.isfinite([*watch.powers.values(), *np.concatenate([[0.0], *watch.errors.values()])]).all():
            raise InputError("outputs are NaN or infinite: look at the data, or train the network first")
        return OutputErrors(powers=watch.powers, errors=watch.errors, seconds=time.perf_counter() - start)

    @cached_property
    def _copy(self) -> nn.Module:
        copy = lower(self.model, {}).eval()
        remember_weights_(copy)
        return copy

    @cached_property
    def _fresh(self) -> Fresh:
        return Fresh(self._copy)


class OutputWatch(WeightWatch):
    """Adds up squares of what layers give out, and of what other weights would change about it.

    `lowered` says of a layer that multiplies its weight which quantizers would make these.
    """

    def __init__(self, lowered: Callable[[Multiplied], Iterable[WeightQuantizer]]) -> None:
        super().__init__()
        self._lowered = lowered
        self.powers: dict[str, float] = {}
        self.errors: dict[str, tuple[float, ...]] = {}

    def see(self, call: Multiplied) -> None:
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

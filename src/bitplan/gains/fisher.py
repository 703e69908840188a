"""Fisher: a group gains what the loss is expected to rise by when it is lowered, from gradients of single samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.adapters.torch import widen_tensor
from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import STREAMED
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains, Streams
from bitplan.gains.drop import MeasuredBatches, add_top
from bitplan.gains.jobs import BatchWork, check_samples, do_jobs, lowered_jobs, members_of, seconds_of
from bitplan.gains.lowering import check_seen, check_task, check_top
from bitplan.gains.rerun import FixedCopy
from bitplan.quant.convert import quantizers_of
from bitplan.quant.lsq import sum_products
from bitplan.quant.other_precisions import FreshQuantizers, is_off, lower_weights, rescale_copy
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import Quantizers
from bitplan.tasks.base import Task, WithAnswers, WithLoss, measuring_split
from bitplan.weights.opened import CheckpointLike

Labels = Literal["model", "task"]
Quantizer = WeightQuantizer | InputQuantizer


@dataclass(frozen=True)
class Fisher(Gain):
    """Chen et al. 2021, "Towards Mixed-Precision Quantization of Neural Networks via Constrained Optimization".

    ω(c) = 1/(2N)·Σ_n ⟨∇ℓ_n, Q_c(v) − Q_top(v)⟩², where v are the weights and the inputs of a group, added up before
    squaring; value(c) = ω(c0) − ω(c). The network is the one at the highest choice, in inference mode, differentiated
    straight through its rounding; its loss is taken to be at a minimum, and of its Hessian only the outer products of
    the samples' gradients are kept. With labels "task", as published, ℓ is the task's loss; with "model" labels are
    drawn from what the network answers, so that the mean is the Gauss-Newton matrix and none is looked at. The paper
    itself could not be read: this is what its abstract and others' code say of it. Its greedy selection is left to
    `exact`.

    One pass forward and one back for each sample, however many groups there are. Errors are from differences between
    parts of `part` samples.
    """

    about: ClassVar[About] = About(True, passes="3·N", source="Chen et al. 2021")
    calibrates: ClassVar[bool] = True
    from_float: ClassVar[bool] = True
    streams: ClassVar[Streams] = "large"

    samples: int = 512
    part: int = 64
    labels: Labels = "model"

    def __post_init__(self) -> None:
        check_samples("fisher", self.samples, self.part)
        if self.labels not in get_args(Labels):
            raise InputError(f"fisher takes labels from the model or from the task, not from {self.labels!r}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Return the gains, by one pass forward and one back for each sample; a file is run block by block."""
        if isinstance(model, CheckpointLike):
            return STREAMED.get("fisher")(self, model, graph, choices, context).gains(graph)
        task, jobs = self._jobs(model, graph, choices, context)
        done = do_jobs(SquaredSlopes(model, task), jobs, context, "fisher")
        names = [group.name for group in graph.selectable]
        low = np.array([[done[job.id].numbers[name] for job in jobs] for name in names])  # (G, B, C − 1), from float C
        table = add_top(-low.transpose(0, 2, 1) / 2, 0.0, len(names), len(choices))  # towards itself nothing leans
        samples = sum(job.count for job in jobs)
        return MeasuredBatches(table, 3, samples, seconds_of(done.values())).gains(graph)

    def _jobs(
        self, model: nn.Module, graph: Graph, choices: Sequence[Precision], context: Context
    ) -> tuple[Task, list[Job]]:
        """Return the task, and a job for each whole part of its samples."""
        needed = WithAnswers if self.labels == "model" else WithLoss
        task = check_task(context.task, "fisher", "differentiates the answers to data", needed)
        check_top(model, graph, choices, "fisher")
        check_seen("fisher", choices)
        available = min(self.samples, context.task.size(measuring_split(context.task)))
        count = min(self.part, available)
        (job,) = lowered_jobs(
            "fisher", model, graph, context, [{}], available, 1, members=members_of(graph), choices=tuple(choices),
            count=count, options={"labels": self.labels},
        )  # fmt: skip
        return task, parts_of(job, available)


def parts_of(job: Job, samples: int) -> list[Job]:
    """Return the same job for each whole part of so many samples."""
    parts = []
    for first in range(0, samples - job.count + 1, job.count):
        label = f"samples {first + 1} to {first + job.count}"
        parts.append(job.model_copy(update={"first": first, "label": label}))
    return parts


@dataclass(frozen=True)
class SquaredSlopes(BatchWork):
    """Return for each group the mean over some samples of the squared slope towards each choice below the highest."""

    def __call__(self, job: Job) -> Numbers:
        """Return the means by group."""
        model, quantizers = self._copy.network, self._copy.quantizers
        from_float = all(is_off(quantizers[layer]) for layers in job.members.values() for layer in layers)
        choices = job.choices if from_float else job.choices[:-1]
        squares = np.zeros((len(job.members), len(choices)))
        by_task = job.option("labels") == "task"
        with watch_slopes(model, job.members, choices, self._copy.fresh) as towards, torch.enable_grad():
            for number, batch in enumerate(self.drawn(job)[job.first : job.first + job.count], start=job.first):
                outputs = self.task.forward(model, batch)
                if by_task:
                    loss = self.task.loss(outputs, batch)
                else:
                    loss = draw_loss(self.task.logits(outputs), seed=job.seed * 1_000_003 + number)
                squares += np.square(towards(loss)) / job.count
                charge(Spend(forwards=1, backwards=1, labels=by_task))
        if not np.isfinite(squares).all():
            raise InputError("gradients are NaN or infinite: look at the data, or train the network first")
        return dict(zip(job.members, squares.tolist(), strict=True))

    @cached_property
    def _copy(self) -> FixedCopy:
        return FixedCopy(self.model, lambda copy: copy.eval().requires_grad_(False))


def draw_loss(answers: Sequence[Tensor], seed: int) -> Tensor:
    """Return −log p of labels drawn from the answers (1, classes, …) themselves.

    If a sample has several answers, such as pixels, it is divided by the root of their number: squared gradients
    then have the mean that belongs to a loss which is a mean over them.
    """
    generator = torch.Generator().manual_seed(seed)
    losses, count = [], 0
    for scores in answers:
        rows = widen_tensor(scores.movedim(1, -1).flatten(0, -2))  # (answers, classes)
        if not rows.detach().isfinite().all():
            raise InputError("the network's own answers are NaN or infinite: look at its weights, or train it first")
        chances = rows.detach().double().softmax(dim=1).cpu()
        labels = torch.multinomial(chances, 1, generator=generator).squeeze(1).to(rows.device)
        losses.append(F.cross_entropy(rows, labels, reduction="sum"))
        count += len(rows)
    return torch.stack(losses).sum() / math.sqrt(count)


@contextmanager
def watch_slopes(
    model: nn.Module,
    members: dict[str, tuple[str, ...]],
    choices: Sequence[Precision],
    fresh: FreshQuantizers | None = None,
) -> Iterator[Callable[[Tensor], np.ndarray]]:
    """A function that differentiates a loss of this model towards each of these choices, (G, choices).

    The quantizers of a group give their tensors out as ever; a gradient that comes back to one is multiplied by what
    each choice would change there.
    """
    found = torch.zeros(len(members), len(choices), dtype=torch.float64)
    quantizers, fresh = quantizers_of(model), fresh or FreshQuantizers(model)
    hooks = []
    for row, layers in enumerate(members.values()):
        seen: dict[int, tuple[Quantizer, list[Quantizer]]] = {}
        for layer in layers:
            for quantizer, lowered in _lowered(layer, quantizers[layer], choices, fresh):
                seen[id(quantizer)] = quantizer, lowered  # linked layers share theirs
        hooks += [
            quantizer.register_forward_hook(_Waiting(found[row], lowered), with_kwargs=True)
            for quantizer, lowered in seen.values()
        ]

    def towards(loss: Tensor) -> np.ndarray:
        found.zero_()
        loss.backward()
        return found.numpy().copy()

    try:
        yield towards
    finally:
        for hook in hooks:
            hook.remove()


def _lowered(
    layer: str, found: Quantizers, choices: Sequence[Precision], fresh: FreshQuantizers
) -> Iterator[tuple[Quantizer, list[Quantizer]]]:
    """Each quantizer of a layer, and copies of it at these choices, of one that is off fresh ones; those around a
    softmax stay."""
    if found.weight is not None:
        yield found.weight, list(lower_weights(layer, found, choices, fresh))
    for quantizer in (one for one in found.inputs if not one.masked):
        yield quantizer, [rescale_copy(quantizer, choice.act_bits) for choice in choices]


class _Waiting:
    """What a quantizer does after its forward pass: wait for the gradient of what it gave out."""

    def __init__(self, slopes: Tensor, lowered: Sequence[Quantizer]) -> None:
        self.slopes, self.lowered = slopes, lowered
        self._kept: dict[int, list[Tensor]] = {}

    def __call__(self, quantizer: Quantizer, given: tuple[Any, ...], options: dict[str, Any], out: Tensor) -> Tensor:
        watched = out if out.requires_grad else out.detach().requires_grad_()
        changes = self._changes(quantizer, given, options, out.detach())

        def add(gradient: Tensor) -> None:
            for place, change in enumerate(changes):
                self.slopes[place] += float(sum_products(gradient.to(change.dtype), change))

        watched.register_hook(add)
        return watched

    @torch.no_grad()
    def _changes(
        self, quantizer: Quantizer, given: tuple[Any, ...], options: dict[str, Any], out: Tensor
    ) -> list[Tensor]:
        """What the lower choices would make of it, less what it is; of a weight that never changes, found once."""
        tensor = given[0]
        fixed = isinstance(tensor, nn.Parameter) and not options
        if fixed and id(tensor) in self._kept:
            return self._kept[id(tensor)]
        changes = []
        for lowered in self.lowered:
            scaled = dict(options)
            if options.get("step") is not None:  # rows of a weight come with their steps
                scaled["step"] = options["step"] * 2.0 ** (quantizer.bits - lowered.bits)
            changes.append(lowered(*given, **scaled) - out)
        if fixed:
            self._kept[id(tensor)] = changes
        return changes

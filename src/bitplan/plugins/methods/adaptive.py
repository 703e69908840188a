"""Adaptive quantization: a group gains by the noise that its bits make of the answers, and by how much these bear."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.jobs import BatchWork, check_samples, do_jobs, lowered_jobs, seconds_of
from bitplan.gains.lowering import check_seen, check_task, check_top, lower, rows_by_layer, sign_for, try_task
from bitplan.quant.convert import quantizers_of, weights_of
from bitplan.tasks.base import Batch, samples_in

_SMALLEST = 2.0**-7  # the first level of noise, in standard deviations of the weights; each further one is doubled


@dataclass(frozen=True)
class Adaptive(Gain):
    """The noise that a group's bits make of the answers, over the noise there that costs a given score.

    Zhou et al. 2018, "Adaptive Quantization for Deep Neural Network", recalled and as others report it, not read. The
    noise that quantizing a group's weights to b bits makes of the last features falls as p·4^(−b); t is the noise
    there, made by perturbing that group alone, at which the score falls by `fall`. The optimum has p·4^(−b)/(t·size)
    equal for all groups, so that value(c) = (p/t)·(4^(−b0) − 4^(−b)), with b the bits of c's weights. p is measured
    once, between the group's weights as they are and at the highest choice; t from uniform noise at `levels` levels,
    each double the one before, between which the fall is interpolated. The last features are the class scores. The rule
    of 4^(−b) is one of fine grids: it is wrong at 2 bits. Labels, no training.
    """

    about: ClassVar[About] = About(True, True, passes="N·G·(2 + levels)", source="Zhou et al. 2018")
    calibrates: ClassVar[bool] = True

    samples: int = 256
    batch_size: int = 64
    levels: int = 10
    fall: float = 5.0

    def __post_init__(self) -> None:
        check_samples("adaptive", self.samples, self.batch_size)
        if self.levels < 2:
            raise InputError(f"adaptive needs at least 2 levels of noise, not {self.levels}")
        if not 0 < self.fall < math.inf:
            raise InputError(f"adaptive: fall is a loss of score above 0, not {self.fall}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Two passes, and one for each level of noise, over the samples for each group."""
        task = check_task(context.task, "adaptive", "runs the network on labelled data")
        check_top(model, graph, choices, "adaptive")
        check_seen("adaptive", choices, inputs=False)
        try_task(lower(model, {}), task, "score", "adaptive")
        every = [{group.name: choices[-1]} for group in graph.selectable]
        options = {"levels": self.levels, "fall": self.fall}
        jobs = lowered_jobs("adaptive", model, graph, context, every, self.samples, self.batch_size, options=options)
        done = do_jobs(Perturb(model, task), jobs, context, "adaptive")
        top = choices[-1].weight_bits
        rows = {}
        for group, job in zip(graph.selectable, jobs, strict=True):
            noise = done[job.id]
            rows[group.name] = row_of(noise.value("own") * 4.0**top, noise.value("borne"), choices)
        passes = (2 + self.levels) * len(jobs)
        return LayerGains(
            rows_by_layer(graph, rows),
            counts={"passes": passes, "samples": passes * jobs[0].samples},
            work=seconds_of(done.values()),
        )


def row_of(noise: float, borne: float, choices: Sequence[Precision]) -> tuple[float, ...]:
    """(p/t)·(4^(−b0) − 4^(−b)) for each choice."""
    bits = [choice.weight_bits for choice in choices]
    return tuple(noise / borne * (4.0 ** -bits[0] - 4.0**-own) for own in bits)


@dataclass(frozen=True)
class Perturb(BatchWork):
    """Run a group's weights as they are, quantized, and with more and more noise.

    Return the mean squared distances of answers: those of the group's own quantization, and those that the score bears.
    """

    def __call__(self, job: Job) -> Numbers:
        """Return the noise of its quantization, `own`, and the noise that costs the score its fall, `borne`."""
        model = lower(self.model, {}).eval()
        batches, weights, quantizers = self.drawn(job), weights_of(model), quantizers_of(model)
        members = [layer for layer in job.layers if layer in weights]
        with torch.no_grad():
            quantized, _ = self._answers(model, batches)
            for layer in members:
                quantizers[layer].weight.enabled = False  # type: ignore[union-attr]
            plain, score = self._answers(model, batches)
            levels = [
                self._perturbed(model, [weights[layer] for layer in members], job, n)
                for n in range(job.option("levels"))
            ]
        noises = [_noise(answers, plain) for answers, _ in levels]
        falls = [sign_for("score", self.task) * (score - other) for _, other in levels]
        borne = noise_borne(noises, falls, job.option("fall"))
        if not (math.isfinite(borne) and all(map(math.isfinite, noises))):
            raise InputError("the answers are NaN or infinite with noise in its weights: train the network first")
        return {"own": (_noise(quantized, plain),), "borne": (borne,)}

    def _answers(self, model: nn.Module, batches: Sequence[Batch]) -> tuple[list[Tensor], float]:
        answers, scores = [], []
        for batch in batches:
            outputs = self.task.forward(model, batch)
            answers += [scores.double() for scores in self.task.logits(outputs)]
            scores.append(float(self.task.batch_score(outputs, batch)))
            charge(Spend(forwards=samples_in(batch), labels=True))
        charge(Spend(evaluations=1))
        return answers, float(np.mean(scores))

    def _perturbed(
        self, model: nn.Module, weights: Sequence[Tensor], job: Job, level: int
    ) -> tuple[list[Tensor], float]:
        """Answers and score with uniform noise, which is taken off again."""
        kept = [weight.clone() for weight in weights]
        seed = int.from_bytes(hashlib.sha256(f"{job.groups} {job.seed}".encode()).digest()[:4], "big")
        draw = torch.Generator().manual_seed(seed)  # the same direction at every level
        for weight in weights:
            size = _SMALLEST * 2**level * float(weight.std(correction=0)) * math.sqrt(3)
            weight.add_((2 * torch.rand(weight.shape, generator=draw) - 1).to(weight) * size)
        found = self._answers(model, self.drawn(job))
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)
        return found


def noise_borne(noises: Sequence[float], falls: Sequence[float], fall: float) -> float:
    """The noise at which the score falls by so much, between two levels; where none does, the greatest that was tried.

    Never 0: a group whose noise does not reach the answers at all bears any.
    """
    before = 0.0, 0.0  # noise, fall
    for noise, now in zip(noises, falls, strict=True):
        if now >= fall:
            share = (fall - before[1]) / (now - before[1]) if now > before[1] else 1.0
            return max(before[0] + share * (noise - before[0]), np.finfo(float).tiny)
        before = noise, max(now, 0.0)
    return max(max(noises), np.finfo(float).tiny)


def _noise(answers: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """The mean over samples of the squared distance of answers."""
    squares = [(a - b).square().flatten(1).sum(dim=1) for a, b in zip(answers, plain, strict=True)]
    return float(torch.cat(squares).mean())

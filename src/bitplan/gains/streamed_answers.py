"""Drift and fisher from a file: a network that is never in memory whole, lowered and run block after block.

For drift, a block is read once for some lowered networks, and run on the state of each; what lies before a lowered
layer is that of the network as it is. For fisher, blocks are read once forward and once back. The peak is a few blocks
and these states, never the network.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from bitplan.core.errors import InputError
from bitplan.core.jobs import Drifted, Drifts, Dropped, Sloped, Slopes
from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.forward.operations import tensors_in
from bitplan.gains.base import Context
from bitplan.gains.drop import MeasuredBatches, one_at_a_time, sizes_for, with_top
from bitplan.gains.finetuned import Expected, seconds_of
from bitplan.gains.foreseen import known, timed
from bitplan.gains.lowering import layers_of
from bitplan.gains.measuring import check_task
from bitplan.gains.rerun import mixed
from bitplan.gains.streamed_network import StreamedNetwork, about_file, check_weights_alone
from bitplan.gains.through_blocks import Through
from bitplan.tasks.base import Batch, Task, WithAnswers, WithLoss
from bitplan.tasks.choosing import judged_by
from bitplan.weights.opened import CheckpointLike, opened_as

if TYPE_CHECKING:
    from bitplan.gains.drift import Drift
    from bitplan.gains.fisher import Fisher

_TOGETHER = 16  # lowered networks that go through the file at once: what a kill loses, for as many times less reading
_ROWS = 256  # of a matrix, that are timed to tell how long all will take

Job = TypeVar("Job", bound=Dropped)
Outcome = TypeVar("Outcome", bound=Record)


def streamed_drift(
    asked: Drift, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """What `Drift.measure` finds of the same network in memory."""
    task, jobs = drift_jobs(asked, model, graph, choices, context)
    kept = _KeptOutcomes(jobs, context, Drifts)
    if kept.left:
        network = StreamedNetwork(model, graph, choices, context)
        through = Through(network, task, _drawn(task, jobs[0]))
        starts = {job.id: through.first_of(job.layers) for job in kept.left}
        waiting = sorted(kept.left, key=lambda job: starts[job.id])
        through.run_reference()
        for some in _slices(waiting):
            begun = time.perf_counter()
            for job, moved in through.drifts(some, min(starts[job.id] for job in some)):
                kept.keep(job, Drifts(divergences=moved, seconds=(time.perf_counter() - begun) / len(some)))
    charge(Spend(forwards=(1 + len(jobs)) * jobs[0].batches * jobs[0].batch_size, evaluations=len(jobs)))
    low = -np.array([kept.done[job.id].divergences for job in jobs])  # (G C, B)
    samples = (1 + len(jobs)) * jobs[0].batches * jobs[0].batch_size
    table = with_top(low, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 1 + len(jobs), samples, seconds_of(kept.done.values()))


def streamed_slopes(
    asked: Fisher, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """What `Fisher` finds of the same network in memory."""
    task, jobs = fisher_jobs(asked, model, graph, choices, context)
    kept = _KeptOutcomes(jobs, context, Slopes)
    if kept.left:
        network = StreamedNetwork(model, graph, choices, context)
        batches = _drawn(task, jobs[0])
        for job in kept.left:
            begun = time.perf_counter()
            through = Through(network, task, batches[job.first : job.first + job.count])
            squares = np.square(through.slopes(job)).mean(axis=0)  # (G, C)
            if not np.isfinite(squares).all():
                raise InputError("gradients are NaN or infinite: look at the data, or at the weights")
            rows = zip(job.members, squares.tolist(), strict=True)
            found = {name: tuple(row) for name, row in rows}
            kept.keep(job, Slopes(squares=found, seconds=time.perf_counter() - begun))
    samples = sum(job.count for job in jobs)
    charge(Spend(forwards=samples, backwards=samples, labels=asked.labels == "task"))
    low = np.array([[kept.done[job.id].squares[group.name] for job in jobs] for group in graph.selectable])  # (G, B, C)
    table = with_top(-low.transpose(0, 2, 1) / 2, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 3, samples, seconds_of(kept.done.values()))


def drift_jobs(
    asked: Drift, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> tuple[Task, list[Drifted]]:
    """Each group at each choice, from the float network."""
    task = check_task(context.task, "drift", "runs the network on data", WithAnswers)
    check_weights_alone(choices, "drift")
    batches, size = sizes_for(task, asked.samples, asked.batch_size)
    about = about_file(opened_as(model), choices, context) | {"batches": batches, "batch_size": size}
    return task, [
        Drifted(groups=tuple(one), layers=layers_of(graph, one), temperature=asked.temperature, **about)
        for one in one_at_a_time(graph, choices)
    ]


def fisher_jobs(
    asked: Fisher, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> tuple[Task, list[Sloped]]:
    """Whole parts of the samples."""
    needed = WithAnswers if asked.labels == "model" else WithLoss
    task = check_task(context.task, "fisher", "differentiates the answers to data", needed)
    check_weights_alone(choices, "fisher")
    available = min(asked.samples, task.size(judged_by(task)))
    count = min(asked.part, available)
    members = {group.name: tuple(layer.name for layer in group.layers) for group in graph.selectable}
    about = about_file(opened_as(model), choices, context) | {"batches": available, "batch_size": 1, "groups": ()}
    about |= {"layers": {}, "members": members, "choices": tuple(choices), "labels": asked.labels, "count": count}
    return task, [Sloped(first=first, **about) for first in range(0, available - count + 1, count)]


def streamed_expected(
    jobs: Sequence[Dropped], passes: float, called: str, task: Task, graph: Graph, context: Context
) -> Expected | None:
    """What jobs take of which each is so many passes through all layers, by the products of a few rows."""
    done = {job.id for job in jobs} & (set() if context.shelf is None else context.shelf.ids())
    left = len(jobs) - len(done)
    layers = [layer for group in graph.selectable for layer in group.layers if layer.weights]
    part = torch.linspace(-1, 1, _ROWS * max(layer.in_features or 1 for layer in layers)).view(_ROWS, -1)
    product = min(timed(lambda: part @ part.T) for _ in range(2)) / (part.numel() * _ROWS)
    tokens = sum(leaf.numel() for leaf in tensors_in(next(iter(task.batches(judged_by(task), 1)))))
    each = product * tokens * passes * sum(layer.weights for layer in layers)
    return known(len(jobs), len(done), called, left * jobs[0].batches * jobs[0].batch_size, left * each)


class _KeptOutcomes(Generic[Job, Outcome]):
    """Which jobs are done, kept in a store where there is one; how far it is."""

    def __init__(self, jobs: Sequence[Job], context: Context, kind: type[Outcome]) -> None:
        self._shelf = None if context.shelf is None else context.shelf.holding(kind)
        self._jobs, self._progress = jobs, context.progress
        found = {} if self._shelf is None else {job.id: self._shelf.find(job.id) for job in jobs}
        self.done = {key: outcome for key, outcome in found.items() if outcome is not None}
        self.left = [job for job in jobs if job.id not in self.done]

    def keep(self, job: Job, outcome: Outcome) -> None:
        """Keep it, and tell."""
        self.done[job.id] = outcome
        if self._shelf is not None:
            self._shelf.keep(job.id, outcome)
        if self._progress is not None:
            self._progress(len(self.done), len(self._jobs), job.words)


def _slices(jobs: list[Drifted]) -> Iterator[list[Drifted]]:
    """Some at a time, those behind each other together."""
    return (jobs[start : start + _TOGETHER] for start in range(0, len(jobs), _TOGETHER))


def _drawn(task: Task, job: Dropped) -> list[Batch]:
    """The batches that a network in memory would be run on."""
    every = task.batches(judged_by(task), job.batch_size, seed=mixed(job.seed))
    found = list(itertools.islice(every, job.batches))
    if len(found) < job.batches:
        raise InputError(f"task {task.name} ran out of batches after {len(found)} of {job.batches}: check its data")
    return found

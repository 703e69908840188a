"""Drift and fisher from a file: a network that is never in memory whole, lowered and run block after block.

For drift, a block is read once for some lowered networks, and run on the state of each; what lies before a lowered
layer is that of the network as it is. For fisher, blocks are read once forward and once back. The peak is a few blocks
and these states, never the network.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

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
from bitplan.models.chained import Calls, Chain
from bitplan.quant.lsq import summed_products
from bitplan.tasks.base import Batch, Task, WithAnswers, WithLoss
from bitplan.tasks.choosing import judged_by
from bitplan.tune.distill import divergence
from bitplan.weights.opened import CheckpointLike, opened_as

if TYPE_CHECKING:
    from bitplan.gains.drift import Drift
    from bitplan.gains.fisher import Fisher

_TOGETHER = 16  # lowered networks that go through the file at once: what a kill loses, for as many times less reading
_ROWS = 256  # of a matrix, that are timed to tell how long all will take
_NEAR = 1e-3  # of the largest score: how far answers block by block may be from those of the network

Job = TypeVar("Job", bound=Dropped)
Outcome = TypeVar("Outcome", bound=Record)


def streamed_drift(
    asked: Drift, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """What `Drift.measure` finds of the same network in memory."""
    task, jobs = drift_jobs(asked, model, graph, choices, context)
    done: dict[str, Drifts] = {}
    ledger = _Ledger(jobs, context, Drifts, done)
    if ledger.left:
        network = StreamedNetwork(model, graph, choices, context)
        through = Through(network, task, _drawn(task, jobs[0]))
        starts = {job.id: through.first_of(job.layers) for job in ledger.left}
        waiting = sorted(ledger.left, key=lambda job: starts[job.id])
        through.run_reference()
        for some in _slices(waiting):
            begun = time.perf_counter()
            for job, moved in through.drifts(some, min(starts[job.id] for job in some)):
                ledger.keep(job, Drifts(divergences=moved, seconds=(time.perf_counter() - begun) / len(some)))
    charge(Spend(forwards=(1 + len(jobs)) * jobs[0].batches * jobs[0].batch_size, evaluations=len(jobs)))
    low = -np.array([done[job.id].divergences for job in jobs])  # (G C, B)
    samples = (1 + len(jobs)) * jobs[0].batches * jobs[0].batch_size
    table = with_top(low, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 1 + len(jobs), samples, seconds_of(done.values()))


def streamed_slopes(
    asked: Fisher, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """What `Fisher` finds of the same network in memory."""
    task, jobs = fisher_jobs(asked, model, graph, choices, context)
    done: dict[str, Slopes] = {}
    ledger = _Ledger(jobs, context, Slopes, done)
    if ledger.left:
        network = StreamedNetwork(model, graph, choices, context)
        batches = _drawn(task, jobs[0])
        for job in ledger.left:
            begun = time.perf_counter()
            through = Through(network, task, batches[job.first : job.first + job.count])
            squares = np.square(through.slopes(job)).mean(axis=0)  # (G, C)
            if not np.isfinite(squares).all():
                raise InputError("gradients are NaN or infinite: look at the data, or at the weights")
            rows = zip(job.members, squares.tolist(), strict=True)
            found = {name: tuple(row) for name, row in rows}
            ledger.keep(job, Slopes(squares=found, seconds=time.perf_counter() - begun))
    samples = sum(job.count for job in jobs)
    charge(Spend(forwards=samples, backwards=samples, labels=asked.labels == "task"))
    low = np.array([[done[job.id].squares[group.name] for job in jobs] for group in graph.selectable])  # (G, B, C)
    table = with_top(-low.transpose(0, 2, 1) / 2, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 3, samples, seconds_of(done.values()))


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


class Through:
    """Some batches on their way through the blocks of a network in a file."""

    def __init__(self, network: StreamedNetwork, task: Task, batches: Sequence[Batch]) -> None:
        self._network, self._task, self._batches = network, task, batches
        self._chain = Chain(network.module, network.opened)
        answers = task.logits(self._chain.first(self._running(batches[0])))
        self._calls = [self._chain.calls(self._running(batch)) for batch in batches]
        self._layers = [network.layers_in(unit) for unit in (*self._chain.blocks, *self._chain.after)]
        unseen = set(network.layers).difference(*self._layers)
        if unseen:
            raise InputError(f"layer {min(unseen)!r} runs before all blocks: load the network, and estimate from that")
        self._states = [[calls.first for calls in self._calls]]  # of the network as it is, before each block
        self._own: list[tuple[Tensor, ...]] = []
        self._expected = answers

    def first_of(self, layers: Sequence[str] | dict[str, Precision]) -> int:
        """The number of the first block that one of these layers is in; behind all blocks it is their number."""
        found = next(place for place, there in enumerate(self._layers) if not set(there).isdisjoint(layers))
        return min(found, len(self._chain.blocks))

    @torch.no_grad()
    def run_reference(self) -> None:
        """Run the network as it is, and keep what each block is given."""
        for number, block in enumerate(self._chain.blocks):
            with block.reading():
                pairs = zip(self._calls, self._states[-1], strict=True)
                self._states.append([self._chain.run(number, calls, state) for calls, state in pairs])
        with self._chain.reading_after():
            self._own = [self._answers(place, state) for place, state in enumerate(self._states[-1])]
        for scores, expected in zip(self._own[0], self._expected, strict=True):
            if not scores.isfinite().all():
                raise InputError("the network's own answers are NaN or infinite: look at its weights")
            if float((scores - expected).abs().max()) > _NEAR * float(expected.abs().max()):
                raise InputError(
                    f"run block by block, the network of {self._network.opened.path} answers otherwise than as a "
                    "whole: load it, and estimate from that"
                )

    @torch.no_grad()
    def drifts(self, jobs: Sequence[Drifted], first: int) -> Iterator[tuple[Drifted, tuple[float, ...]]]:
        """How far each lowered network's answers are from those of the network as it is, on every batch."""
        states = [self._states[first] for _ in jobs]
        for number in range(first, len(self._chain.blocks)):
            with self._chain.blocks[number].reading():
                for place, job in enumerate(jobs):
                    states[place] = self._onward(number, job.layers, states[place])
        with self._chain.reading_after():
            for job, own in zip(jobs, states, strict=True):
                behind = {layer: job.layers[layer] for layer in self._behind if layer in job.layers}
                with self._network.lowered(behind):
                    answers = [self._answers(place, state) for place, state in enumerate(own)]
                pairs = zip(answers, self._own, strict=True)
                yield job, tuple(float(divergence(now, then, job.temperature)) for now, then in pairs)

    def _onward(self, number: int, layers: dict[str, Precision], states: list[Tensor]) -> list[Tensor]:
        """What a block makes of the states of all batches, these of its layers lowered."""
        here = {layer: layers[layer] for layer in self._layers[number] if layer in layers}
        if not here and states is self._states[number]:
            return self._states[number + 1]
        with self._network.lowered(here):
            pairs = zip(self._calls, states, strict=True)
            return [self._chain.run(number, calls, state) for calls, state in pairs]

    def slopes(self, job: Sloped) -> np.ndarray:
        """The slope of each sample's loss towards each choice, added up over a group: (samples, G, C)."""
        self.run_reference()
        rows = {layer: row for row, layers in enumerate(job.members.values()) for layer in layers}
        found = np.zeros((len(self._batches), len(job.members), len(job.choices)))
        with self._chain.reading_after():
            back = self._slopes_in(self._behind, job, found, rows, partial(self._loss, job))
        for number in reversed(range(len(self._chain.blocks))):
            with self._chain.blocks[number].reading():
                back = self._slopes_in(self._layers[number], job, found, rows, partial(self._pulled, number, back))
        return found

    def _slopes_in(
        self, layers: Sequence[str], job: Sloped, found: np.ndarray, rows: dict[str, int], towards: Any
    ) -> list[Tensor]:
        """Add the slopes of some layers, which have their data; what comes back to the states before them."""
        weights = [self._network.weight(layer).requires_grad_() for layer in layers]
        changes = [
            [self._change(layer, choice.weight_bits) for choice in job.choices] for layer in layers
        ]  # as many as choices, of all weights of a block
        back = []
        for place in range(len(self._batches)):
            with torch.enable_grad():
                state, pulled = towards(place)
                gradients = torch.autograd.grad(pulled, [state, *weights])
            back.append(gradients[0])
            for layer, gradient, some in zip(layers, gradients[1:], changes, strict=True):
                found[place, rows[layer]] += [float(_product(gradient, change)) for change in some]
        return back

    def _loss(self, job: Sloped, place: int) -> tuple[Tensor, Tensor]:
        """The last state of a batch, and its loss."""
        from bitplan.gains.fisher import drawn_loss  # here, since it asks this file how to run

        state = self._states[-1][place].detach().requires_grad_()
        batch = self._batches[place]
        outputs = self._chain.answers(self._calls[place], state, self._running(batch))
        if job.labels == "task":
            return state, self._task.loss(outputs, batch)
        return state, drawn_loss(self._task.logits(outputs), seed=job.seed * 1_000_003 + job.first + place)

    def _pulled(self, number: int, back: list[Tensor], place: int) -> tuple[Tensor, Tensor]:
        """The state before a block, and what has the same gradient there as the loss."""
        state = self._states[number][place].detach().requires_grad_()
        return state, (self._chain.run(number, self._calls[place], state) * back[place]).sum()

    @torch.no_grad()
    def _change(self, layer: str, bits: int) -> Tensor:
        """What so many bits change about a weight."""
        weight = self._network.weight(layer)
        return self._network.fitted(layer, weight.detach(), bits)(weight.detach()) - weight

    @property
    def _behind(self) -> list[str]:
        """Layers that run after all blocks."""
        return list(itertools.chain.from_iterable(self._layers[len(self._chain.blocks) :]))

    def _answers(self, place: int, state: Tensor) -> tuple[Tensor, ...]:
        calls: Calls = self._calls[place]
        return self._task.logits(self._chain.answers(calls, state, self._running(self._batches[place])))

    def _running(self, batch: Batch) -> Any:
        return lambda: self._task.forward(self._network.module, batch)


@dataclass
class _Ledger:
    """Which jobs are done, kept in a store where there is one; how far it is."""

    jobs: Sequence[Any]
    context: Context
    kind: type[Any]
    done: dict[str, Any]
    left: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        shelf = self.context.shelf
        self._shelf = None if shelf is None else shelf.holding(self.kind)
        for job in self.jobs:
            kept = None if self._shelf is None else self._shelf.find(job.id)
            if kept is None:
                self.left.append(job)
            else:
                self.done[job.id] = kept

    def keep(self, job: Any, outcome: Any) -> None:
        """Keep it, and tell."""
        self.done[job.id] = outcome
        if self._shelf is not None:
            self._shelf.keep(job.id, outcome)
        if self.context.progress is not None:
            self.context.progress(len(self.done), len(self.jobs), job.words)


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


def _product(gradient: Tensor, change: Tensor) -> Tensor:
    with torch.no_grad():
        return summed_products(gradient, change)

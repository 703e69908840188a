"""Drift and fisher from a file: a network that is never in memory whole, lowered and run block after block.

For drift, a block is read once for some lowered networks, and run on the state of each; what lies before a lowered
layer is that of the network as it is. For fisher, blocks are read once forward and once back. The peak is a few blocks
and these states, never the network.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Numbers, Outcome
from bitplan.core.naming import split_name
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context
from bitplan.gains.drop import MeasuredBatches, add_top
from bitplan.gains.jobs import (
    batches_within,
    members_of,
    mix_seed,
    one_at_a_time,
    options_of_task,
    seconds_of,
    with_lowered,
)
from bitplan.gains.lowering import check_task
from bitplan.models.block_sequence import BlockCalls, BlockChain
from bitplan.models.streamed import ReadUnit, skeleton_of
from bitplan.quant.convert import options_of, quantize_, quantizers_of
from bitplan.quant.layers import channels_of
from bitplan.quant.lsq import sum_products
from bitplan.quant.methods import read_method
from bitplan.quant.proof import take_proof_off_
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.scales import ScaleSharing
from bitplan.quant.sites import sites_of
from bitplan.tasks.base import Batch, Task, WithAnswers, WithLoss, measuring_split, title_of
from bitplan.tune.distillation import divergence
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, open_if_path

if TYPE_CHECKING:
    from bitplan.gains.drift import Drift
    from bitplan.gains.fisher import Fisher


_TOGETHER = 16  # lowered networks that go through the file at once: a kill loses these, for 16 times less reading


def measure_drift_of_file(
    asked: Drift, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """Return the measures of `Drift.measure`, of a network in a file."""
    task = check_task(context.task, "drift", "runs the network on data", WithAnswers)
    check_weights_alone(choices, "drift")
    batches, size = batches_within(task, asked.samples, asked.batch_size)
    job = job_on_file("drift", open_if_path(model), choices, context, batches, size).model_copy(
        update={"options": {"temperature": asked.temperature}}
    )
    jobs = [with_lowered(job, graph, lowered) for lowered in one_at_a_time(graph, choices)]
    kept = _KeptOutcomes(jobs, context)
    if kept.left:
        network = StreamedNetwork(model, graph, choices, context)
        through = Through(network, task, _drawn(task, jobs[0]))
        starts = {job.id: through.first_of(job.layers) for job in kept.left}
        waiting = sorted(kept.left, key=lambda job: starts[job.id])
        through.run_reference()
        for some in _slices(waiting):
            begun = time.perf_counter()
            for job, moved in through.drifts(some, min(starts[job.id] for job in some)):
                kept.keep(job, {"divergences": moved}, (time.perf_counter() - begun) / len(some))
    samples = (1 + len(jobs)) * job.samples
    charge(Spend(forwards=samples, evaluations=len(jobs)))
    low = -np.array([kept.done[job.id].numbers["divergences"] for job in jobs])  # (G C, B)
    table = add_top(low, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 1 + len(jobs), samples, seconds_of(kept.done.values()))


def measure_slopes_of_file(
    asked: Fisher, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
) -> MeasuredBatches:
    """Return the measures of `Fisher`, of a network in a file."""
    from bitplan.gains.fisher import parts_of  # here, since it asks this file how to run

    task = check_task(
        context.task, "fisher", "differentiates the answers to data",
        WithAnswers if asked.labels == "model" else WithLoss,
    )  # fmt: skip
    check_weights_alone(choices, "fisher")
    available = min(asked.samples, task.size(measuring_split(task)))
    job = job_on_file("fisher", open_if_path(model), choices, context, available, 1).model_copy(
        update={
            "members": members_of(graph), "choices": tuple(choices), "count": min(asked.part, available),
            "options": {"labels": asked.labels},
        }
    )  # fmt: skip
    jobs = parts_of(job, available)
    kept = _KeptOutcomes(jobs, context)
    if kept.left:
        network = StreamedNetwork(model, graph, choices, context)
        batches = _drawn(task, jobs[0])
        for job in kept.left:
            begun = time.perf_counter()
            through = Through(network, task, batches[job.first : job.first + job.count])
            squares = np.square(through.slopes(job)).mean(axis=0)  # (G, C)
            if not np.isfinite(squares).all():
                raise InputError("gradients are NaN or infinite: look at the data, or at the weights")
            kept.keep(job, dict(zip(job.members, squares.tolist(), strict=True)), time.perf_counter() - begun)
    samples = sum(job.count for job in jobs)
    charge(Spend(forwards=samples, backwards=samples, labels=asked.labels == "task"))
    low = np.array([[kept.done[job.id].numbers[group.name] for job in jobs] for group in graph.selectable])  # (G, B, C)
    table = add_top(-low.transpose(0, 2, 1) / 2, 0.0, len(graph.selectable), len(choices))
    return MeasuredBatches(table, 3, samples, seconds_of(kept.done.values()))


class _KeptOutcomes:
    """The outcomes of jobs that are done together; kept in the context's store, if there is one."""

    def __init__(self, jobs: Sequence[Job], context: Context) -> None:
        self._shelf = None if context.shelf is None else context.shelf.holding(Outcome)
        self._jobs, self._progress = jobs, context.progress
        found = {} if self._shelf is None else {job.id: self._shelf.find(job.id) for job in jobs}
        self.done = {key: outcome for key, outcome in found.items() if outcome is not None}
        self.left = [job for job in jobs if job.id not in self.done]

    def keep(self, job: Job, numbers: Numbers, seconds: float) -> None:
        """Keep the outcome of a job, and tell progress."""
        outcome = Outcome(numbers={name: tuple(row) for name, row in numbers.items()}, seconds=seconds)
        self.done[job.id] = outcome
        if self._shelf is not None:
            self._shelf.keep(job.id, outcome)
        if self._progress is not None:
            self._progress(len(self.done), len(self._jobs), job.words)


def _slices(jobs: list[Job]) -> Iterator[list[Job]]:
    """Some at a time, those behind each other together."""
    return (jobs[start : start + _TOGETHER] for start in range(0, len(jobs), _TOGETHER))


def _drawn(task: Task, job: Job) -> list[Batch]:
    """The batches that a network in memory would be run on."""
    every = task.batches(measuring_split(task), job.batch_size, seed=mix_seed(job.seed))
    found = list(itertools.islice(every, job.batches))
    if len(found) < job.batches:
        raise InputError(f"task {task.name} ran out of batches after {len(found)} of {job.batches}: check its data")
    return found


# --- Batches on their way through the blocks of a network in a file: lowered in many ways at once, or back for
# slopes.

_NEAR = 1e-3  # of the largest score: how far answers block by block may be from those of the network


class Through:
    """Some batches on their way through the blocks of a network in a file."""

    def __init__(self, network: StreamedNetwork, task: Task, batches: Sequence[Batch]) -> None:
        self._network, self._task, self._batches = network, task, batches
        self._chain = BlockChain(network.module, network.opened)
        answers = task.logits(self._chain.first(self._running(batches[0])))
        self._calls = [self._chain.calls(self._running(batch)) for batch in batches]
        self._layers = [network.layers_in(unit) for unit in (*self._chain.blocks, *self._chain.after)]
        unseen = set(network.layers).difference(*self._layers)
        if unseen:
            raise InputError(f"layer {min(unseen)!r} runs before all blocks: load the network, and estimate from that")
        self._states = [[calls.first for calls in self._calls]]  # of the network as it is, before each block
        self._own: list[tuple[Tensor, ...]] = []
        self._expected = answers

    def first_of(self, layers: Iterable[str]) -> int:
        """The number of the first block that has one of these layers; where none has, that behind the last."""
        within = (place for place, there in enumerate(self._layers) if not set(there).isdisjoint(layers))
        return min(next(within, len(self._chain.blocks)), len(self._chain.blocks))

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
    def drifts(self, jobs: Sequence[Job], first: int) -> Iterator[tuple[Job, tuple[float, ...]]]:
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
                moved = tuple(float(divergence(now, then, job.option("temperature"))) for now, then in pairs)
                if not np.isfinite(moved).all():
                    raise InputError(f"the answers are NaN or infinite with {job.words}: look at its weights")
                yield job, moved

    def _onward(self, number: int, layers: dict[str, Precision], states: list[Tensor]) -> list[Tensor]:
        """What a block makes of the states of all batches, these of its layers lowered."""
        here = {layer: layers[layer] for layer in self._layers[number] if layer in layers}
        if not here and states is self._states[number]:
            return self._states[number + 1]
        with self._network.lowered(here):
            pairs = zip(self._calls, states, strict=True)
            return [self._chain.run(number, calls, state) for calls, state in pairs]

    def slopes(self, job: Job) -> np.ndarray:
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
        self, layers: Sequence[str], job: Job, found: np.ndarray, rows: dict[str, int], towards: Any
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

    def _loss(self, job: Job, place: int) -> tuple[Tensor, Tensor]:
        """The last state of a batch, and its loss."""
        from bitplan.gains.fisher import draw_loss  # here, since it asks this file how to run

        state = self._states[-1][place].detach().requires_grad_()
        batch = self._batches[place]
        outputs = self._chain.answers(self._calls[place], state, self._running(batch))
        if job.option("labels") == "task":
            return state, self._task.loss(outputs, batch)
        return state, draw_loss(self._task.logits(outputs), seed=job.seed * 1_000_003 + job.first + place)

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
        calls: BlockCalls = self._calls[place]
        return self._task.logits(self._chain.answers(calls, state, self._running(self._batches[place])))

    def _running(self, batch: Batch) -> Any:
        return lambda: self._task.forward(self._network.module, batch)


def _product(gradient: Tensor, change: Tensor) -> Tensor:
    with torch.no_grad():
        return sum_products(gradient, change)


# --- A network in a folder of weights as gains run it: never in memory whole, and weights fitted where they are
# read.


class StreamedNetwork:
    """A network without data that knows its layers, their weights passing as they are.

    `layers` are those that have a choice, and weights.
    """

    def __init__(self, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context) -> None:
        self.opened = open_if_path(model)
        self.layers = [layer.name for group in graph.selectable for layer in group.layers if layer.weights]
        self.module = skeleton_of(self.opened)
        quantize_(self.module, Plan.uniform(graph, choices[-1]), method=context.quantizer_for(choices))
        take_proof_off_(self.module)  # by a copy of what has no data nothing is proven: what does not run is told
        self.quantizers = quantizers_of(self.module)
        for quantizer in (one for both in self.quantizers.values() for one in (both.weight, *both.inputs)):
            if quantizer is not None:
                quantizer.enabled = False  # none has data: they only tell whose weight it is
        self._sites, self._options = sites_of(self.module), options_of(self.module)
        self._method = read_method(self._options.method)
        self._by_channel = self._options.per_channel or self._method.rows

    def fitted(self, layer: str, weight: Tensor, bits: int) -> WeightQuantizer:
        """A quantizer for a weight that is in memory now."""
        module = self._sites[layer].module
        shared = ScaleSharing(channels_of(module, weight) if self._by_channel else None)
        return self._method.weight(weight, bits, shared, self._options).eval()

    def layers_in(self, unit: ReadUnit) -> list[str]:
        """Those of its layers that a unit holds."""
        inside = set(unit.module.modules())
        return [layer for layer in self.layers if self._sites[layer].module in inside]

    def weight(self, layer: str) -> nn.Parameter:
        """That of a layer whose unit has its data."""
        module, name = self._place(layer)
        found = module._parameters[name]
        assert found is not None, "a layer with a weight"
        return found

    @contextmanager
    def lowered(self, layers: Mapping[str, Precision]) -> Iterator[None]:
        """The weights of these layers, whose units have their data, as choices make them, until the block ends."""
        before = {layer: self.weight(layer) for layer in layers}
        try:
            for layer, own in before.items():
                made = self.fitted(layer, own, layers[layer].weight_bits)(own)
                self._put(layer, nn.Parameter(made.detach(), requires_grad=False))
            yield
        finally:
            for layer, own in before.items():
                self._put(layer, own)

    def _put(self, layer: str, weight: nn.Parameter) -> None:
        module, name = self._place(layer)
        module._parameters[name] = weight

    def _place(self, layer: str) -> tuple[nn.Module, str]:
        site = self._sites[layer]
        assert site.parameter is not None, "a layer with a weight"
        return site.module, split_name(site.parameter)[1]


def job_on_file(
    work: str, opened: OpenedCheckpoint, choices: Sequence[Precision], context: Context, batches: int, batch_size: int
) -> Job:  # fmt: skip
    """Return a job on the network of a file, which is identified by its name, size and time."""
    files = sorted(opened.path.glob("*.safetensors")) if opened.path.is_dir() else [opened.path]
    return Job(
        work=work, network=context.quantizer_for(choices), task=title_of(context.task), seed=context.seed,
        weights=" ".join(f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files),
        task_options=options_of_task(context.task), batches=batches, batch_size=batch_size,
    )  # fmt: skip


def check_weights_alone(choices: Sequence[Precision], method: str) -> None:
    """Refuse choices that quantize inputs: nothing calibrates a network in a file."""
    for choice in choices:
        if choice.quantizes_inputs or not choice.quantizes_weights:
            raise InputError(
                f"{method} from a file lowers weights alone, and {choice} is another choice: load the network, or "
                "choose among w2a16, w3a16 …"
            )

"""Batches on their way through the blocks of a network in a file: lowered in many ways at once, or back for slopes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.jobs import Drifted, Sloped
from bitplan.core.precision import Precision
from bitplan.gains.streamed_network import StreamedNetwork
from bitplan.models.chained import BlockCalls, BlockChain
from bitplan.quant.lsq import summed_products
from bitplan.tasks.base import Batch, Task
from bitplan.tune.distill import divergence

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
                moved = tuple(float(divergence(now, then, job.temperature)) for now, then in pairs)
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
        calls: BlockCalls = self._calls[place]
        return self._task.logits(self._chain.answers(calls, state, self._running(self._batches[place])))

    def _running(self, batch: Batch) -> Any:
        return lambda: self._task.forward(self._network.module, batch)


def _product(gradient: Tensor, change: Tensor) -> Tensor:
    with torch.no_grad():
        return summed_products(gradient, change)

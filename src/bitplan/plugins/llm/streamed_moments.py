"""Moments from a file: one pass, block after block, each read from the mapped file as it runs and then let go of.

The peak is a block with what it computes, never the network. Drift and fisher: `plugins/llm/streamed_gains.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite

import torch

from bitplan.core.errors import InputError
from bitplan.core.jobs import Job, Outcome
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.gains.base import Context
from bitplan.gains.lowering import check_task
from bitplan.models.streamed import streaming
from bitplan.plugins.llm.streamed_gains import StreamedNetwork, job_on_file
from bitplan.plugins.methods.moments import OutputWatch
from bitplan.quant.moments import Enough, WeightCall
from bitplan.tasks.base import WithData, measuring_split
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint


def measure_errors_of_file(
    model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context, samples: int
) -> Outcome:
    """Return the errors of all layers' outputs on one batch of samples. Stored layers are not measured again."""
    start = time.perf_counter()
    task = check_task(context.task, "moments", "looks at what layers read", WithData)
    network = StreamedNetwork(model, graph, choices, context)
    opened, layers = network.opened, network.layers
    count = min(samples, task.size(measuring_split(task)))
    batch = next(iter(task.batches(measuring_split(task), count, seed=context.seed)))
    watch = _LayerWatch(_Ledger(opened, choices, context, count, layers), network, choices)
    weights = {layer: quantizer for layer in layers if (quantizer := network.quantizers[layer].weight) is not None}
    with torch.no_grad(), streaming(network.module, opened), watch.watching(weights), suppress(Enough):
        task.forward(network.module, batch)
    charge(Spend(forwards=count * (1 + len(choices))))
    unseen = [layer for layer in layers if layer not in watch.powers]
    if unseen:
        raise InputError(f"nothing tells what layer {unseen[0]!r} reads: load the network, and estimate from it")
    return Outcome(numbers=watch.numbers, seconds=time.perf_counter() - start)


class _Ledger:
    """What is known of each layer, in a store or for now; and how many are."""

    def __init__(
        self, opened: OpenedCheckpoint, choices: Sequence[Precision], context: Context, samples: int, layers: list[str]
    ) -> None:
        self.layers, self._progress = layers, context.progress
        self._shelf = None if context.shelf is None else context.shelf.holding(Outcome)
        self._first = job_on_file("moments", opened, choices, context, 1, samples)
        self._choices = tuple(choices)

    def job(self, layer: str) -> Job:
        """Return the job of a layer, with everything that its errors depend on."""
        return self._first.model_copy(update={"choices": self._choices, "members": {layer: (layer,)}})

    def find(self, layer: str) -> Outcome | None:
        """Return the stored outcome of a layer."""
        return None if self._shelf is None else self._shelf.find(self.job(layer).id)

    def keep(self, layer: str, numbers: tuple[float, ...], done: int) -> None:
        """Keep the numbers of a layer, and tell progress."""
        if self._shelf is not None and self.find(layer) is None:
            self._shelf.keep(self.job(layer).id, Outcome(numbers={layer: numbers}))
        if self._progress is not None:
            self._progress(done, len(self.layers), layer)


class _LayerWatch(OutputWatch):
    """Measures a layer where it runs, and stops after the last."""

    def __init__(self, ledger: _Ledger, network: StreamedNetwork, choices: Sequence[Precision]) -> None:
        super().__init__(
            lambda call: [network.fitted(call.layer, call.weight, one.weight_bits) for one in choices]
        )  # for the weight that is in memory now
        self._ledger = ledger
        self._seen: set[str] = set()

    def see(self, call: WeightCall) -> None:
        """Take what is kept, or measure."""
        known = self._ledger.find(call.layer)
        if known is None:
            super().see(call)
            if not isfinite(sum(self.numbers[call.layer])):
                raise InputError(f"what layer {call.layer!r} gives out is NaN or infinite: look at its weights")
        else:
            self.powers[call.layer], *errors = known.numbers[call.layer]
            self.errors[call.layer] = tuple(errors)
        self._seen.add(call.layer)
        self._ledger.keep(call.layer, self.numbers[call.layer], len(self._seen))
        if len(self._seen) == len(self._ledger.layers):
            raise Enough

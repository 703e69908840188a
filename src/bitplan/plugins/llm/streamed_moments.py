"""Moments from a file: one pass, block after block, each read from the mapped file as it runs and then let go of.

The peak is a block with what it computes, never the network. Drift and fisher: `plugins/llm/streamed_gains.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from bitplan.core.errors import InputError
from bitplan.core.jobs import Misread, OutputErrors
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.forward.operations import tensors_in
from bitplan.gains.base import Context, LayerGains
from bitplan.gains.finetuning import Expected
from bitplan.gains.lowering import check_task
from bitplan.gains.time_estimate import known, timed
from bitplan.models.streamed import streaming
from bitplan.plugins.llm.streamed_gains import StreamedNetwork, about_file
from bitplan.plugins.methods.moments import MomentsGain, OutputWatch
from bitplan.quant.methods import Options, read_method
from bitplan.quant.moments import Enough, Multiplied
from bitplan.quant.scales import Shared
from bitplan.tasks.base import WithData, judged_by
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, opened_as

_ROWS = 256  # of a layer, that are timed to tell how long all will take


@dataclass(frozen=True)
class StreamedMoments:
    """The gain `moments` of a network in a file."""

    gain: MomentsGain

    def layer_gains(
        self, model: CheckpointLike, graph: Graph, choices: tuple[Precision, ...], context: Context
    ) -> LayerGains:
        """Return the gains by all samples in one batch, so that the file is read once."""
        outcome = self._errors(model, graph, choices, context)
        layers = [layer.name for group in graph.selectable for layer in group.layers]
        values = {name: tuple(self.gain.gains_of(name, [outcome], len(choices))[:, 0].tolist()) for name in layers}
        return LayerGains(values, counts={"samples": self.gain.samples, "batches": 1}, work=outcome.seconds)

    def expected(
        self, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
    ) -> Expected | None:
        """Return how long it takes, by a few rows as wide as the widest layer's; None where that is little."""
        task = check_task(context.task, "moments", "looks at what layers read", WithData)
        opened = opened_as(model)
        layers = {layer.name: layer for group in graph.selectable for layer in group.layers if layer.weights}
        count = min(self.gain.samples, task.size(judged_by(task)))
        ledger = _Ledger(opened, choices, context, count, list(layers))
        left = [name for name in layers if ledger.find(name) is None]
        if not left:
            return None
        widest = max(layer.in_features or 1 for layer in layers.values())
        part = torch.linspace(-1, 1, _ROWS * widest).view(_ROWS, widest)
        product = min(timed(lambda: part @ part.T) for _ in range(2)) / (part.numel() * _ROWS)
        method, options = read_method(context.quantizer_for(choices)), Options()
        fit = timed(lambda: [method.weight(part, one.weight_bits, Shared(), options)(part) for one in choices])
        rows = sum(leaf.numel() for leaf in tensors_in(next(iter(task.batches(judged_by(task), 1))))) * count
        whole, lacking = (sum(layers[name].weights for name in some) for some in (layers, left))
        seconds = product * rows * (whole + len(choices) * lacking) + fit / part.numel() * lacking
        return known(len(layers), len(layers) - len(left), "layers", count, seconds)

    def _errors(
        self, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context
    ) -> OutputErrors:
        """Return the errors of all layers' outputs on one batch; layers that a store has are not measured again."""
        start = time.perf_counter()
        task = check_task(context.task, "moments", "looks at what layers read", WithData)
        network = StreamedNetwork(model, graph, choices, context)
        opened, layers = network.opened, network.layers
        count = min(self.gain.samples, task.size(judged_by(task)))
        batch = next(iter(task.batches(judged_by(task), count, seed=context.seed)))
        watch = _LayerWatch(_Ledger(opened, choices, context, count, layers), network, choices)
        weights = {layer: quantizer for layer in layers if (quantizer := network.quantizers[layer].weight) is not None}
        with torch.no_grad(), streaming(network.module, opened), watch.watching(weights), suppress(Enough):
            task.forward(network.module, batch)
        charge(Spend(forwards=count * (1 + len(choices))))
        unseen = [layer for layer in layers if layer not in watch.powers]
        if unseen:
            raise InputError(f"nothing tells what layer {unseen[0]!r} reads: load the network, and estimate from it")
        return OutputErrors(powers=watch.powers, errors=watch.errors, seconds=time.perf_counter() - start)


class _Ledger:
    """What is known of each layer, in a store or for now; and how many are."""

    def __init__(
        self, opened: OpenedCheckpoint, choices: Sequence[Precision], context: Context, samples: int, layers: list[str]
    ) -> None:
        self.layers, self._progress = layers, context.progress
        self._shelf = None if context.shelf is None else context.shelf.holding(OutputErrors)
        self._about: dict[str, Any] = about_file(opened, choices, context) | {
            "groups": (), "layers": {}, "choices": tuple(choices), "first": 0, "batches": 1, "batch_size": samples,
        }  # fmt: skip

    def job(self, layer: str) -> Misread:
        """All that a layer's errors depend on."""
        return Misread(**self._about, members={layer: (layer,)})

    def find(self, layer: str) -> OutputErrors | None:
        """What is kept of a layer."""
        return None if self._shelf is None else self._shelf.find(self.job(layer).id)

    def keep(self, layer: str, powers: float, errors: tuple[float, ...], done: int) -> None:
        """Keep it, and tell how far it is."""
        if self._shelf is not None and self.find(layer) is None:
            self._shelf.keep(self.job(layer).id, OutputErrors(powers={layer: powers}, errors={layer: errors}))
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

    def see(self, call: Multiplied) -> None:
        """Take what is kept, or measure."""
        known = self._ledger.find(call.layer)
        if known is None:
            super().see(call)
            if not isfinite(self.powers[call.layer] + sum(self.errors[call.layer])):
                raise InputError(f"what layer {call.layer!r} gives out is NaN or infinite: look at its weights")
        else:
            self.powers |= known.powers
            self.errors |= known.errors
        self._seen.add(call.layer)
        self._ledger.keep(call.layer, self.powers[call.layer], self.errors[call.layer], len(self._seen))
        if len(self._seen) == len(self._ledger.layers):
            raise Enough

"""A network in a folder of weights as gains run it: never in memory whole, and weights fitted where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from bitplan.core.errors import InputError
from bitplan.core.naming import split
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.gains.base import Context
from bitplan.gains.measuring import options_of_task
from bitplan.models.streamed import ReadUnit, skeleton_of
from bitplan.quant.convert import options_of, quantize_, quantizers_of
from bitplan.quant.layers import channels_of
from bitplan.quant.methods.base import read_method
from bitplan.quant.proof import take_proof_off_
from bitplan.quant.quantizers import WeightQuantizer
from bitplan.quant.root import sites_of
from bitplan.quant.steps import Shared
from bitplan.tasks.base import title_of
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, opened_as


class StreamedNetwork:
    """A network without data that knows its layers, their weights passing as they are.

    `layers` are those that have a choice, and weights.
    """

    def __init__(self, model: CheckpointLike, graph: Graph, choices: Sequence[Precision], context: Context) -> None:
        self.opened = opened_as(model)
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
        shared = Shared(channels_of(module, weight) if self._by_channel else None)
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
        return site.module, split(site.parameter)[1]


def about_file(opened: OpenedCheckpoint, choices: Sequence[Precision], context: Context) -> dict[str, Any]:
    """What jobs on a file depend on, whichever method's they are."""
    files = sorted(opened.path.glob("*.safetensors")) if opened.path.is_dir() else [opened.path]
    return {
        "network": context.quantizer_for(choices), "task": title_of(context.task), "seed": context.seed,
        "task_options": options_of_task(context.task),
        "weights": " ".join(f"{one.name} {one.stat().st_size} {one.stat().st_mtime_ns}" for one in files),
    }  # fmt: skip


def check_weights_alone(choices: Sequence[Precision], method: str) -> None:
    """Refuse choices that quantize inputs: nothing calibrates a network in a file."""
    for choice in choices:
        if choice.quantizes_inputs or not choice.quantizes_weights:
            raise InputError(
                f"{method} from a file lowers weights alone, and {choice} is another choice: load the network, or "
                "choose among w2a16, w3a16 …"
            )

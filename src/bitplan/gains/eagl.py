"""EAGL: a layer gains the entropy of its quantized weights, from a model or from a file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bitplan.core.codes import entropies
from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Layer
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.histogram import KINDS, Histograms, Kind, Per, Scheme, Weights, count_weights
from bitplan.graph.names import Names
from bitplan.weights.opened import CheckpointLike, OpenedCheckpoint, learned_step, open_if_path
from bitplan.weights.tensors import FLOATS

ALONE = Context()


@dataclass(frozen=True)
class Eagl(Gain):
    """Entropy of the weights' codes in bits; choices add up: value(c) = Σ entropies at c1 … c.

    `steps`: "learned" ones, or "lsq", "mse", "absmax" derived from the weights `per` tensor, channel
    (output) or group (of `group_size` inputs). Unless given: learned where there are any; a float file gets
    "mse"; a float model must say. The paper validates learned steps, one per tensor. `bootstrap` samples
    give standard errors.
    """

    about: ClassVar[About] = About(source="the paper: Bablani et al. 2023")

    steps: Literal["learned", "lsq", "mse", "absmax"] | None = None
    per: Per = "tensor"
    group_size: int = 128
    bootstrap: int = 0

    def __post_init__(self) -> None:
        if self.steps not in (None, "learned", *KINDS):
            raise InputError(f"EAGL's steps are learned, {', '.join(KINDS)}, not {self.steps!r}")
        if self.per not in ("tensor", "channel", "group"):
            raise InputError(f"EAGL has one step per tensor, channel or group, not per {self.per!r}")
        if self.group_size < 1 or self.bootstrap < 0 or self.bootstrap == 1:
            raise InputError("EAGL needs a group_size of at least 1, and 0 or at least 2 bootstrap samples")

    def layer_gains(
        self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context = ALONE
    ) -> LayerGains:
        """The gains of a torch module, a path or an opened checkpoint; needs no data and changes nothing."""
        layers = [layer for group in graph.selectable for layer in group.layers]
        weighted = [layer for layer in layers if layer.weights]
        weights, kind = self._weights(model, weighted, choices[-1].weight_bits)
        bits = sorted({choice.weight_bits for choice in choices[1:]})  # the lowest choice gains nothing: not counted
        scheme = Scheme(kind, self.per, self.group_size)
        histograms = count_weights(list(weights.values()), bits, scheme, context.progress)
        counted = dict(zip(weights, histograms, strict=True))  # layer → a histogram at each of `bits`
        measured = [entropies(_stacked(at)).tolist() for at in zip(*histograms, strict=True)]
        found = dict(zip(weights, zip(*measured, strict=True), strict=True))  # layer → an entropy at each of `bits`
        errors = None
        if self.bootstrap:
            errors = _rows(layers, choices, bits, self._errors(counted, context.seed))
        return LayerGains(
            values=_rows(layers, choices, bits, found),
            errors=errors,
            histograms={name: tuple(counts[-1][: 2 ** bits[-1]].tolist()) for name, counts in counted.items()},
            counts={
                "weights": sum(item.tensor.size for item in weights.values()),
                "learned_steps": sum(item.learned is not None for item in weights.values()),
            },
        )

    def _weights(self, model: Any, layers: list[Layer], top: int) -> tuple[dict[str, Weights], Kind]:
        """Each layer's weights with the steps to use, and the kind of step for those without."""
        if isinstance(model, CheckpointLike):
            opened = open_if_path(model)
            weights, path = _file_weights(opened, layers, top), str(opened.path)
        else:
            from bitplan.gains.eagl_modules import module_weights

            weights, path = module_weights(model, [layer.name for layer in layers]), ""
        lacking = [name for name, item in weights.items() if item.learned is None]
        some_learned = len(lacking) < len(weights)
        if self.steps == "learned" or (self.steps is None and some_learned):
            if lacking:
                more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
                raise InputError(
                    f"{path or 'the model'} has no learned step for layer {lacking[0]!r}{more}: choose "
                    "--gain eagl:steps=mse, lsq or absmax (in Python: steps=…)"
                )
            return weights, "mse"  # asked for by no layer: all have learned theirs
        if self.steps is None and not path and lacking:
            raise InputError(
                "this is a float model, without learned steps: choose how EAGL finds them, --gain "
                "eagl:steps=mse, lsq or absmax (in Python: steps=…), or quantize and train the model first"
            )
        kind: Kind = self.steps or "mse"
        without_steps = {name: Weights(item.tensor, item.layout) for name, item in weights.items()}
        return without_steps, kind

    def _errors(self, counted: Mapping[str, Histograms], seed: int) -> dict[str, tuple[float, ...]]:
        """Return the standard error of every entropy; every histogram is drawn with a seed of its own."""
        return {
            name: tuple(bootstrap_error(counts, self.bootstrap, (seed, index, counts.size)) for counts in histograms)
            for index, (name, histograms) in enumerate(counted.items())
        }


def bootstrap_error(counts: ArrayLike, samples: int, seed: int | tuple[int, ...]) -> float:
    """Return the standard error of a histogram's entropy, from `samples` multinomial draws of its own frequencies."""
    seen = np.asarray(counts, np.int64)  # (codes,)
    total = int(seen.sum())
    if total == 0:
        return 0.0
    drawn = np.random.default_rng(seed).multinomial(total, seen / total, size=samples)  # (samples, codes)
    return float(entropies(drawn.astype(np.float64)).std(ddof=1))


def _stacked(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Histograms as rows; zeros where one has fewer codes, as where quantizers have codes beyond so many bits."""
    stacked = np.zeros((len(counts), max(len(one) for one in counts)))
    for row, one in zip(stacked, counts, strict=True):
        row[: len(one)] = one
    return stacked


def _rows(
    layers: list[Layer], choices: Sequence[Precision], bits: list[int], measured: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    """Running sums, over the choices above the lowest, of what was measured at each of `bits`.

    A layer without weights has 0 everywhere.
    Standard errors are summed too: entropies of the same weights at two precisions move together, so the
    sum is the cautious bound.
    """
    places = [bits.index(choice.weight_bits) for choice in choices[1:]]
    nothing = (0.0,) * len(bits)
    rows: dict[str, tuple[float, ...]] = {}
    for layer in layers:
        own = measured.get(layer.name, nothing)
        rows[layer.name] = (0.0, *accumulate(own[place] for place in places))
    return rows


def _file_weights(checkpoint: OpenedCheckpoint, layers: list[Layer], top: int) -> dict[str, Weights]:
    """Tensors by name; learned steps belong to the plan's precision, or without a plan to the top choice."""
    names = Names()
    weights: dict[str, Weights] = {}
    for layer in layers:
        tensor = checkpoint.weight(layer.name)
        if tensor is None or tensor.dtype not in FLOATS or tensor.size != layer.weights:
            raise InputError(
                f"{checkpoint.path} holds no float weight of {layer.weights:,} elements for layer "
                f"{layer.name!r}; the graph must come from this checkpoint"
            )
        step = learned_step(layer.name, checkpoint.tensors)
        uses = checkpoint.plan.uses_of(layer.name) if checkpoint.plan and step is not None else ()
        if any(use.computed for use in uses):
            raise InputError(
                f"{checkpoint.path} holds what layer {layer.name!r} computes its weight from, not the weight that its "
                "step is for: estimate from the model, run once in inference"
            )
        learned = None if step is None else step.floats()
        if learned is not None and not np.count_nonzero(learned):
            raise InputError(
                f"{checkpoint.path} was quantized by a method whose levels follow from the weights of layer "
                f"{layer.name!r}, so the file alone does not tell its codes: estimate from the model (load_checkpoint)"
            )
        planned = checkpoint.plan.precisions.get(layer.name) if checkpoint.plan else None
        bits = planned.weight_bits if planned else top
        weights[layer.name] = Weights(tensor, names.layout(layer.name, tensor.shape), learned, bits)
    return weights

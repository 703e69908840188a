"""Imprinting: a layer gains what it adds to how well classes are told apart by their mean features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.spend import Spend, charge
from bitplan.forward.batches import split_batch
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.jobs import check_samples
from bitplan.gains.lowering import check_task
from bitplan.plugins.methods.layer_outputs import check_model, run, split_by_sample, watch_activations
from bitplan.quant.convert import deep_copy
from bitplan.tasks.base import WithData, draw, measuring_split

_FEATURES = 512  # about so many of each layer


@dataclass(frozen=True)
class Imprint(Gain):
    """What a layer adds to telling classes apart by their mean features. For the greedy selector.

    Liu et al. 2021, "Layer Importance Estimation with Imprinting for Neural Network Quantization". Behind each layer,
    its norm and its activation, features are averaged to about 512: images to a side of round(√(512/channels)), tokens
    to one. The template of a class is the mean over its samples, normalized, and A_i the share of samples whose class
    has the greatest product of template and features; A_0 is chance. A layer, in the order of execution, gains A_i −
    A_{i−1} at the highest choice, a proportional part of it between, whatever the choices are: it is what a layer adds,
    not what bits cost it, and may be below 0. What gains least is lowered first (greedy). Labels, for classification
    only, and no gradient. The quantization code was not found: this is after the authors' code for pruning and after
    summaries of others. Here templates come of one half of the samples and A of the other, so that classes which mean
    nothing are told apart by chance alone.
    """

    about: ClassVar[About] = About(True, True, passes="N", source="Liu et al. 2021")
    selector: ClassVar[str] = "greedy"

    samples: int = 1024
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_samples("imprint", self.samples, self.batch_size)

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One pass forward for each sample."""
        task = check_task(context.task, "imprint", "imprints classes from labelled data", WithData)
        network = deep_copy(check_model(model, "imprint")).eval()
        split = measuring_split(task)
        available = min(self.samples, task.size(split))
        size = min(self.batch_size, max(1, available // 2))
        batches = draw(network, task, 2 * (available // size // 2), size, context.seed, split)
        seen = _Imprinted(len(batches) // 2)
        layers = [layer.name for layer in graph.layers]
        with watch_activations(network, layers, seen.see):
            run(task, network, batches, seen.next)
        accuracies = seen.accuracies(layers)
        steps = [step / (len(choices) - 1) for step in range(len(choices))]
        chosen = {layer.name for group in graph.selectable for layer in group.layers}
        values, before = {}, 1 / len(seen.classes)
        for name in layers:  # in the order of execution, fixed ones included
            now = accuracies[name]
            if name in chosen:
                values[name] = tuple((now - before) * step for step in steps)
            before = now
        return LayerGains(values, counts={"passes": 1, "samples": len(batches) * size, "batches": len(batches)})


@dataclass
class _Imprinted:
    """Features and labels of all samples; the first batches imprint, the others are told apart."""

    imprinting: int
    labels: list[Tensor] = field(default_factory=list)
    features: dict[str, list[Tensor]] = field(default_factory=dict)

    def next(self, batch: Any) -> None:
        """A batch begins."""
        self.labels.append(labels_of(batch).cpu())
        charge(Spend(labels=True))

    def see(self, name: str, out: Tensor) -> None:
        """A layer gave something out; what it gives out later in the same batch counts instead."""
        rows = self.features.setdefault(name, [])
        del rows[len(self.labels) - 1 :]
        rows.append(pooled(name, out, len(self.labels[-1])).float().cpu())

    @property
    def classes(self) -> Tensor:
        """All that were seen."""
        return torch.cat(self.labels).unique()

    def accuracies(self, layers: list[str]) -> dict[str, float]:
        """A of each layer."""
        early, late = (torch.cat(part) for part in (self.labels[: self.imprinting], self.labels[self.imprinting :]))
        found = {}
        for name in layers:
            rows = self.features[name]
            known, told = torch.cat(rows[: self.imprinting]), torch.cat(rows[self.imprinting :])
            found[name] = told_apart(known, early, told, late)
        return found


def told_apart(known: Tensor, labels: Tensor, told: Tensor, true: Tensor) -> float:
    """The share of rows (N, F) whose class has the template nearest in direction, of those that were imprinted."""
    classes = labels.unique()
    templates = torch.stack([known[labels == one].mean(dim=0) for one in classes])
    answers = classes[(told @ F.normalize(templates, dim=1).T).argmax(dim=1)]
    return float((answers == true).double().mean())


def pooled(name: str, out: Tensor, samples: int) -> Tensor:
    """About 512 features of each sample: (B, channels, …) averaged over places, (B, tokens, features) over tokens."""
    if out.dim() == 4:
        side = max(1, round((_FEATURES / out.shape[1]) ** 0.5))
        side = min(side, out.shape[2], out.shape[3])
        out = F.adaptive_avg_pool2d(out, side)
    elif out.dim() == 3:
        out = out.mean(dim=1)
    return split_by_sample(name, out, samples)


def labels_of(batch: Any) -> Tensor:
    """The classes of a batch, one for each sample."""
    labels = split_batch(batch)[2]
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        raise InputError(
            "imprint imprints classes: it needs batches of inputs and labels, one class for each sample; use another "
            "method, such as drift, for other tasks"
        )
    return labels

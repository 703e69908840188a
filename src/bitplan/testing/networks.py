"""What contracts are tried on: a graph made by hand, and small networks with a link, quantized and calibrated."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Layer, Link, Plan
from bitplan.core.rules import Rules
from bitplan.graph.trace import trace
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize

_EIGHT = Precision.parse("w8a8")
WIDTH = 32
"""The features of every layer of `Blocks`."""


@dataclass(frozen=True)
class Made:
    """A quantized model, its graph, and an example of its input."""

    model: nn.Module
    graph: Graph
    example: Tensor


def hand_made_graph() -> Graph:
    """Six layers: fixed ends, a link of two between them, and two single ones."""

    def layer(name: str, macs: int, weights: int, **ruling: Any) -> Layer:
        return Layer(name=name, kind="conv2d", macs=macs, weights=weights, in_features=256, **ruling)

    return Graph(
        model="small",
        layers=(
            layer("stem", 50, 10, fixed=_EIGHT, rule="first", why="first layer"),
            layer("a", 100, 30),
            layer("b", 300, 20),
            layer("side", 60, 40),
            layer("c", 80, 50),
            layer("head", 10, 10, fixed=_EIGHT, rule="last", why="last layer"),
        ),
        links=(Link(layers=("a", "side"), through="output of stem"),),
    )


class Branching(nn.Module):
    """Images (B, 1, H, W) → (B, 10): a stem with a norm, two linked convolutions, one more, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.middle, self.head = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.norm(self.stem(x)).relu()
        x = self.middle((self.left(x) + self.right(x)).relu()).relu()
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


def branching() -> Made:
    """The network of images of 8×8, at w4a4 and calibrated; always the same."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        images, model = torch.rand(4, 1, 8, 8), Branching()
    graph = trace(model, images, rules=Rules(narrow=0))
    quantized = quantize(model, Plan.uniform(graph, "w4a4"))
    calibrate_(quantized, [images])
    return Made(quantized, graph, images)


class Blocks(nn.Module):
    """Layers one after the other, then two on one tensor, which are linked, then a linear one; (B, 32) → (B, 32).

    `kinds` are "plain", "wide" (a kernel of 3, or no bias) and "each" (one filter per channel); `flat` has linear
    layers instead of convolutions. Layers are called as tensors of llama.cpp are, which knows no others.
    """

    def __init__(self, kinds: Sequence[str], flat: bool) -> None:
        super().__init__()
        self.blk = nn.ModuleList(nn.ModuleDict({"part": _part(kind, flat)}) for kind in kinds)
        both = {"left": _part("plain", flat), "right": _part("plain", flat)}
        self.blk.append(nn.ModuleDict({**both, "head": nn.Linear(WIDTH, WIDTH)}))

    def forward(self, x: Tensor) -> Tensor:
        """Features."""
        *parts, last = (block for block in self.blk if isinstance(block, nn.ModuleDict))
        for part in parts:
            x = part["part"](x).relu()
        x = last["left"](x) + last["right"](x)
        features: Tensor = last["head"](x.flatten(2).mean(2) if x.dim() > 2 else x)
        return features


def blocks(kinds: Sequence[str], precisions: Sequence[str], *, flat: bool, per_channel: bool) -> Made:
    """Such a network, quantized and calibrated; its groups have the precisions in turn."""
    net = Blocks(kinds, flat)
    example = torch.zeros(1, WIDTH) if flat else torch.zeros(1, WIDTH, 4, 4)
    graph = trace(net, example, rules=Rules(first=None, last=None, narrow=0), name="net")
    chosen = {group.name: precisions[place % len(precisions)] for place, group in enumerate(graph.groups)}
    by_layer = {layer.name: chosen[group.name] for group in graph.groups for layer in group.layers}
    model = quantize(net, plan_for(graph, by_layer), per_channel=per_channel).eval()
    calibrate_(model, [torch.randn(4, *example.shape[1:])])
    return Made(model, graph, example)


def some_blocks(count: int) -> list[Made]:
    """So many of them, of all kinds and precisions; always the same."""
    draw = random.Random(0)
    made = []
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for number in range(count):
            kinds = draw.choices(("plain", "wide", "each"), k=draw.randint(1, 3))
            precisions = draw.sample(("w2a2", "w4a4", "w3a3", "w8a8", "w4a16", "w2a8"), k=4)
            made.append(blocks(kinds, precisions, flat=number % 2 == 0, per_channel=number % 3 == 0))
    return made


def plan_for(graph: Graph, precisions: Mapping[str, str]) -> Plan:
    """A plan by hand."""
    parsed = {name: Precision.parse(precision) for name, precision in precisions.items()}
    links = tuple(link.layers for link in graph.links)
    return Plan(
        model=graph.model,
        precisions=parsed,
        links=links,
        method="by hand",
        selector="by hand",
        uses=graph.uses,
        integers=graph.integers,
    )


def classifier_for(example: Any, classes: int = 1000) -> nn.Module | None:
    """A network that takes tensors like this, (B, features, …), and gives scores for more classes than there are."""
    if not isinstance(example, Tensor) or example.dim() < 2 or not example.is_floating_point():
        return None
    pooled: list[nn.Module] = [nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten()] if example.dim() > 2 else []
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        features = example.shape[1]
        return nn.Sequential(*pooled, nn.BatchNorm1d(features), nn.Dropout(0.5), nn.Linear(features, classes))


def _part(kind: str, flat: bool) -> nn.Module:
    if flat:
        return nn.Linear(WIDTH, WIDTH, bias=kind != "wide")
    groups = WIDTH if kind == "each" else 1
    return nn.Conv2d(WIDTH, WIDTH, 3 if kind == "wide" else 1, padding=int(kind == "wide"), groups=groups)

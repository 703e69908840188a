"""The paper's baselines: the same value for every layer, or its position; and a random order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from bitplan.core.about import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.gains.base import Context, Gain, LayerGains


@dataclass(frozen=True)
class Uniform(Gain):
    """Every layer is worth the same; a link as much as its layers together."""

    about: ClassVar[About] = About(source="the paper: Bablani et al. 2023")
    structural: ClassVar[bool] = True

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One for every choice above the lowest."""
        steps = tuple(float(step) for step in range(len(choices)))
        return LayerGains({layer.name: steps for group in graph.selectable for layer in group.layers})


@dataclass(frozen=True)
class Even(Gain):
    """Every weight is worth the same, and each further bit takes three quarters off what is left of its error.

    value(c) = weights·(1 − 4^(b0 − b)), b the bits of weights, or of inputs where all weights have the same. So at a
    budget that one precision meets for all, all have it; between two, some have one and some the other. `uniform`,
    which counts layers, gives small ones more and takes it from large ones.
    """

    about: ClassVar[About] = About(source="a control")
    structural: ClassVar[bool] = True

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """By the number of weights alone."""
        shares = [1 - 4.0**-bits for bits in bits_above_lowest(choices)]
        layers = (layer for group in graph.selectable for layer in group.layers)
        return LayerGains({layer.name: tuple(layer.weights * share for share in shares) for layer in layers})


@dataclass(frozen=True)
class FirstToLast(Gain):
    """Lower the first layers first: a later layer is worth more. For the greedy selector."""

    about: ClassVar[About] = About(source="the paper: Bablani et al. 2023")
    structural: ClassVar[bool] = True
    selector: ClassVar[str] = "greedy"

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """The position among the selectable groups, counted from the first."""
        return _by_group(graph, choices, lambda position: position + 1)


@dataclass(frozen=True)
class LastToFirst(Gain):
    """Lower the last layers first: an earlier layer is worth more. For the greedy selector."""

    about: ClassVar[About] = About(source="the paper: Bablani et al. 2023")
    structural: ClassVar[bool] = True
    selector: ClassVar[str] = "greedy"

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """The position among the selectable groups, counted from the last."""
        count = len(graph.selectable)
        return _by_group(graph, choices, lambda position: count - position)


@dataclass(frozen=True)
class Random(Gain):
    """A value between 0 and 1 for every group, the same for the same seed."""

    about: ClassVar[About] = About(source="a control")
    structural: ClassVar[bool] = True

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """Uniform random numbers in the order of the groups."""
        draw = random.Random(context.seed)
        return _by_group(graph, choices, lambda _: draw.random())


def _by_group(graph: Graph, choices: tuple[Precision, ...], value: Callable[[int], float]) -> LayerGains:
    """The value of a link belongs to its first layer, the others add 0 (docs/decisions/0009, 4)."""
    values: dict[str, tuple[float, ...]] = {}
    for position, group in enumerate(graph.selectable):
        own = value(position)
        for number, layer in enumerate(group.layers):
            values[layer.name] = tuple(float(own * step if number == 0 else 0) for step in range(len(choices)))
    return LayerGains(values)


def bits_above_lowest(choices: tuple[Precision, ...]) -> list[int]:
    """Bits of each choice's weights above the lowest one's, or of its inputs where all weights have the same."""
    weights = [choice.weight_bits - choices[0].weight_bits for choice in choices]
    return weights if any(weights) else [choice.act_bits - choices[0].act_bits for choice in choices]

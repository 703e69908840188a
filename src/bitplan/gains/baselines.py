"""The paper's baselines: the same value for every layer, or its position; and a random order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from bitplan.core.errors import FileError, UnknownName, suggestion
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Group
from bitplan.core.spend import charge
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.store.user_tables import Row, read_table

# --- The paper's baselines: the same value for every layer, or its position; and a random order.


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
class EqualBits(Gain):
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
    """The value of a link belongs to its first layer, the others add 0."""
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


# --- Gains that the user brings, from a CSV or JSON file.


@dataclass(frozen=True)
class TableGain(Gain):
    """Numbers per layer or per group (by its first layer); those of fixed layers are ignored."""

    about: ClassVar[About] = About(source="numbers of your own")

    path: str
    structural: ClassVar[bool] = True

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """The file's numbers, less that of the lowest choice (which changes no selection)."""
        rows = read_table(self.path)
        names = [layer.name for layer in graph.layers]
        for name in rows:
            if name not in names:
                raise UnknownName(f"layer in {self.path}:", name, names)
        values: dict[str, tuple[float, ...]] = {}
        for group in graph.selectable:
            values |= self._group(group, rows, choices)
        charge(None)  # nobody here knows what its numbers cost
        return LayerGains(values)

    def _group(
        self, group: Group, rows: dict[str, Row], choices: tuple[Precision, ...]
    ) -> dict[str, tuple[float, ...]]:
        """All layers of a group, or only its first, which then stands for the group."""
        members = [layer.name for layer in group.layers]
        given = [name for name in members if name in rows]
        if given not in (members, members[:1]):
            missing = next(name for name in members if name not in rows)
            raise FileError(f"{self.path} has no gain for layer {missing!r}{suggestion(missing, rows)}")
        none = (0.0,) * len(choices)
        return {name: self._values(name, rows[name], choices) if name in rows else none for name in members}

    def _values(self, name: str, row: Row, choices: tuple[Precision, ...]) -> tuple[float, ...]:
        for precision, value in row.items():
            if not math.isfinite(value):
                place = f"{name!r} at {precision or choices[-1]}"
                raise FileError(f"{self.path}: the gain of {place} is {value}; a gain is a finite number")
        if None in row:
            if len(choices) > 2:
                raise FileError(
                    f"{self.path}: {name!r} has one gain for {len(choices)} choices; name a column for each"
                )
            return 0.0, float(row[None])
        lacking = [str(choice) for choice in choices[1:] if choice not in row]
        if lacking:
            raise FileError(f"{self.path} has no gain for {name!r} at {', '.join(lacking)}")
        lowest = row.get(choices[0], 0.0)
        return tuple(float(row.get(choice, 0.0) - lowest) for choice in choices)

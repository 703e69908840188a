"""Gains that the user brings, from a CSV or JSON file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from bitplan.core.about import About
from bitplan.core.errors import FileError, UnknownName, suggestion
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Group
from bitplan.core.spend import charge
from bitplan.core.tables import Row, read_table
from bitplan.gains.base import Context, Gain, LayerGains


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

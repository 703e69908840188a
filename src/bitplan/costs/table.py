"""Measured costs, such as latency or energy, from a CSV or JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitplan.core.errors import FileError, suggestion
from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.core.tables import Row, read_table, read_unit
from bitplan.core.units import measured


@dataclass(frozen=True)
class TableCost:
    """A cost function that looks its values up."""

    path: str
    rows: dict[str, Row]
    unit: str = ""

    @classmethod
    def read(cls, path: str | Path) -> TableCost:
        """Read the file; values must be whole numbers ≥ 0, in whichever unit was measured (`# unit: ns` says it)."""
        rows, said = read_table(path), read_unit(path)
        for layer, row in rows.items():
            for precision, value in row.items():
                if precision is None:
                    raise FileError(f"{path}: name a precision for every cost of {layer!r}, such as w4a4")
                if not isinstance(value, int) or value < 0:
                    raise FileError(
                        f"{path}: the cost of {layer!r} at {precision} is {value}; a cost is a whole number ≥ 0 "
                        "(measure in a smaller unit, such as nanoseconds)"
                    )
        counted = measured(said)
        return cls(str(path), rows, counted.written if counted else said)

    def __call__(self, layer: Layer, precision: Precision) -> int | None:
        """The measured cost of one layer at one precision; None for a fixed one that was not measured.

        Most budgets are about the choosable layers only, so a table need not have the others.
        """
        row = self.rows.get(layer.name, {})
        if precision in row:
            return int(row[precision])
        if layer.fixed:
            return None
        if not row:
            raise FileError(f"{self.path} has no cost for layer {layer.name!r}{suggestion(layer.name, self.rows)}")
        known = ", ".join(str(column) for column in row)
        raise FileError(f"{self.path} has no cost for {layer.name!r} at {precision}, only at {known}")

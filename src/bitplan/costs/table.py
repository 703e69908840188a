"""Measured costs, such as latency or energy, from a CSV or JSON file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitplan.core.errors import FileError, suggestion
from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.core.tables import Row, read_table


@dataclass(frozen=True)
class TableCost:
    """A cost function that looks its values up."""

    path: str
    rows: dict[str, Row]
    unit: str = ""

    @classmethod
    def read(cls, path: str | Path) -> TableCost:
        """Read the file; values must be whole numbers ≥ 0, in whichever unit was measured."""
        rows = read_table(path)
        for layer, row in rows.items():
            for precision, value in row.items():
                if precision is None:
                    raise FileError(f"{path}: name a precision for every cost of {layer!r}, such as w4a4")
                if not isinstance(value, int) or value < 0:
                    raise FileError(
                        f"{path}: the cost of {layer!r} at {precision} is {value}; a cost is a whole number ≥ 0 "
                        "(measure in a smaller unit, such as nanoseconds)"
                    )
        return cls(str(path), rows)

    def __call__(self, layer: Layer, precision: Precision) -> int:
        """The measured cost of one layer at one precision."""
        if layer.name not in self.rows:
            if layer.fixed:  # outside the budget, so it need not have been measured
                return 0
            raise FileError(f"{self.path} has no cost for layer {layer.name!r}{suggestion(layer.name, self.rows)}")
        row = self.rows[layer.name]
        if precision not in row:
            if layer.fixed:
                return 0
            known = ", ".join(str(column) for column in row)
            raise FileError(f"{self.path} has no cost for {layer.name!r} at {precision}, only at {known}")
        return int(row[precision])

"""Numbers that users bring: CSV or JSON with one row per layer and one column per precision.

CSV:   layer,w2a2,w4a4          JSON:  {"conv1": {"w2a2": 12, "w4a4": 20}, …}
       conv1,12,20                     {"conv1": 20, …}   one number: that of the highest precision
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.store import read_text

Row = dict[Precision | None, float]
"""Values by precision; under None a single number that names no precision."""


def read_table(path: str | Path) -> dict[str, Row]:
    """Read a table of numbers per layer; every complaint names the file, the layer and the value."""
    text = read_text(path)
    is_csv = Path(path).suffix == ".csv"
    table: dict[str, Row] = {}
    for layer, cells in _csv_rows(text, path) if is_csv else _json_rows(text, path):
        if layer in table:
            raise FileError(f"{path}: layer {layer!r} appears twice")
        table[layer] = {_column(column, path): _number(cell, layer, path) for column, cell in cells.items()}
    if not table:
        raise FileError(f"{path} has no rows")
    return table


def _csv_rows(text: str, path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = [line for line in csv.reader(io.StringIO(text)) if line and not line[0].startswith("#")]
    if not lines or len(lines[0]) < 2:
        raise FileError(f"{path}: the first line must name the columns, such as layer,w2a2,w4a4")
    columns = [cell.strip() for cell in lines[0][1:]]
    for line in lines[1:]:
        if len(line) != len(columns) + 1:
            raise FileError(f"{path}: layer {line[0]!r} has {len(line) - 1} values for {len(columns)} columns")
        yield line[0].strip(), dict(zip(columns, line[1:], strict=True))


def _json_rows(text: str, path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict) or "bitplan" in content:
        raise FileError(f"{path}: not a table; expected {{layer: {{precision: number}}}}")
    for layer, cells in content.items():
        yield layer, cells if isinstance(cells, dict) else {"": cells}


def _column(column: str, path: str | Path) -> Precision | None:
    if column in ("", "gain", "cost", "value"):
        return None
    try:
        return Precision.parse(column)
    except InputError:
        raise FileError(f"{path}: column {column!r} is not a precision such as w4a4") from None


def _number(cell: Any, layer: str, path: str | Path) -> float:
    try:
        if isinstance(cell, bool):
            raise ValueError
        value = float(cell)
    except (TypeError, ValueError):
        raise FileError(f"{path}: {cell!r} for layer {layer!r} is not a number") from None
    return int(value) if value.is_integer() else value

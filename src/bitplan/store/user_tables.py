"""Numbers that users bring: CSV or JSON with one row per layer and one column per precision.

CSV:   # unit: ns               JSON:  {"# unit": "ns",
       layer,w2a2,w4a4                  "conv1": {"w2a2": 12, "w4a4": 20}, …}
       conv1,12,20                     {"conv1": 20, …}   one number: that of the highest precision

What begins with # is a comment; one of them may say what the numbers count. An empty cell of a CSV is no number.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.core.precision import Precision
from bitplan.store.files import read_text

_UNIT = re.compile(r"#\s*unit\s*[:=]\s*(\S.*)", re.IGNORECASE)
Row = dict[Precision | None, float]
"""Values by precision; under None a single number that names no precision."""


def is_table(written: str | Path) -> bool:
    """Whether what was written names a table of numbers, by its ending."""
    return Path(written).suffix in (".csv", ".json")


def is_record(written: str | Path) -> bool:
    """Whether what was written names a file of a record, which is read by what it says of itself."""
    path = Path(written)
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        content = parse_json(read_text(path))
    except InputError:  # who reads it says why
        return False
    return isinstance(content, dict) and "bitplan" in content


def read_table(path: str | Path) -> dict[str, Row]:
    """Read a table of numbers per layer; every complaint names the file, the layer and the value."""
    rows = _csv_rows(path) if _is_csv(path) else _json_rows(path)
    table: dict[str, Row] = {}
    for layer, cells in rows:
        if layer in table:
            raise FileError(f"{path}: layer {layer!r} appears twice")
        table[layer] = {_column(column, path): _number(cell, layer, path) for column, cell in cells.items()}
    if not table:
        raise FileError(f"{path} has no rows")
    return table


def read_unit(path: str | Path) -> str:
    """What the numbers of a table count, as it says itself; empty where it does not."""
    units = _csv_units(path) if _is_csv(path) else _json_units(path)
    if len(units) > 1 or not all(isinstance(unit, str) for unit in units):
        raise FileError(f"{path} must say its unit once, such as ns, and not {' and '.join(map(str, units))}")
    return units[0].strip() if units else ""


def _csv_units(path: str | Path) -> list[Any]:
    """What comments say of the unit; a spreadsheet may have put quotes around one and commas behind it."""
    lines = [line.strip(', "') for line in read_text(path).splitlines()]
    comments = [_UNIT.fullmatch(line) for line in lines]
    return [comment[1] for comment in comments if comment is not None]


def _json_units(path: str | Path) -> list[Any]:
    content = _json_content(path)
    return [value for key, value in content.items() if _is_comment(key) and key[1:].strip() == "unit"]


def _is_csv(path: str | Path) -> bool:
    return Path(path).suffix == ".csv"


def _is_comment(text: str) -> bool:
    return text.startswith("#")


def _csv_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = read_text(path)
    with explain_failures(path, "a table", "write it again"):
        lines = [line for line in csv.reader(io.StringIO(text)) if line and not _is_comment(line[0])]
    if not lines or len(lines[0]) < 2:
        raise FileError(f"{path}: the first line must name the columns, such as layer,w2a2,w4a4")
    columns = [cell.strip() for cell in lines[0][1:]]
    for line in lines[1:]:
        if len(line) != len(columns) + 1:
            raise FileError(f"{path}: layer {line[0]!r} has {len(line) - 1} values for {len(columns)} columns")
        cells = dict(zip(columns, line[1:], strict=True))
        yield line[0].strip(), {column: cell for column, cell in cells.items() if cell.strip()}


def _json_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for layer, cells in _json_content(path).items():
        if not _is_comment(layer):
            yield layer, cells if isinstance(cells, dict) else {"": cells}


def _json_content(path: str | Path) -> dict[str, Any]:
    with explain_failures(path, "a table", "write it again"):
        content = parse_json(read_text(path))
    if not isinstance(content, dict) or "bitplan" in content:
        raise FileError(f"{path}: not a table; expected {{layer: {{precision: number}}}}")
    return content


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

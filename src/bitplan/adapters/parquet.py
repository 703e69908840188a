"""Columns of parquet files, through pyarrow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitplan.adapters.foreign import first_line, require
from bitplan.core.errors import FileError


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """The named columns of a file as Python values, whole in memory."""
    require("pyarrow", "vision", f"reading {path}")
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            lacking = [name for name in names if name not in there]
            if lacking:
                raise FileError(f"{path} has no column {', '.join(lacking)}; it has {', '.join(there)}")
            table = file.read(columns=list(names))
    except (OSError, pyarrow.ArrowException) as error:
        raise FileError(f"{path} is cut off or not a parquet file ({first_line(error)}): fetch it again") from None
    return {name: table[name].to_pylist() for name in names}

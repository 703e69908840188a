"""Columns of parquet files, through pyarrow."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitplan.core.errors import FileError, MissingExtra


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """The named columns of a file as Python values, whole in memory."""
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "vision", f"reading {path}")
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            lacking = [name for name in names if name not in file.schema_arrow.names]
            if lacking:
                has = ", ".join(file.schema_arrow.names)
                raise FileError(f"{path} has no column {', '.join(lacking)}; it has {has}")
            table = file.read(columns=list(names))
    except (OSError, pyarrow.ArrowException) as error:
        line = str(error).strip().partition("\n")[0][:120]
        raise FileError(f"{path} is cut off or not a parquet file ({line}): fetch it again") from None
    return {name: table[name].to_pylist() for name in names}

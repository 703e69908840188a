"""Columns of parquet files, through pyarrow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError
from bitplan.core.parsing import check_room, explain_failures
from bitplan.store.files import open_file

_ROWS = 256  # read at a time
_VALUE = 64  # bytes that a value takes in Python beside its content


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """The named columns of a file as Python values, whole in memory."""
    require("pyarrow", "vision", f"reading {path}")
    import pyarrow.parquet

    columns: dict[str, list[Any]] = {name: [] for name in names}
    taken = 0
    with (
        explain_failures(path, "a parquet file", "fetch it again"),
        open_file(path) as opened,
        pyarrow.parquet.ParquetFile(path) as file,
    ):
        size = os.fstat(opened.fileno()).st_size
        there = file.schema_arrow.names
        lacking = [name for name in names if name not in there]
        if lacking:
            raise FileError(f"{path} has no column {', '.join(lacking)}; it has {', '.join(there)}")
        check_room(path, file.metadata.num_rows * len(names) * _VALUE + _unpacked(file.metadata, names), size)
        for batch in file.iter_batches(_ROWS, columns=list(names)):  # one value may stand in a file once for all rows
            taken += batch.nbytes + batch.num_rows * len(names) * _VALUE
            check_room(path, taken, size)
            for name in names:
                columns[name] += batch[name].to_pylist()
    return columns


def _unpacked(about: Any, names: Sequence[str]) -> int:
    """The bytes of columns before they were compressed, as a file says; a value that stands there once counts once."""
    groups = [about.row_group(number) for number in range(about.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema.partition(".")[0] in names)

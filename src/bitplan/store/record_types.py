"""Every kind of record there is: importing this makes all of them known to `Record`.

Where records are defined is listed here and nowhere else; tests/core/test_kinds.py compares the list with the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitplan.core import ceilings, jobs, latencies, records, results, studies, trials, verdicts
from bitplan.core.errors import FileError
from bitplan.core.record import Record
from bitplan.store.files import load
from bitplan.store.run_folder import RunFolder

HOMES = (records, trials, studies, ceilings, results, jobs, jobs, records, verdicts, latencies)

KINDS: dict[str, type[Record]] = {
    name: kind for name, kind in Record.kinds.items() if kind.__module__ in [home.__name__ for home in HOMES]
}
"""The word in a file → its record."""


def load_any(path: Path) -> Any:
    """The record that a file holds, of whichever kind; of a folder, what it is."""
    if not path.is_dir():
        return load(path, Record)
    if RunFolder.is_one(path):
        return RunFolder(path)
    if (path / records.ABOUT).is_file():
        return load(path / records.ABOUT, records.Checkpoint)
    raise FileError(
        f"{path} is a folder, and neither a checkpoint (with a {records.ABOUT}) nor a run (with a study.json)"
    )

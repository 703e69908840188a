"""Every kind of record there is: importing this makes all of them known to `Record`.

Where records are defined is listed here and nowhere else; tests/core/test_kinds.py compares the list with the folder.
"""

from __future__ import annotations

from bitplan.core import checkpoints, jobs, latencies, probes, records, studies, trials, verdicts
from bitplan.core.record import Record

HOMES = (records, trials, studies, jobs, probes, checkpoints, verdicts, latencies)

KINDS: dict[str, type[Record]] = {
    name: kind for name, kind in Record.kinds.items() if kind.__module__ in [home.__name__ for home in HOMES]
}
"""The word in a file → its record."""

"""Every line of `docs/performance.md`, measured here and now: `make bench`.

    python -m benchmarks                   everything; the page is written anew
    python -m benchmarks select eagl       these only; their sections of the page are replaced

Each benchmark runs in a process of its own; what fails is said in the page with its reason, and the others go on.
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rows import Row, table

ALL = ("select", "trace", "startup", "eagl", "hawq", "qat_step", "finetune", "engines", "export", "integer")
ALL += ("capture", "latency", "matmulnbits", "page", "calibrate", "big_run")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
HEAD = """# Performance

Written by `make bench` (`python -m benchmarks`; `python -m benchmarks NAME` measures one section again). Each line is
ours and a peer in turn, in one process unless said otherwise; the ratio is what ours takes of what the peer takes, so
less is better, and a target is the most that it may be. Every section says when and on what it was measured, and how
busy the machine was.
"""


def main(names: Sequence[str]) -> None:
    """Measure, print, and put into the page; of a whole run nothing old is left."""
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    old = _sections(PAGE.read_text()) if PAGE.exists() and names else {}
    for name in names or ALL:
        old[name] = section(name)
        print(old[name], flush=True)
        ordered = [old[one] for one in ALL if one in old]
        PAGE.write_text("\n".join([HEAD, *ordered]))


def section(name: str) -> str:
    """The heading, when and where, and the table of one benchmark."""
    busy = os.getloadavg()[0]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        try:
            title, rows = alone.submit(_measured, name).result()
            body = table(rows)
        except Exception as error:  # one that fails must not lose the others
            title, body = name, f"did not run here: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    when = f"{datetime.date.today()}, {_machine()}, load {busy:.1f} before and {os.getloadavg()[0]:.1f} after"
    return f"## {name}\n\n{title} `python -m benchmarks.{name}` ({when}).\n\n{body}\n"


def _measured(name: str) -> tuple[str, list[Row]]:
    """The first line of a benchmark's text, and its rows; run in a new process."""
    module = importlib.import_module(f"benchmarks.{name}")
    return (module.__doc__ or name).splitlines()[0], list(module.rows())


def _machine() -> str:
    """The processor and the number of cores."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return f"{found[1] if found else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _sections(text: str) -> dict[str, str]:
    """Name → section of a page as it is."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0].removeprefix("## "): f"{part.rstrip()}\n" for part in parts}


if __name__ == "__main__":
    main(sys.argv[1:])

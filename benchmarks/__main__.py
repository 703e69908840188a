"""Every line of `docs/performance.md`, measured here and now: `make bench`.

    python -m benchmarks                         everything; the page is written anew
    python -m benchmarks select eagl             these only; their sections of the page are replaced
    python -m benchmarks --write page.md eagl    another page than docs/performance.md
    python -m benchmarks.peers                   libraries that need environments of their own; no part of `make bench`

Each benchmark runs in a process of its own; what fails is said in the page with its reason, and the others go on. The
page begins with how many targets are met and which are not, counted from its own tables.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rows import cells_of, measured, table

ALL = ("select", "startup", "eagl", "hawq", "gains", "qat_step", "export", "latency", "matmulnbits")
PEERS = "peers"  # measured by a command of its own, and kept when all others are measured again
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
FAILED = "did not run here:"
HEAD = """# Performance

Written by `make bench` (`python -m benchmarks`; `python -m benchmarks NAME` measures one section again). Each line
compares ours with a peer, interleaved, in one process unless said otherwise. The ratio is ours ÷ peer, so less is
better; a target is the most that it may be. Every section says when and on what machine it was measured, and its load.
"""


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and replace the sections of the page; a whole run leaves no old ones but the peers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, and write the page.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--write", type=Path, default=PAGE, metavar="PAGE", help="docs/performance.md unless given")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.names) - set(ALL))
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    if not asked.names:
        put(asked.write, {}, beside=(PEERS,))
    for name in asked.names or ALL:
        text = section(name)
        print(text, flush=True)
        put(asked.write, {name: text})
    print(summary(_sections(asked.write.read_text())))


def put(path: Path, sections: Mapping[str, str], *, beside: Sequence[str] = (*ALL, PEERS)) -> None:
    """Put sections into a page, beside those of these names that it has."""
    old = _sections(path.read_text()) if path.exists() else {}
    path.write_text(page({name: text for name, text in old.items() if name in beside} | dict(sections)))


def page(sections: Mapping[str, str]) -> str:
    """Return the whole page: introduction, summary, and the sections in their order."""
    ordered = {name: sections[name] for name in (*ALL, PEERS) if name in sections}
    return "\n".join([HEAD, f"{summary(ordered)}\n", *ordered.values()])


def summary(sections: Mapping[str, str]) -> str:
    """Return how many targets are met, and the lines that do not meet theirs."""
    lines = [(name, *cells) for name, text in sections.items() for cells in cells_of(text)]
    judged = [line for line in lines if line[-1] in ("yes", "no")]
    missed = [line for line in judged if line[-1] == "no"]
    silent = [name for name, text in sections.items() if FAILED in text]
    said = [f"{len(lines)} lines, {len(judged)} of them with a target; {len(judged) - len(missed)} meet it."]
    said += [f"Did not run: {', '.join(silent)}."] if silent else []
    said += ["", "Not met:", ""] if missed else []
    for name, what, ours, peer, ratio, target, _ in missed:
        found = f"{ratio} of {peer}" if ratio != "–" else ours
        said.append(f"- {name}: {what}: {found}, target {target}")
    return "\n".join(said)


def section(name: str) -> str:
    """Measure one benchmark in a process of its own and return its section."""
    busy, begun = os.getloadavg()[0], time.perf_counter()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        try:
            title, rows = alone.submit(measured, name).result()
            body = table(rows)
        except Exception as error:  # one that fails must not lose the others
            title, body = name, f"{FAILED} {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return dated(name, title, body, busy=busy, begun=begun)


def dated(name: str, title: str, body: str, *, busy: float, begun: float) -> str:
    """Return a section, with when and where it was measured, and how long that took."""
    load = f"load {busy:.1f} before and {os.getloadavg()[0]:.1f} after"
    when = f"{datetime.date.today()}, {_machine()}, {load}, {time.perf_counter() - begun:.0f} s"
    return f"## {name}\n\n{title} `python -m benchmarks{'.' if name == PEERS else ' '}{name}` ({when}).\n\n{body}\n"


def _machine() -> str:
    """Return the processor and the number of cores."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def _sections(text: str) -> dict[str, str]:
    """Return name → section of a page."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0].removeprefix("## "): f"{part.rstrip()}\n" for part in parts}


if __name__ == "__main__":
    main(sys.argv[1:])

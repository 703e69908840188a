"""What a benchmark offers to the one page of `make bench`: a function `rows()` beside its `main()`.

    def rows() -> list[Row]:
        return [Row("one budget, 500 layers × 4", ours=0.9, peer=3.1, against="HiGHS, gap 0", unit="ms", target=1.2)]

A ratio is what ours takes of what the peer takes, so that less is better and a target is the most it may be.
`rows()` prints nothing, takes no arguments, and measures ours and the peer in turn (`benchmarks.timing`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: what was measured, ours, the peer's, their ratio, and the most that it may be.

    Without a peer (`against` is then what it would have been, or "") the target is the most that ours itself may be.
    `times` is the ratio where it is not simply ours ÷ peer, such as the median over rounds of their ratios.
    `note` is said beside the line: a peer that does not run here, a machine that was busy.
    """

    what: str
    ours: float
    peer: float | None = None
    against: str = ""
    unit: str = "s"
    target: float | None = None
    times: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours ÷ peer; None without a peer."""
        if self.times is not None or self.peer is None:
            return self.times
        return self.ours / self.peer if self.peer else None

    @property
    def met(self) -> bool | None:
        """Tell whether the target is kept; None where there is none."""
        if self.target is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.target

    def cells(self) -> tuple[str, ...]:
        """As texts: what, ours, peer, ratio, target, whether it is met."""
        peer = f"{number(self.peer)} {self.unit} ({self.against})" if self.peer is not None else self.against
        unit = f" {self.unit}" if self.ratio is None else ""
        return (
            self.what + (f" ({self.note})" if self.note else ""),
            f"{number(self.ours)} {self.unit}",
            peer or "–",
            "–" if self.ratio is None else f"{self.ratio:.2f}",
            "–" if self.target is None else f"≤ {number(self.target)}{unit}",
            {True: "yes", False: "no", None: "–"}[self.met],
        )


def measured(name: str) -> tuple[str, list[Row]]:
    """The first line of a benchmark's text, and its rows: here, since a new process imports no `__main__`."""
    module = importlib.import_module(f"benchmarks.{name}")
    return (module.__doc__ or name).splitlines()[0], list(module.rows())


HEADER = ("what", "ours", "peer", "ours ÷ peer", "target", "met")


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown, padded so that it reads in a terminal as well."""
    lines = [HEADER, *(tuple(cell.replace("|", r"\|") for cell in row.cells()) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def cells_of(text: str) -> list[tuple[str, ...]]:
    """The cells of every row of the tables that `table` wrote, wherever they stand in a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and line.endswith(" |")]
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\) \| ", line[2:-2])) for line in lines]
    return [row for row in rows if len(row) == len(HEADER) and row != HEADER and set(row[0]) != {"-"}]


def number(value: float) -> str:
    """Three digits that count, thousands apart: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")

"""The rows of a benchmark, which its function `rows()` returns to the page of `make bench`.

    def rows() -> list[Row]:
        return [Row("one budget, 500 layers × 4", ours=0.9, peer=3.1, against="HiGHS, gap 0", unit="ms", target=1.2)]

A ratio is ours ÷ peer, so that less is better and a target is the most it may be. `rows()` prints nothing, takes no
arguments, and measures ours and the peer interleaved (`benchmarks.timing`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: its title, ours, the peer's, their ratio, and the most that it may be.

    Without a peer the target is the most that ours itself may be; `against` is then empty or says why there is none.
    `times` is the ratio where it is not simply ours ÷ peer, such as the median over rounds of their ratios.
    `note` is shown beside the title.
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
        """Return ours ÷ peer; None without a peer."""
        if self.times is not None or self.peer is None:
            return self.times
        return self.ours / self.peer if self.peer else None

    @property
    def met(self) -> bool | None:
        """Return True if the target is met; None without a target."""
        if self.target is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.target

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the table: what, ours, peer, ratio, target, met."""
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
    """Return the first line of a benchmark's docstring, and its rows."""
    module = importlib.import_module(f"benchmarks.{name}")
    return (module.__doc__ or name).splitlines()[0], list(module.rows())


HEADER = ("what", "ours", "peer", "ours ÷ peer", "target", "met")


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown, padded for terminals."""
    lines = [HEADER, *(tuple(cell.replace("|", r"\|") for cell in row.cells()) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEADER))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def cells_of(text: str) -> list[tuple[str, ...]]:
    """Return the cells of every row of the tables that `table` wrote into a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and line.endswith(" |")]
    rows = [tuple(cell.strip() for cell in re.split(r"(?<!\\) \| ", line[2:-2])) for line in lines]
    return [row for row in rows if len(row) == len(HEADER) and row != HEADER and set(row[0]) != {"-"}]


def number(value: float) -> str:
    """Return a number with three significant digits: 0.0123, 1.23, 12.3, 1,230."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")

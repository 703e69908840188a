"""A table as values, and the same as CSV, Markdown, LaTeX, JSON or data for the page; the terminal prints `texts`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bitplan.core.errors import UnknownName

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading. Numbers below it are shown with `digits` after the point; None shows four significant digits."""

    name: str
    digits: int | None = None
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of values under columns, with notes below them; `best` holds the (row, column) to print in bold."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    best: frozenset[tuple[int, int]] = frozenset()

    def texts(self) -> list[list[str]]:
        """Return every cell as people read it; a missing value is a dash."""
        return [[_text(value, column) for value, column in zip(row, self.columns, strict=True)] for row in self.rows]


def numbers(*names: str, digits: int | None = None) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(name, digits, number=True) for name in names)


def grid(
    title: str,
    corner: str,
    rows: Iterable[str],
    columns: Iterable[str],
    cell: Callable[[str, str], Value],
    *,
    digits: int | None = None,
    notes: tuple[str, ...] = (),
) -> Table:
    """Return a table with a row and a column of numbers per name; `cell` gives the value for both names."""
    names = list(columns)
    cells = tuple((row, *(cell(row, name) for name in names)) for row in rows)
    return Table(title, (Column(corner), *numbers(*names, digits=digits)), cells, notes)


def format_table(table: Table, form: str) -> str:
    """Return the table in a format by name."""
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    return FORMATS[form](table)


def to_csv(table: Table) -> str:
    """Return the values as they are, quoted if necessary; notes are left out."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_names(table))
    for row in table.rows:
        writer.writerow(["" if value is None else value for value in row])
    return out.getvalue()


def to_json(table: Table) -> str:
    """Return an object with one object per row."""
    rows = [dict(zip(_names(table), row, strict=True)) for row in table.rows]
    return json.dumps({"title": table.title, "rows": rows, "notes": table.notes}, indent=1, ensure_ascii=False) + "\n"


def to_page(table: Table) -> dict[str, Any]:
    """Return the texts of a table as data for the page; headings of numbers begin with ">"."""
    columns = [f">{column.name}" if column.number else column.name for column in table.columns]
    return {"columns": columns, "rows": table.texts(), "notes": list(table.notes)}


def to_markdown(table: Table) -> str:
    """Return a pipe table."""
    ruler = ["--:" if column.number else ":--" for column in table.columns]
    lines = [f"**{_markdown(table.title)}**", "", _pipes(map(_markdown, _names(table))), _pipes(ruler)]
    for row in table.texts():
        lines.append(_pipes(map(_markdown, row)))
    for note in table.notes:
        lines += ["", _markdown(note)]
    return "\n".join(lines) + "\n"


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_latex(table: Table) -> str:
    """Return a table environment with booktabs' rules."""
    caption = _latex(" ".join(f"{sentence}." for sentence in (table.title, *table.notes)))
    alignment = "".join("r" if column.number else "l" for column in table.columns)
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}", f"\\begin{{tabular}}{{{alignment}}}"]
    lines += ["  \\toprule", _ampersands(_names(table)), "  \\midrule"]
    lines += [_ampersands(row) for row in table.texts()]
    lines += ["  \\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def _ampersands(cells: Iterable[str]) -> str:
    return f"  {' & '.join(map(_latex, cells))} \\\\"


FORMATS: dict[str, Callable[[Table], str]] = {
    "csv": to_csv,
    "md": to_markdown,
    "latex": to_latex,
    "json": to_json,
}

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "–": "--", "≥": r"$\ge$", "≤": r"$\le$", "·": r"$\cdot$", "=": "=",
}  # fmt: skip


def _names(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", " ".join(text.split()))


def _text(value: Value, column: Column) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if column.digits is None else f"{value:.{column.digits}f}"

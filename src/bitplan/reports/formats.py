"""A table as values, and the same as CSV, Markdown, LaTeX or JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from bitplan.core.errors import UnknownName

Value = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading; numbers below it are shown with so many digits after the point (None: as they are)."""

    name: str
    digits: int | None = None
    number: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of values under columns, and what must be said below them; `best` are the (row, column) to stand out."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    best: frozenset[tuple[int, int]] = frozenset()

    def texts(self) -> list[list[str]]:
        """Every cell as people read it; a value that is not there is a dash."""
        return [[_text(value, column) for value, column in zip(row, self.columns, strict=True)] for row in self.rows]


def numbers(*names: str, digits: int | None = None) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(name, digits, number=True) for name in names)


def write(table: Table, form: str) -> str:
    """The table in a format by name."""
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    return FORMATS[form](table)


def to_csv(table: Table) -> str:
    """Values as they are, quoted where needed; notes are left out."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in table.columns])
    writer.writerows([["" if value is None else value for value in row] for row in table.rows])
    return out.getvalue()


def to_json(table: Table) -> str:
    """An object with one object per row."""
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    return json.dumps({"title": table.title, "rows": rows, "notes": table.notes}, indent=1, ensure_ascii=False) + "\n"


def to_markdown(table: Table) -> str:
    """A pipe table."""
    head = [_markdown(column.name) for column in table.columns]
    ruler = ["--:" if column.number else ":--" for column in table.columns]
    lines = [head, ruler, *([_markdown(text) for text in row] for row in table.texts())]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "".join(f"\n{_markdown(note)}\n" for note in table.notes)
    return f"**{_markdown(table.title)}**\n\n{body}\n{notes}"


def to_latex(table: Table) -> str:
    """A table environment with booktabs' rules."""
    lines = [[_latex(column.name) for column in table.columns], *([_latex(text) for text in r] for r in table.texts())]
    head, *rows = [f"  {' & '.join(line)} \\\\" for line in lines]
    spec = "".join("r" if column.number else "l" for column in table.columns)
    caption = _latex(" ".join([f"{table.title}.", *(f"{note}." for note in table.notes)]))
    begin = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}", f"\\begin{{tabular}}{{{spec}}}", "  \\toprule"]
    end = ["  \\bottomrule", "\\end{tabular}", "\\end{table}"]
    return "\n".join([*begin, head, "  \\midrule", *rows, *end]) + "\n"


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


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]])", r"\\\1", " ".join(text.split()))


def _text(value: Value, column: Column) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.{column.digits}f}" if column.digits is not None else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value

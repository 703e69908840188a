"""Studies and runs as people see them: progress, forecasts, tables."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from bitplan.cli.show import console, table
from bitplan.core.progress import clock
from bitplan.core.studies import Fit, Pairs, Study
from bitplan.reports.formats import Column, Table, to_json

if TYPE_CHECKING:
    from bitplan.study.forecast import Forecast
    from bitplan.study.status import Status
    from bitplan.study.sweep import Summary

_FAILURES_SHOWN = 5
_BAR = 24  # blocks of a bar
_GAP = 2  # between two columns
_LEAST = 16  # what a column of texts keeps of its width where room is scarce
_NAMES = 24  # and the first one, which says what a row is about


@contextmanager
def showing_progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal; elsewhere a line per event, with the time since the beginning."""
    begin = time.perf_counter()
    if not sys.stderr.isatty():
        yield lambda done, total, what: print(
            f"{clock(time.perf_counter() - begin):>8}  {done}/{total}  {what}", file=sys.stderr, flush=True
        )
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def show_table(found: Table) -> None:
    """A table of a run on the terminal; one that is too wide goes on below, its first column repeated."""
    out, texts = console(), found.texts()
    for row, column in found.best:
        texts[row][column] = f"* {texts[row][column]}"
    widths = [_widths(column, cells) for column, *cells in zip(found.columns, *texts, strict=True)]
    widths[0] = min(_NAMES, widths[0][1]), widths[0][1]
    out.print(Text(found.title, "bold"))
    for part, columns in enumerate(_parts([least for least, _ in widths], out.width)):
        heads = [found.columns[one] for one in columns]
        rows = table(*(f">{head.name}" if head.number else head.name for head in heads))
        for shown, width in zip(rows.columns, _shared([widths[one] for one in columns], out.width), strict=True):
            shown.width, shown.no_wrap = width, False
        for row, cells in enumerate(texts):
            if not part or any(found.rows[row][one] is not None for one in columns[1:]):
                rows.add_row(*(Text(cells[one], "bold" if (row, one) in found.best else "") for one in columns))
        out.print(*([""] if part else []), rows, sep="\n")
    for note in (*found.notes, *(["* the best of its column"] if found.best else [])):
        out.print(_indented(note))
    out.print()


def _widths(column: Column, cells: Sequence[str]) -> tuple[int, int]:
    """The least width of a column and the one it would like: headings and texts may be folded, numbers may not."""
    content, head = max(map(cell_len, cells), default=0), cell_len(column.name)
    wanted = max(content, head)
    if column.number:
        return max(content, *map(cell_len, column.name.split()), 1), wanted
    return min(_LEAST, wanted), wanted


def _shared(widths: Sequence[tuple[int, int]], room: int) -> list[int]:
    """What is left of the room goes first to those columns that lack little."""
    given = [least for least, _ in widths]
    spare = room - sum(given) - _GAP * (len(given) - 1)
    for column in sorted(range(len(widths)), key=lambda one: widths[one][1] - widths[one][0]):
        more = max(0, min(widths[column][1] - given[column], spare))
        given[column], spare = given[column] + more, spare - more
    return given


def _indented(shown: str | RichTable) -> Padding:
    return Padding(shown, (0, 0, 0, 2), expand=False)


def _parts(least: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand side by side: all of them where they fit, else the first with as many as do."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(least)):
        taken = sum(least[one] + _GAP for one in parts[-1])
        if len(parts[-1]) > 1 and taken + least[column] > room:
            parts.append([0])
        parts[-1].append(column)
    return parts


def print_tables(found: Mapping[str, Table]) -> None:
    """Several tables as one JSON object."""
    print(json.dumps({name: json.loads(to_json(one)) for name, one in found.items()}, indent=1, ensure_ascii=False))


def show_status(found: Status, *, as_json: bool, by_method: bool = True) -> None:
    """How far a run is, what is running, what failed and why; `by_method` adds a bar for each."""
    if as_json:
        content = dataclasses.asdict(dataclasses.replace(found, study=found.study.name, failed=(), parts=()))  # type: ignore[arg-type]
        del content["parts"]
        content["failed"] = [{"trial": found.study.words(one.trial), "error": one.error} for one in found.failed]
        print(json.dumps(content, indent=1))
        return
    out = console()
    shared = f" ({found.shared} of all share a training with another)" if found.shared else ""
    left = "" if found.seconds_left is None else f"; about {clock(found.seconds_left)} left"
    out.print(
        f"{found.study.name}: {found.done} of {found.total} trials done{shared}, {len(found.running)} running, "
        f"{len(found.failed)} failed, {found.waiting} waiting{left if found.waiting or found.running else ''}"
    )
    if by_method and found.parts:
        out.print(_indented(_meters(found)))
    for one in found.running:
        out.print(_indented(f"running: {one.what}{f', step {one.step}' if one.step else ''}"))
    for failed in found.failed[:_FAILURES_SHOWN]:
        out.print(f"  failed: {found.study.words(failed.trial)}: {' '.join(failed.error.split())}")
    if found.failed:
        out.print("  tracebacks are in failures/; `bitplan sweep --retry` tries them again")


def _meters(found: Status) -> RichTable:
    """A bar for the whole run, and one for each method and reference."""
    from bitplan.study.status import MethodProgress

    rows = table("", "", ">done", *([">failed"] if found.failed else []))
    rows.show_header = bool(found.failed)
    whole = MethodProgress("all trials", found.total, found.done, len(found.failed))
    for part in (whole, *found.parts):
        full = _BAR * part.done // max(1, part.total)
        bar = Text("█" * full, "green").append("░" * (_BAR - full), "dim")
        counts = [f"{part.done}/{part.total}", *([str(part.failed or "")] if found.failed else [])]
        rows.add_row(Text(part.title, "bold" if part is whole else ""), bar, *counts)
    return rows


def show_forecast(study: Study, folder: Path, found: Forecast, *, as_json: bool) -> None:
    """Every trial with its seconds, then the sums."""
    if as_json:
        lines = [
            {"id": one.trial.id, "trial": study.words(one.trial), "done": one.done, "seconds": one.seconds}
            for one in found.lines
        ]
        rest = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "lines"}
        print(json.dumps({"trials": lines, **rest}, indent=1))
        return
    rows = table("trial", "id", ">about", "state", title=f"{study.name} → {folder}")
    for line in found.lines:
        rows.add_row(study.words(line.trial), line.trial.id, clock(line.seconds), "done" if line.done else "to do")
    out = console()
    out.print(rows)
    left = sum(not line.done for line in found.lines)
    methods = "".join(f"; {title} estimates for about {clock(taken)}" for title, taken in found.methods.items())
    out.print(
        f"\n{left} of {len(found.lines)} trials to do: at most about {clock(found.seconds)} in turn "
        f"({1000 * found.step_seconds:.0f} ms a step){methods}; {found.bytes_kept / 1e6:.1f} MB kept, and "
        f"{found.bytes_passing / 1e6:.1f} MB at a time for each training. Trials that choose the same layers are "
        "trained once."
    )


def print_summary(summary: Summary, folder: Path) -> None:
    """How a sweep ended, as JSON."""
    counts = {"total": summary.total, "done": summary.done, "failed": len(summary.failed)}
    print(json.dumps({"run": str(folder), **counts, "trained": summary.trained, "seconds": summary.seconds}))


def show_additivity(pairs: Pairs | None, fit: Fit | None, *, as_json: bool) -> None:
    """What both experiments say."""
    if as_json:
        print(json.dumps({one.kind(): json.loads(one.to_json()) for one in (pairs, fit) if one is not None}, indent=1))
        return
    out = console()
    if pairs is not None:
        out.print(
            f"{len(pairs.pairs)} pairs of groups, by {pairs.metric}: predicted against measured drop R = "
            f"{pairs.correlation:.3f} (the paper: 0.98)"
        )
    if fit is not None:
        held = "none" if fit.correlation_held_out is None else f"{fit.correlation_held_out:.4f}"
        out.print(
            f"{fit.networks} random plans of {fit.epochs:.3g} epochs, by {fit.metric}: R = {fit.correlation:.4f} on "
            f"those fitted, {held} on those held out (the paper: 0.9996 and 0.9994); residual {fit.residual:.3g}"
        )

"""Studies and runs as people see them: progress, forecasts, tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from bitplan.cli.console import console
from bitplan.cli.show import table
from bitplan.cli.terminal import say, say_json
from bitplan.core.escaping import shown
from bitplan.core.progress import clock
from bitplan.core.studies import Fit, Pairs, Study
from bitplan.reports.formats import Column, Table, to_json

if TYPE_CHECKING:
    from bitplan.study.forecast import Forecast
    from bitplan.study.status import Checked, Status
    from bitplan.study.sweep import Summary

_FAILURES_SHOWN = 5
_BAR = 24  # blocks of a bar
_GAP = 2  # between two columns
_LEAST = 16  # what a column of texts keeps of its width where room is scarce
_NAMES = 24  # and the first one, which says what a row is about


def show_table(content: Table) -> None:
    """A table of a run on the terminal; one that is too wide goes on below, its first column repeated."""
    out, texts = console(), [[shown(text) for text in row] for row in content.texts()]
    for row, column in content.best:
        texts[row][column] = f"* {texts[row][column]}"
    widths = [_width(column, cells) for column, *cells in zip(content.columns, *texts, strict=True)]
    widths[0] = dataclasses.replace(widths[0], least=min(_NAMES, widths[0].wanted))
    out.print(Text(content.title, "bold"))
    for part, columns in enumerate(_parts(widths, out.width)):
        rows = list(range(len(texts)))
        if part > 0:
            out.print()
            rows = [row for row in rows if any(content.rows[row][column] is not None for column in columns[1:])]
        made = _headed([content.columns[column] for column in columns], _shared(widths, columns, out.width))
        for row in rows:
            cells = []
            for column in columns:
                style = "bold" if (row, column) in content.best else ""
                cells.append(Text(texts[row][column], style))
            made.add_row(*cells)
        out.print(made)
    for note in content.notes:
        out.print(_indented(note))
    if content.best:
        out.print(_indented("* the best of its column"))
    out.print()


def _headed(columns: Sequence[Column], widths: Sequence[int]) -> RichTable:
    """An empty table with these columns, each exactly so wide."""
    made = table(*(f">{column.name}" if column.number else column.name for column in columns))
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
        column.no_wrap = False  # the headings of numbers may be folded
    return made


@dataclasses.dataclass(frozen=True)
class _Width:
    """The least width of a column and the one it would like."""

    least: int
    wanted: int


def _width(column: Column, cells: Sequence[str]) -> _Width:
    """Headings and texts may be folded, numbers may not."""
    content = max(map(cell_len, cells), default=0)
    wanted = max(content, cell_len(column.name))
    if column.number:
        return _Width(max(content, *map(cell_len, column.name.split()), 1), wanted)
    return _Width(min(_LEAST, wanted), wanted)


def _shared(widths: Sequence[_Width], columns: Sequence[int], room: int) -> list[int]:
    """How wide each of these columns is; what is left of the room goes first to those that lack little."""
    given = {column: widths[column].least for column in columns}
    spare = room - sum(given.values()) - _GAP * (len(columns) - 1)
    for column in sorted(columns, key=lambda column: widths[column].wanted - widths[column].least):
        more = max(0, min(widths[column].wanted - given[column], spare))
        given[column] += more
        spare -= more
    return list(given.values())


def _indented(content: str | RichTable) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _parts(widths: Sequence[_Width], room: int) -> list[list[int]]:
    """Which columns stand side by side: all of them where they fit, else the first with as many as do."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        taken = sum(widths[before].least + _GAP for before in parts[-1])
        if len(parts[-1]) > 1 and taken + widths[column].least > room:
            parts.append([0])
        parts[-1].append(column)
    return parts


def print_tables(tables: Mapping[str, Table]) -> None:
    """Several tables as one JSON object."""
    content = {name: json.loads(to_json(one)) for name, one in tables.items()}
    say_json(json.dumps(content, indent=1, ensure_ascii=False))


def show_status(status: Status, *, as_json: bool, by_method: bool = True) -> None:
    """How far a run is, what is running, what failed and why; `by_method` adds a bar for each."""
    if as_json:
        _print_status(status)
        return
    out = console()
    out.print(_status_line(status))
    if by_method and status.parts:
        out.print(_indented(_meters(status)))
    for job in status.running:
        step = f", step {job.step}" if job.step else ""
        out.print(_indented(f"running: {job.what}{step}"))
    for failed in status.failed[:_FAILURES_SHOWN]:
        out.print(f"  failed: {status.study.words(failed.trial)}: {' '.join(failed.error.split())}")
    if status.failed:
        out.print("  tracebacks are in failures/; `bitplan sweep --retry` tries them again")
    for line in status.damaged[:_FAILURES_SHOWN]:
        out.print(f"  damaged: {line}")
    if status.damaged:
        out.print("  `bitplan store check` names all; `bitplan sweep` mends what it can and says what is missing")
    if status.missing:
        out.print("  `bitplan sweep --redo-damaged` does the missing ones again, whose results were damaged")


def _print_status(status: Status) -> None:
    """As JSON: the study by its name, failures in words."""
    content = dataclasses.asdict(dataclasses.replace(status, study=status.study.name, failed=(), parts=()))  # type: ignore[arg-type]
    del content["parts"]
    content["failed"] = [{"trial": status.study.words(one.trial), "error": one.error} for one in status.failed]
    say_json(json.dumps(content, indent=1))


def _status_line(status: Status) -> str:
    line = f"{status.study.name}: {status.done} of {status.total} trials done"
    if status.shared:
        line += f" ({status.shared} of all share a training with another)"
    line += f", {len(status.running)} running, {len(status.failed)} failed, {status.waiting} waiting"
    if status.missing:
        line += f", {status.missing} missing"
    unfinished = status.waiting or status.running
    if unfinished and status.seconds_left is not None:
        line += f"; about {clock(status.seconds_left)} left"
    return line


def _meters(status: Status) -> RichTable:
    """A bar for the whole run, and one for each method and reference; failures where there are any."""
    from bitplan.study.status import MethodProgress

    rows = table("", "", ">done", ">failed") if status.failed else table("", "", ">done")
    rows.show_header = bool(status.failed)
    whole = MethodProgress("all trials", status.total, status.done, len(status.failed))
    for part in (whole, *status.parts):
        full = _BAR * part.done // max(1, part.total)
        blocks = Text("█" * full, "green").append("░" * (_BAR - full), "dim")
        counts = [f"{part.done}/{part.total}"]
        if status.failed:
            counts.append(str(part.failed or ""))
        rows.add_row(Text(shown(part.title), "bold" if part is whole else ""), blocks, *counts)
    return rows


def show_forecast(study: Study, folder: Path, forecast: Forecast, *, as_json: bool) -> None:
    """Every trial with its seconds, then the sums."""
    if as_json:
        _print_forecast(study, forecast)
        return
    rows = table("trial", "id", ">about", "state", title=f"{study.name} → {folder}")
    for line in forecast.lines:
        state = "done" if line.done else "to do"
        rows.add_row(study.words(line.trial), line.trial.id, clock(line.seconds), state)
    out = console()
    out.print(rows)
    left = sum(not line.done for line in forecast.lines)
    methods = "".join(f"; {title} estimates for about {clock(seconds)}" for title, seconds in forecast.methods.items())
    out.print(
        f"\n{left} of {len(forecast.lines)} trials to do: at most about {clock(forecast.seconds)} in turn "
        f"({1000 * forecast.step_seconds:.0f} ms a step){methods}; {forecast.bytes_kept / 1e6:.1f} MB kept, and "
        f"{forecast.bytes_passing / 1e6:.1f} MB at a time for each training. Trials that choose the same layers are "
        "trained once."
    )


def _print_forecast(study: Study, forecast: Forecast) -> None:
    trials = []
    for line in forecast.lines:
        trial = line.trial
        trials.append({"id": trial.id, "trial": study.words(trial), "done": line.done, "seconds": line.seconds})
    names = [field.name for field in dataclasses.fields(forecast) if field.name != "lines"]
    sums = {name: getattr(forecast, name) for name in names}
    say_json(json.dumps({"trials": trials, **sums}, indent=1))


def print_summary(summary: Summary, folder: Path) -> None:
    """How a sweep ended, as JSON."""
    counts = {"total": summary.total, "done": summary.done, "failed": len(summary.failed)}
    counts["missing"] = len(summary.missing)
    say_json(json.dumps({"run": str(folder), **counts, "trained": summary.trained, "seconds": summary.seconds}))


def show_check(checked: Checked, *, as_json: bool) -> None:
    """What is wrong in a run, a line each, then how much was looked at."""
    if as_json:
        wrong = [{"path": str(one.path), "what": one.what} for one in checked.wrong]
        unknown = [str(path) for path in checked.unknown]
        say_json(json.dumps({"files": checked.files, "wrong": wrong, "unknown": unknown}, indent=1))
        return
    for one in checked.wrong:
        what = " ".join(one.what.split())
        say(what if str(one.path) in what else f"{one.path}: {what}")
    for path in checked.unknown:
        say(f"not checked, since it carries no checksum: {path}")
    say(f"{checked.files} files checked: {f'{len(checked.wrong)} wrong' if checked.wrong else 'all sound'}")


def show_additivity(pairs: Pairs | None, fit: Fit | None, *, as_json: bool) -> None:
    """What both experiments say."""
    if as_json:
        records = [record for record in (pairs, fit) if record is not None]
        say_json(json.dumps({record.kind(): json.loads(record.to_json()) for record in records}, indent=1))
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

"""Studies and runs as people see them: progress, forecasts, tables."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bitplan.cli.show import console, table
from bitplan.core.studies import Fit, Pairs, Study
from bitplan.reports.formats import Table, to_json

if TYPE_CHECKING:
    from bitplan.study.forecast import Forecast
    from bitplan.study.status import Status
    from bitplan.study.sweep import Summary

_FAILURES_SHOWN = 5


@contextmanager
def watching() -> Iterator[Callable[[int, int, str], None]]:
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
    """A table of a run on the terminal."""
    columns = [f">{column.name}" if column.number else column.name for column in found.columns]
    rows = table(*columns, title=found.title)
    for row in found.texts():
        rows.add_row(*row)
    out = console()
    out.print(rows)
    for note in found.notes:
        out.print(f"  {note}")
    out.print()


def print_tables(found: Mapping[str, Table]) -> None:
    """Several tables as one JSON object."""
    print(json.dumps({name: json.loads(to_json(one)) for name, one in found.items()}, indent=1, ensure_ascii=False))


def show_status(found: Status, *, as_json: bool) -> None:
    """How far a run is, what is running, what failed and why."""
    if as_json:
        content = dataclasses.asdict(dataclasses.replace(found, study=found.study.name, failed=()))  # type: ignore[arg-type]
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
    for one in found.running:
        out.print(f"  running: {one.what}{f', step {one.step}' if one.step else ''}")
    for failed in found.failed[:_FAILURES_SHOWN]:
        out.print(f"  failed: {found.study.words(failed.trial)}: {' '.join(failed.error.split())}")
    if found.failed:
        out.print("  tracebacks are in failures/; `bitplan sweep --retry` tries them again")


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


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

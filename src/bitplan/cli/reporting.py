"""The verb that makes something to look at: `bitplan report`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.terminal import tell
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bitplan.core.records import Costs, Gains, Graph, Plan


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(report)


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or the file of its results.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write one page (.html) here.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw the paper's figures into this folder.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Answer for this budget; the study's middle one unless said.")
    ] = None,
) -> None:
    """Show a run: one page that opens anywhere, or the paper's figures (SVG, PDF, PNG)."""
    if output is None and figures is None:
        raise InputError("say what to make: -o report.html for the page, --figures DIR for the figures")
    if output is not None:
        from bitplan.reports.document import report as write_report

        _tell_written(write_report(run, output, budget=budget))
    if figures is not None:
        from bitplan.reports.figures import write_figures

        made = write_figures(run, figures, budget=budget)
        for path in made.paths:
            _tell_written(path)
        for name, reason in made.left_out.items():
            tell(f"no {name} figure: {reason}")


def write_page(plan: Plan, graph: Graph, gains: Gains, costs: Sequence[Costs], path: Path | None) -> None:
    """The page of a single plan, with the command line that made it, where one was asked for."""
    if path is None:
        return
    from bitplan.reports.document import report_plan

    words = ["bitplan", *sys.argv[1:]]
    _tell_written(report_plan(plan, graph, gains, tuple(costs), path, command=shlex.join(words)))


def _tell_written(path: Path) -> None:
    tell(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB)")

"""The verb that prints tables: of a run, or of what others published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.terminal import say, say_json, tell
from bitplan.core.errors import InputError

if TYPE_CHECKING:
    from bitplan.reports.formats import Table
    from bitplan.reports.published import Traced

PUBLISHED = "published"
TIMES = "published_times"


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(tables)


def tables(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The folder of a run; none for published and published_times."),
    ] = None,
    which: Annotated[
        str,
        typer.Option(
            help="frontier, spend, regret, quantizers, costs, compression, layers, lowered, agreement, differences; "
            "published, published_times."
        ),
    ] = "frontier",
    budgets: Annotated[
        str, typer.Option(help="Budgets for layers, lowered and differences, chosen anew: 60%,80%.")
    ] = "",
    of: Annotated[str | None, typer.Option(help="Of what is published, only this network or task: resnet50.")] = None,
    form: Annotated[str | None, typer.Option("--format", help="csv, md, latex or json.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the table to this file.")] = None,
) -> None:
    """Print a table of a run (its frontier, its layers, what it took …), or of what others published."""
    within = [one.strip() for one in budgets.split(",") if one.strip()]
    plain = form in ("csv", "json")
    if which in (PUBLISHED, TIMES):
        _refuse(run=run, budgets=within, which=which)
        table = _published(of, plain=plain) if which == PUBLISHED else _times(of)
    else:
        table = _of_run(run, which, of, within, plain=plain)
    _give(table, form, output)


def _refuse(*, run: Path | None, budgets: list[str], which: str) -> None:
    """What is typed for nothing where a table is of no run."""
    if run is not None or budgets:
        idle = "--budgets" if run is None else str(run)
        raise InputError(f"the table {which} is of no run, so {idle} has no part in it: leave it out")


def _of_run(run: Path | None, which: str, of: str | None, budgets: list[str], *, plain: bool) -> Table:
    from bitplan.core.runs import RunFolder
    from bitplan.reports.tables import check_name, make

    check_name(which, (PUBLISHED, TIMES))
    if run is None:
        raise InputError(f"the table {which} is of a run: bitplan tables RUN --which {which}")
    if of is not None:
        raise InputError(f"--of is for what others published: --which {PUBLISHED} --of {of}, without {run}")
    return make(which, RunFolder(run), plain=plain, budgets=budgets)


def _published(of: str | None, *, plain: bool) -> Table:
    from bitplan.reports.published import about, needed, published, published_values

    traced = {name: _traced(name) for name in needed(about(of))}
    return (published_values if plain else published)(traced, of)


def _times(of: str | None) -> Table:
    from bitplan.reports.published import published_times

    return published_times(of)


def _traced(name: str) -> Traced:
    """The structure of a network of the zoo, built without weights."""
    from bitplan.graph.trace import trace
    from bitplan.models.zoo import load_model
    from bitplan.reports.published import Traced

    model, example = load_model(name, weightless=True)
    return Traced(trace(model, example, name=name), sum(parameter.numel() for parameter in model.parameters()))


def _give(table: Table, form: str | None, output: Path | None) -> None:
    """On the terminal, in a format, or into a file."""
    if form is None and output is None:
        from bitplan.cli.show_runs import show_table

        show_table(table)
        return
    from bitplan.reports.formats import write

    text = write(table, form or "md")
    if output is None:
        say_json(text) if form == "json" else say(text, end="")
        return
    from bitplan.core.store import write_text

    tell(f"wrote {write_text(output, text)}")

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

METHODS = "methods"
PUBLISHED = "published"
TIMES = "published_times"


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(tables)


def tables(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]", help="A run's folder or results; several for methods, none for published."),
    ] = None,
    which: Annotated[
        str,
        typer.Option(
            help="frontier, spend, regret, quantizers, costs, compression, layers, lowered, agreement, differences; "
            "methods (of several runs); published, published_times."
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
    given = runs or []
    if which in (PUBLISHED, TIMES):
        _refuse(run=given[0] if given else None, budgets=within, which=which)
        table = _published(of, plain=plain) if which == PUBLISHED else _times(of)
    elif which == METHODS:
        table = _across(given, plain=plain)
    else:
        table = _of_run(given, which, of, within, plain=plain)
    _give(table, form, output)


def _refuse(*, run: Path | None, budgets: list[str], which: str) -> None:
    """What is typed for nothing where a table is of no run."""
    if run is not None or budgets:
        idle = "--budgets" if run is None else str(run)
        raise InputError(f"the table {which} is of no run, so {idle} has no part in it: leave it out")


def _across(runs: list[Path], *, plain: bool) -> Table:
    from bitplan.reports.kept_results import look_at
    from bitplan.reports.regrets import methods, methods_values

    if not runs:
        raise InputError(f"the table {METHODS} is of runs: bitplan tables RUN RUN … --which {METHODS}")
    return (methods_values if plain else methods)([look_at(one) for one in runs])


def _of_run(runs: list[Path], which: str, of: str | None, budgets: list[str], *, plain: bool) -> Table:
    from bitplan.reports.kept_results import look_at
    from bitplan.reports.tables import check_name, make

    check_name(which, (METHODS, PUBLISHED, TIMES))
    if len(runs) != 1:
        raise InputError(f"the table {which} is of a run: bitplan tables RUN --which {which}")
    run = runs[0]
    if of is not None:
        raise InputError(f"--of is for what others published: --which {PUBLISHED} --of {of}, without {run}")
    return make(which, look_at(run), plain=plain, budgets=budgets)


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
    from bitplan.store.files import write_text

    tell(f"wrote {write_text(output, text)}")

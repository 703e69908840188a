"""Commands that look at names and files: list, show, diff and validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.options import Files, Json
from bitplan.cli.terminal import say, say_json, tell_error
from bitplan.core.errors import FileError


def list_names(
    what: Annotated[
        str,
        typer.Argument(
            help="gains, costs, selectors, models, searches, relaxations, judges, layers, quantizers, tasks …"
        ),
    ],
    json: Json = False,
) -> None:
    """List the names of everything that can be exchanged: methods, models, tasks, formats …"""
    from bitplan.cli.show import show_methods, show_names, show_quantizers
    from bitplan.core.errors import UnknownName
    from bitplan.core.registry import REGISTRIES

    if what not in REGISTRIES:
        raise UnknownName("list", what, REGISTRIES)
    if what == "models":
        from bitplan.models.zoo import model_names

        show_names({name: "" for name in model_names()}, as_json=json)
        return
    if what == "quantizers":
        from bitplan.quant.methods import describe_quantizers

        show_quantizers(describe_quantizers(), as_json=json)
        return
    registry = REGISTRIES[what]
    if what in ("gains", "searches", "relaxations", "judges"):
        show_methods({name: registry.get(name) for name in registry}, as_json=json)
        return
    show_names({name: (registry.get(name).__doc__ or "").split("\n")[0] for name in registry}, as_json=json)


def show_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A record (.json), a checkpoint folder, or a run.")],
    json: Json = False,
) -> None:
    """Show any file of bitplan's: a graph, gains, costs, a plan, results, a checkpoint, a run."""
    from bitplan.cli.show import show_record, show_status, show_table
    from bitplan.core.results import RunResults
    from bitplan.store.files import load
    from bitplan.store.run_folder import RunFolder

    record = load(file)
    if isinstance(record, RunFolder):
        from bitplan.study.status import status

        show_status(status(file), as_json=json)
    elif json:
        say_json(record.to_json())
    elif isinstance(record, RunResults) and record.study.methods:
        from bitplan.reports.kept_results import open_run
        from bitplan.reports.tables import frontier

        show_table(frontier(open_run(file)))
    else:
        show_record(record)


def diff(
    first: Annotated[Path, typer.Argument(help="A plan file (.json).")],
    second: Annotated[Path, typer.Argument(help="The plan file to compare it with.")],
    json: Json = False,
) -> None:
    """Show which layers of two plans differ."""
    from bitplan.cli.show import show_difference
    from bitplan.core.records import Plan
    from bitplan.store.files import load

    show_difference(load(first, Plan), load(second, Plan), as_json=json)


def validate(files: Files) -> None:
    """Check that record files are readable, complete and of a known format."""
    from bitplan.core.record import Record
    from bitplan.store.files import load

    bad = 0
    for file in files:
        try:
            record = load(file, Record)
            say(f"{file}: {record.kind()} {record.id}, valid")
        except FileError as error:
            bad += 1
            tell_error(error)
    if bad:
        raise typer.Exit(2)

"""The verbs that look at what there is: diff, list, validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.options import Files, Json
from bitplan.cli.terminal import say, tell_error
from bitplan.core.errors import FileError


def add(app: typer.Typer) -> None:
    """Add the verbs of this file."""
    app.command()(diff)
    app.command(name="list")(list_names)
    app.command()(validate)


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


def list_names(
    what: Annotated[
        str,
        typer.Argument(
            help="gains, costs, selectors, models, searches, relaxations, judges, layers, quantizers, tasks …"
        ),
    ],
    json: Json = False,
) -> None:
    """List what can be exchanged, by name."""
    from bitplan.cli.show import show_names
    from bitplan.core.errors import UnknownName
    from bitplan.core.registry import REGISTRIES

    if what not in REGISTRIES:
        raise UnknownName("list", what, REGISTRIES)
    if what == "models":
        from bitplan.models.zoo import model_names

        show_names({name: "" for name in model_names()}, as_json=json)
        return
    if what == "quantizers":
        from bitplan.cli.show import show_quantizers
        from bitplan.quant.methods import described

        show_quantizers(described(), as_json=json)
        return
    registry = REGISTRIES[what]
    if what in ("gains", "searches", "relaxations", "judges"):
        from bitplan.cli.show_methods import show_methods

        show_methods({name: registry.get(name) for name in registry}, as_json=json)
        return
    show_names({name: (registry.get(name).__doc__ or "").split("\n")[0] for name in registry}, as_json=json)


def validate(files: Files) -> None:
    """Check record files: readable, complete, of a known format."""
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

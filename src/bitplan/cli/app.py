"""The command line: every command with its place, in panels."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bitplan.cli import exporting, looking, planning, runs, studies, training
from bitplan.cli.command import App
from bitplan.cli.terminal import say, tell_error
from bitplan.core.errors import InputError
from bitplan.core.registry import COMMANDS

PANELS: dict[str, dict[str, Any]] = {
    "From a model to a file": {
        "plan": planning.plan,
        "quantize": training.quantize,
        "finetune": training.finetune,
        "evaluate": training.evaluate,
        "export": exporting.export,
        "verify": exporting.verify,
    },
    "Compare methods": {
        "sweep": studies.sweep,
        "compare": studies.compare,
        "report": studies.report,
        "demo": studies.demo,
    },
    "Look": {"list": looking.list_names},
}
GROUPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "show": (
        "Look",
        "Show any file of bitplan's: bitplan show FILE. Or compare plans, check files, list the plans of many budgets.",
        {"file": looking.show_file, "frontier": planning.frontier, "diff": looking.diff, "validate": looking.validate},
    ),
    "run": (
        "Compare methods",
        "Look at a run, or look after it: its progress, tables, results, data and files.",
        {"status": runs.status, "tables": runs.tables, "results": runs.results, "additivity": runs.additivity}
        | {"data": runs.data},
    ),
    "run.store": (
        "",
        "Look after the folder of a run.",
        {"check": runs.check_store, "clean": runs.clean_store},
    ),
    "steps": (
        "Look",
        "The steps of plan one by one: trace, price, estimate, select.",
        {"trace": planning.trace, "price": planning.price, "estimate": planning.estimate, "select": planning.select},
    ),
}


def build() -> App:
    """Return the command line, with the commands that entry points bring."""
    app = App(
        name="bitplan",
        pretty_exceptions_enable=False,
        add_completion=False,
        help="Choose how many bits each layer of a neural network gets, under a budget.",
    )
    app.callback()(_root)
    groups = {"": app}
    for panel, commands in PANELS.items():
        for name, function in commands.items():
            app.command(name, rich_help_panel=panel)(function)
    for path, (panel, text, commands) in GROUPS.items():
        parent, _, name = path.rpartition(".")
        settings = {"ignore_unknown_options": "file" in commands}  # they are of the command for files
        groups[path] = group = App(help=text, context_settings=settings)
        group.callback()(lambda: None)
        for command, function in commands.items():
            group.command(command, hidden=command == "file")(function)
        groups[parent].add_typer(group, name=name, rich_help_panel=panel or None)
    for path in COMMANDS:
        parent, _, name = path.rpartition(".")
        try:
            groups[parent].command(name, rich_help_panel=None if parent else "More")(COMMANDS.get(path))
        except InputError as error:  # the other commands still work
            tell_error(error)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from bitplan import __version__

        say(f"bitplan {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app = build()

"""The verb that looks for data: `bitplan data check cifar10 DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.options import Json, TaskOption
from bitplan.cli.terminal import say, say_json
from bitplan.cli.words import App, Verbs
from bitplan.core.errors import UnknownName
from bitplan.core.option_parsing import read_options
from bitplan.core.registry import TASKS


def add(app: typer.Typer) -> None:
    """Register the verb."""
    data = App(cls=Verbs, no_args_is_help=True, help="Look after data sets: data check cifar10 DIR.")
    data.command(name="check")(check)
    data.callback()(lambda: None)
    app.add_typer(data, name="data")


def check(
    task: Annotated[str, typer.Argument(help="The task whose data it is: cifar10, imagenet, camvid, squad …")],
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="Where it is, unless where usual.")] = None,
    task_option: TaskOption = [],
    json: Json = False,
) -> None:
    """Say of each split how many samples there are, or what is missing and where it is to be had."""
    from bitplan.tasks.checking import look_for

    if task not in TASKS:
        raise UnknownName("task", task, TASKS)
    options = read_options(task_option, "--task-option") | ({} if folder is None else {"data": str(folder)})
    found = look_for(task, **options)
    if json:
        import dataclasses
        from json import dumps

        say_json(dumps([dataclasses.asdict(one) for one in found], ensure_ascii=False))
    else:
        for one in found:
            say(str(one))
    if any(one.missing for one in found):
        raise typer.Exit(1)

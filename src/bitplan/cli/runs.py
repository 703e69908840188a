"""Commands that look at one run, or look after it: `bitplan run …`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import Json, RunPath, Trust
from bitplan.cli.terminal import say, say_json, showing_progress, tell
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.option_parsing import read_named
from bitplan.core.registry import TASKS

if TYPE_CHECKING:
    from bitplan.reports.formats import Table
    from bitplan.reports.published import Traced

METHODS = "methods"
PUBLISHED = "published"
TIMES = "published_times"


def status(run: RunPath, json: Json = False) -> None:
    """Show how far a run is, from any terminal at any time."""
    from bitplan.cli.show import show_status
    from bitplan.study.status import status as look

    show_status(look(run), as_json=json)


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
        str,
        typer.Option(show_default="the study's", help="Budgets for layers, lowered and differences: 60%,80%."),
    ] = "",
    of: Annotated[
        str | None,
        typer.Option(show_default="all", help="Of published figures, only this network or task: resnet50."),
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", show_default="a table for the terminal", help="csv, md, latex or json.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", show_default="the terminal alone", help="Write the table to this file."),
    ] = None,
) -> None:
    """Print a table of a run (its frontier, its layers, its spending …), or of published figures."""
    within = [one.strip() for one in budgets.split(",") if one.strip()]
    plain = format in ("csv", "json")
    given = runs or []
    if which in (PUBLISHED, TIMES):
        _refuse_run(run=given[0] if given else None, budgets=within, which=which)
        table = _make_published(of, plain=plain) if which == PUBLISHED else _make_times(of)
    elif which == METHODS:
        table = _compare_runs(given, plain=plain)
    else:
        table = _of_run(given, which, of, within, plain=plain)
    _print(table, format, output)


def results(
    run: RunPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file (.json), such as results/NAME.json.")],
) -> None:
    """Keep the results of a run in one small file, which compare, tables and report take in place of the folder."""
    from bitplan.reports.kept_results import keep_results
    from bitplan.store.files import write_text

    found = keep_results(run)
    path = write_text(output, found.to_json())
    tell(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB): {len(found.results.own)} trials")


def additivity(
    run: RunPath,
    pairs: Annotated[int, typer.Option(min=0, help="How many random pairs of groups to lower; 0 for none.")] = 80,
    samples: Annotated[int, typer.Option(min=1, help="Training samples to measure pairs on.")] = 512,
    by: Annotated[str, typer.Option(help="Measure pairs by score (the paper) or loss.")] = "score",
    networks: Annotated[int, typer.Option(min=0, help="How many random plans to train for a regression; 0: none.")] = 0,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Test the knapsack's assumption on a run's network: do the losses of groups add up?"""
    from bitplan.cli.show import show_additivity
    from bitplan.core.studies import Study
    from bitplan.core.trust import check_study
    from bitplan.store.run_folder import RunFolder
    from bitplan.study.additivity import doubts, study_fit, study_pairs

    folder = RunFolder(run)
    study = folder.study
    check_study(study, folder.file_of(Study), trust=trust)
    with showing_progress("measuring", every_event=True) as progress:
        if pairs:
            study_pairs(study, run, progress=progress, trust=trust, count=pairs, samples=samples, by=by)
        if networks:
            levels = max(1, len(folder.graph.selectable) - 3) if folder.graph else 1
            per_level = -(-networks // levels)
            study_fit(study, run, progress=progress, trust=trust, networks=networks, per_level=per_level)
    if folder.pairs is None and folder.fit is None:
        raise InputError("nothing to do: give --pairs or --networks")
    show_additivity(folder.pairs, folder.fit, as_json=json)
    for doubt in doubts(folder.pairs, folder.fit):
        tell(f"warning: {doubt}")


def data(
    task: Annotated[str, typer.Argument(help="The task with its options: cifar10, imagenet, camvid, squad …")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", show_default="the task's own", help="The folder of the data.")
    ] = None,
    json: Json = False,
) -> None:
    """Check the data of a task: samples of each split, or what is missing and where to get it."""
    from bitplan.tasks.data_check import check_data

    name, options = read_named(task, "TASK")
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    found = check_data(name, **options | ({} if folder is None else {"data": str(folder)}))
    if json:
        import dataclasses
        from json import dumps

        say_json(dumps([dataclasses.asdict(one) for one in found], ensure_ascii=False))
    else:
        for one in found:
            say(str(one))
    if any(one.missing for one in found):
        raise typer.Exit(1)


def check_store(run: RunPath, json: Json = False) -> None:
    """Check every file of a run; name each that is damaged, exchanged or missing, with exit code 1."""
    from bitplan.cli.show import show_check
    from bitplan.study.status import check as look

    found = look(run)
    show_check(found, as_json=json)
    if found.wrong:
        raise typer.Exit(1)


def clean_store(
    run: RunPath,
    studies: Annotated[
        list[Path] | None,
        typer.Argument(metavar="STUDY…", show_default="the run's own", help="Keep everything that these studies need."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this it is only shown.")] = False,
) -> None:
    """List the files that none of these studies needs (by default the run's own); --yes removes them."""
    from bitplan.store.run_folder import RunFolder
    from bitplan.study.clean import clean_, find_waste
    from bitplan.study.spec import read_study

    own = RunFolder(run).study  # says what is wrong where it is none
    waste = find_waste(run, [read_study(study) for study in studies or ()] or [own])
    for path in waste.paths:
        say(str(path))
    size = f"{len(waste.paths)} files and folders, {waste.bytes / 1e6:.1f} MB"
    if yes:
        clean_(waste)
        say(f"removed {size}")
    else:
        whose = "none of these studies needs" if studies else f"the run's own study, {own.name}, does not need"
        say(f"{size}, that {whose}" + ("; --yes removes them" if waste.paths else ""))


def _refuse_run(*, run: Path | None, budgets: list[str], which: str) -> None:
    """Refuse a run and budgets for a table of published figures."""
    if run is not None or budgets:
        idle = "--budgets" if run is None else str(run)
        raise InputError(f"the table {which} does not use a run: remove {idle}")


def _compare_runs(runs: list[Path], *, plain: bool) -> Table:
    from bitplan.reports.kept_results import open_run
    from bitplan.reports.regrets import methods, methods_values

    if not runs:
        raise InputError(f"the table {METHODS} is of runs: bitplan run tables RUN RUN … --which {METHODS}")
    return (methods_values if plain else methods)([open_run(one) for one in runs])


def _of_run(runs: list[Path], which: str, of: str | None, budgets: list[str], *, plain: bool) -> Table:
    from bitplan.reports.kept_results import open_run
    from bitplan.reports.tables import check_name, make

    check_name(which, (METHODS, PUBLISHED, TIMES))
    if len(runs) != 1:
        raise InputError(f"the table {which} is of a run: bitplan run tables RUN --which {which}")
    run = runs[0]
    if of is not None:
        raise InputError(f"--of is for what others published: --which {PUBLISHED} --of {of}, without {run}")
    return make(which, open_run(run), plain=plain, budgets=budgets)


def _make_published(of: str | None, *, plain: bool) -> Table:
    from bitplan.reports.published import list_networks, select_figures, tabulate_published, tabulate_published_values

    traced = {name: _trace_structure(name) for name in list_networks(select_figures(of))}
    return (tabulate_published_values if plain else tabulate_published)(traced, of)


def _make_times(of: str | None) -> Table:
    from bitplan.reports.published import tabulate_published_times

    return tabulate_published_times(of)


def _trace_structure(name: str) -> Traced:
    """Return the structure of a network of the zoo, built without weights."""
    from bitplan.graph.trace import trace
    from bitplan.models.zoo import load_model
    from bitplan.reports.published import Traced

    model, example = load_model(name, weightless=True)
    return Traced(trace(model, example, name=name), sum(parameter.numel() for parameter in model.parameters()))


def _print(table: Table, format: str | None, output: Path | None) -> None:
    """Print a table, or format_table it to a file."""
    if format is None and output is None:
        from bitplan.cli.show import show_table

        show_table(table)
        return
    from bitplan.reports.formats import format_table

    text = format_table(table, format or "md")
    if output is None:
        say_json(text) if format == "json" else say(text, end="")
        return
    from bitplan.store.files import write_text

    tell(f"wrote {write_text(output, text)}")

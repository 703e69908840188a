"""The verbs that look for the best plan by training, and that keep what a run found: `bitplan ceiling`, `results`."""

from __future__ import annotations

import dataclasses
import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import Json, Trust
from bitplan.cli.studies import Known, RunPath, StudyFile, ready_to_train, take_known, usual_folder
from bitplan.cli.terminal import say, say_json, tell, tell_error
from bitplan.core.errors import WriteError
from bitplan.core.progress import clock

if TYPE_CHECKING:
    from bitplan.core.studies import Study
    from bitplan.plugins.methods.ceiling import Effort, Outlook


def add(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command()(ceiling)
    app.command()(results)


def ceiling(
    study: StudyFile,
    run: Annotated[Path | None, typer.Option(help="Where results go; runs/NAME unless said.")] = None,
    budget: Annotated[list[str], typer.Option(help="One of the study's budgets; all unless said. Repeats.")] = [],
    trainings: Annotated[int, typer.Option(help="How many networks the search trains at each budget.")] = 150,
    finalists: Annotated[int, typer.Option(help="How many plans are trained again with the study's seeds.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the search's lots.")] = 0,
    known: Known = [],
    workers: Annotated[int | None, typer.Option(min=0, help="Processes on this machine, one thread each.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would take.")] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Look for the best plan within a budget by training, and say what each method of a study lacks against it.

    What is left of the study is swept first. Killed at any moment, it goes on where it was.
    """
    from bitplan.core.budget import Budget
    from bitplan.core.trust import check_code, check_engine
    from bitplan.plugins.methods.ceiling import Effort, outlook
    from bitplan.study.spec import read_study
    from bitplan.study.trials import with_controls

    read = with_controls(read_study(study))
    check_code(read.model, study, trust=trust)
    if workers is None:
        check_engine(read, study, trust=trust)
    folder = run or usual_folder(read.name)
    take_known(read, folder, known, dry_run=dry_run)
    effort = Effort(trainings, finalists, seed)
    budgets = [str(Budget.parse(one)) for one in budget] or list(read.budgets)
    told = outlook(read, folder, budgets, effort=effort, trust=trust)
    if dry_run and json:
        say_json(json_text.dumps(dataclasses.asdict(told)))
        return
    (say if dry_run else tell)(_in_words(told, folder))
    if dry_run:
        return
    _search(read, folder, budgets, effort, workers=workers, trust=trust)
    _show(folder, as_json=json)


def _search(
    study: Study, folder: Path, budgets: list[str], effort: Effort, *, workers: int | None, trust: bool
) -> None:
    """A ceiling at each budget, with a bar; a disk that is full is one line."""
    from bitplan.cli.progress import showing_progress
    from bitplan.plugins.methods.ceiling import find_ceiling

    engine = ready_to_train(workers)
    try:
        with showing_progress("starting", every_event=True) as progress:
            for one in budgets:
                find_ceiling(study, folder, one, effort=effort, engine=engine, progress=progress, trust=trust)
    except WriteError as error:
        tell_error(f"{error}. What is finished is kept: make room and type it again")
        raise typer.Exit(1) from None


def results(
    run: RunPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file (.json), such as results/NAME.json.")],
) -> None:
    """Keep what a run found in one small file, which compare, tables and report take in place of the folder."""
    from bitplan.reports.kept_results import keep_results
    from bitplan.store.files import write_text

    found = keep_results(run)
    path = write_text(output, found.to_json())
    tell(f"wrote {path} ({path.stat().st_size / 1e3:,.0f} kB): {len(found.results.own)} trials")


def _in_words(told: Outlook, folder: Path) -> str:
    return (
        f"{told.trials} trials of the study, {told.searching} trainings to search and {told.deciding} of the finalists "
        f"are left: at most about {clock(told.seconds)} in turn; everything goes to {folder}"
    )


def _show(folder: Path, *, as_json: bool) -> None:
    from bitplan.cli.show_runs import print_tables, show_table
    from bitplan.reports.kept_results import StillRun
    from bitplan.reports.regrets import regret, regret_values

    still = StillRun(folder)
    if as_json:
        print_tables({"regret": regret_values(still)})
        return
    show_table(regret(still))
    tell(f"Next: bitplan report {folder} -o report.html")

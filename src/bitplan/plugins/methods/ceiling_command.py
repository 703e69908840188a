"""The command `bitplan run ceiling`, which looks for the best plan by training."""

from __future__ import annotations

import dataclasses
import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bitplan.cli.options import Json, StudyFile, Trust, Workers
from bitplan.cli.studies import DryRun, Known, RunFolderName, ready_to_train, run_folder, take_known
from bitplan.cli.terminal import say, say_json, showing_progress, tell, tell_error
from bitplan.core.errors import WriteError
from bitplan.core.progress import clock

if TYPE_CHECKING:
    from bitplan.core.studies import Study
    from bitplan.plugins.methods.ceiling import Effort, Outlook


def ceiling(
    study: StudyFile,
    run: RunFolderName = None,
    budget: Annotated[list[str], typer.Option(show_default="all", help="One of the study's budgets. Repeats.")] = [],
    trainings: Annotated[int, typer.Option(help="How many networks the search trains at each budget.")] = 150,
    finalists: Annotated[int, typer.Option(help="How many plans are trained again with the study's seeds.")] = 3,
    seed: Annotated[int, typer.Option(help="For the random numbers of the search.")] = 0,
    known: Known = [],
    workers: Workers = None,
    dry_run: DryRun = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Look for the best plan within a budget by training, and how far each method of a study is below it.

    The trials of the study that are not done are run first. If it was killed, run it again and it goes on.
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
    folder = run or run_folder(read.name)
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
    from bitplan.plugins.methods.ceiling import find_ceiling

    engine = ready_to_train(workers)
    try:
        with showing_progress("starting", every_event=True) as progress:
            for one in budgets:
                find_ceiling(study, folder, one, effort=effort, engine=engine, progress=progress, trust=trust)
    except WriteError as error:
        tell_error(f"{error}. What is finished is kept: make room and type it again")
        raise typer.Exit(1) from None


def _in_words(told: Outlook, folder: Path) -> str:
    return (
        f"{told.trials} trials of the study, {told.searching} trainings to search and {told.deciding} of the finalists "
        f"are left: at most about {clock(told.seconds)} in turn; everything goes to {folder}"
    )


def _show(folder: Path, *, as_json: bool) -> None:
    from bitplan.cli.show import print_tables, show_table
    from bitplan.reports.kept_results import RunSnapshot
    from bitplan.reports.regrets import regret, regret_values

    still = RunSnapshot(folder)
    if as_json:
        print_tables({"regret": regret_values(still)})
        return
    show_table(regret(still))
    tell(f"Next: bitplan report {folder} -o report.html")

"""The verbs of studies: sweep, status, compare, additivity, store, demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import Json, Trust
from bitplan.cli.terminal import say, tell, tell_error
from bitplan.cli.words import App, Verbs
from bitplan.core.errors import InputError, WriteError

if TYPE_CHECKING:
    from bitplan.core.studies import Study
    from bitplan.store.engines import Engine
    from bitplan.study.sweep import Summary

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="A study (.toml).")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, which `bitplan sweep` made.")]
Known = Annotated[
    list[Path],
    typer.Option(help="A run, or the file of its results: what it has of this study is taken as done. Repeats."),
]
RunOrFile = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or the file of its results.")]


def add(app: typer.Typer) -> None:
    """Register the verbs."""
    for verb in (sweep, status, compare, additivity):
        app.command()(verb)
    store = App(cls=Verbs, no_args_is_help=True, help="Look after the folder of a run.")
    store.command(name="clean")(clean)
    store.command(name="check")(check)
    store.callback()(lambda: None)
    app.add_typer(store, name="store")
    app.command()(demo)


def sweep(
    study: StudyFile,
    run: Annotated[Path | None, typer.Option(help="Where results go; runs/NAME unless said.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the trials, with time and disk.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed trials again.")] = False,
    redo_damaged: Annotated[
        bool, typer.Option("--redo-damaged", help="Do trials again whose result was damaged and set aside.")
    ] = False,
    only: Annotated[list[str], typer.Option(help="Only this method, by its title. Repeats.")] = [],
    known: Known = [],
    workers: Annotated[int | None, typer.Option(min=0, help="Processes on this machine, one thread each.")] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run every trial of a study that is not done yet; killed at any moment, it goes on where it was."""
    from bitplan.core.trust import check_code, check_engine
    from bitplan.study.spec import read_study
    from bitplan.study.trials import with_controls

    read = with_controls(read_study(study))
    check_code(read.model, study, trust=trust)
    if workers is None:
        check_engine(read, study, trust=trust)
    folder = run or usual_folder(read.name)
    take_known(read, folder, known, dry_run=dry_run)
    if dry_run:
        from bitplan.cli.show_runs import show_forecast
        from bitplan.study.forecast import forecast

        show_forecast(read, folder, forecast(read, folder, trust=trust), as_json=json)
        return
    told: dict[str, Any] = {"retry_failed": retry, "redo_damaged": redo_damaged, "only": only or None, "trust": trust}
    summary = run_sweep(read, folder, workers=workers, **told)
    if json:
        from bitplan.cli.show_runs import print_summary

        print_summary(summary, folder)
    else:
        show_run(folder)
    tell_damage(read, study, folder, summary)
    if summary.failed or summary.missing:
        raise typer.Exit(1)


def take_known(study: Study, folder: Path, known: list[Path], *, dry_run: bool) -> None:
    """Put what other runs found into the folder of this one."""
    from bitplan.reports.kept_results import look_at
    from bitplan.study.restore import restore

    if known and dry_run:
        raise InputError("--known writes into the run's folder, and --dry-run only looks: leave one of them out")
    for path in known:
        found = restore(study, folder, look_at(path))
        tell(f"{path}: {found.trials} trials, {found.estimates} estimates and {found.trainings} trainings are known")


def usual_folder(name: str) -> Path:
    """Where the run of a study goes; its name stands in a file, and must not lead elsewhere."""
    if Path(name).name != name or name == "..":
        raise InputError(f"the name {name!r} is no name of a folder in runs: say where its run goes by --run FOLDER")
    return Path("runs") / name


def status(run: RunPath, json: Json = False) -> None:
    """Show how far a run is; from any terminal, at any time."""
    from bitplan.cli.show_runs import show_status
    from bitplan.study.status import status as look

    show_status(look(run), as_json=json)


def compare(
    run: RunOrFile,
    against: Annotated[str | None, typer.Option(help="The method to compare with others; 'all' lists any two.")] = None,
    corrected: Annotated[
        bool, typer.Option("--corrected", "--holm", help="Correct p for there being several budgets.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare the methods or quantizers of a run: scores, what choosing took, and which differences mean anything."""
    from bitplan.reports.kept_results import look_at
    from bitplan.reports.spending import score_against_spend, spend_by_budget
    from bitplan.reports.tables import (
        frontier,
        quantizer_scores,
        quantizers,
        quantizers_against,
        scores,
        significance,
        versus,
        windows,
    )

    folder = look_at(run)
    study = folder.study
    quantizing = [one.title for one in study.quantizers]
    if json:
        from bitplan.cli.show_runs import print_tables

        made = {"quantizers": quantizer_scores(folder)} if quantizing else {}
        if study.methods:
            tests = significance(folder, None, corrected=corrected)
            made |= {"scores": scores(folder), "spend": spend_by_budget(folder), "tests": tests}
            paired = windows(folder)
            made |= {"windows": paired} if paired.rows else {}
        print_tables(made)
        return
    from bitplan.cli.show_runs import show_table

    if quantizing and (against in (None, "all", *quantizing) or not study.methods):
        show_table(quantizers(folder))
        one = quantizing[0] if against is None or against == "all" else against
        show_table(quantizers_against(folder, one, corrected=corrected))
    if not study.methods or against in quantizing:
        return
    show_table(frontier(folder))
    show_table(score_against_spend(folder))
    if against == "all":
        show_table(significance(folder, corrected=corrected))
        show_windows(folder, None)
        return
    show_table(versus(folder, against or study.methods[0].title, corrected=corrected))
    show_windows(folder, against or study.methods[0].title)


def show_windows(folder: Any, against: str | None) -> None:
    """Where results keep the losses of windows, the differences on the same ones."""
    from bitplan.cli.show_runs import show_table
    from bitplan.reports.tables import windows

    table = windows(folder, against)
    if table.rows:
        show_table(table)


def additivity(
    run: RunPath,
    pairs: Annotated[int, typer.Option(min=0, help="How many random pairs of groups to lower; 0 for none.")] = 80,
    samples: Annotated[int, typer.Option(min=1, help="Training samples to measure pairs on.")] = 512,
    by: Annotated[str, typer.Option(help="What pairs are measured by: score (the paper) or loss.")] = "score",
    networks: Annotated[int, typer.Option(min=0, help="How many random plans to train for a regression; 0: none.")] = 0,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Test the knapsack's assumption on a run's network: do the drops of groups add up?"""
    from bitplan.cli.progress import showing_progress
    from bitplan.cli.show_runs import show_additivity
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


def clean(
    run: RunPath,
    studies: Annotated[
        list[Path] | None,
        typer.Argument(metavar="STUDY…", help="The studies to keep everything for; the run's own unless said."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without this it is only shown.")] = False,
) -> None:
    """Show, and with --yes remove, what none of these studies needs, or where none is named, the run's own."""
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


def check(run: RunPath, json: Json = False) -> None:
    """Check every file of a run: what is damaged, exchanged or missing is named, one line each; exit code 1."""
    from bitplan.cli.show_runs import show_check
    from bitplan.study.status import check as look

    found = look(run)
    show_check(found, as_json=json)
    if found.wrong:
        raise typer.Exit(1)


def demo(
    run: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs/demo"),
    workers: Annotated[int | None, typer.Option(min=0, help="Processes on this machine, one thread each.")] = None,
) -> None:
    """Compare methods on handwritten digits, from a float network to p-values and a page, in a few minutes."""
    from bitplan.cli.demo import run_demo

    if run_demo(run, workers).failed:
        raise typer.Exit(1)


def run_sweep(
    study: Study,
    folder: Path,
    *,
    workers: int | None = None,
    **told: Any,
) -> Summary:
    """Sweep with a bar on a terminal, or a line per event where there is none."""
    from bitplan.cli.progress import showing_progress
    from bitplan.study.sweep import sweep as sweep_study

    engine = ready_to_train(workers)
    try:
        with showing_progress("starting", every_event=True) as progress:
            return sweep_study(study, folder, engine=engine, progress=progress, **told)
    except WriteError as error:
        tell_error(f"{error}. What is finished is kept: make room and sweep again")
        raise typer.Exit(1) from None


def ready_to_train(workers: int | None) -> Engine | None:
    """The engine that was asked for instead of the study's; this process may train too, and keeps its memory."""
    from bitplan.core.malloc_tuning import keep_freed_memory
    from bitplan.store.engines import Local

    keep_freed_memory()
    return None if workers is None else Local(workers=workers)


def tell_damage(study: Study, written: Path, folder: Path, summary: Summary) -> None:
    """What a sweep found damaged, which trials are missing for it, and what to type."""
    for path in summary.set_aside:
        tell(f"damaged, and set aside: {path}")
    for trial in summary.missing:
        tell(f"missing: {study.words(trial)}, whose result was damaged")
    if summary.missing:
        tell(f"To do them again: bitplan sweep {written} --run {folder} --redo-damaged")


def show_run(folder: Path) -> None:
    """The frontier where there is one, and what is not done."""
    from bitplan.cli.show_runs import show_status, show_table
    from bitplan.reports.tables import frontier, quantizers
    from bitplan.store.run_folder import RunFolder
    from bitplan.study.status import status as look

    run = RunFolder(folder)
    if run.results and run.study.methods:
        show_table(frontier(run))
    if run.results and run.study.quantizers:
        show_table(quantizers(run))
    found = look(folder)
    show_status(found, as_json=False, by_method=found.done < found.total)
    tell(f"Next: bitplan compare {folder}")

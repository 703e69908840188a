"""Commands of studies: sweep, compare, report and demo."""

from __future__ import annotations

import os
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitplan.cli.options import Json, RunOrFile, StudyFile, Trust, Workers
from bitplan.cli.planning import tell_written
from bitplan.cli.terminal import say, showing_progress, tell, tell_error
from bitplan.core.errors import InputError, WriteError

if TYPE_CHECKING:
    from bitplan.core.studies import Study
    from bitplan.store.engines import Engine
    from bitplan.store.run_folder import RunFolder
    from bitplan.study.sweep import Summary

Known = Annotated[
    list[Path],
    typer.Option(
        show_default="none",
        help="A run, or the file of its results: its trials of this study are taken as done. Repeats.",
    ),
]
RunFolderName = Annotated[
    Path | None, typer.Option("--run", show_default="runs/NAME", help="The folder where results go.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list the trials, with time and disk.")]
ALPHA = 0.05
NEXT = """\
Next, with your model (MODEL: package.module:factory, a function of yours that returns it with an input for it):
  bitplan plan MODEL --budget 70% --explain -o plan.html    which layers get how many bits, and why
  bitplan plan MODEL --budget 70% --data package.module:loader    the same by what your batches say
  bitplan plan model.safetensors --budget 3.2bpw --bits w2a16,w3a16,w4a16    from a checkpoint alone
  bitplan list gains    all methods; bitplan sweep STUDY.toml compares them on your task, as was done here"""


def sweep(
    study: StudyFile,
    run: RunFolderName = None,
    dry_run: DryRun = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed trials again.")] = False,
    redo_damaged: Annotated[
        bool, typer.Option("--redo-damaged", help="Do trials again whose result was damaged and set aside.")
    ] = False,
    only: Annotated[
        list[str], typer.Option(show_default="all methods", help="Only this method, by its title. Repeats.")
    ] = [],
    known: Known = [],
    workers: Workers = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Run every trial of a study that is not done yet; if it was killed, run it again and it goes on."""
    from bitplan.core.trust import check_code, check_engine
    from bitplan.study.spec import read_study
    from bitplan.study.trials import with_controls

    read = with_controls(read_study(study))
    check_code(read.model, study, trust=trust)
    if workers is None:
        check_engine(read, study, trust=trust)
    folder = run or run_folder(read.name)
    take_known(read, folder, known, dry_run=dry_run)
    if dry_run:
        from bitplan.cli.show import show_forecast
        from bitplan.study.forecast import forecast

        show_forecast(read, folder, forecast(read, folder, trust=trust), as_json=json)
        return
    summary = run_sweep(
        read, folder, workers=workers, trust=trust, retry_failed=retry, redo_damaged=redo_damaged, only=only or None
    )
    if json:
        from bitplan.cli.show import print_summary

        print_summary(summary, folder)
    else:
        show_run(folder)
    tell_damage(read, study, folder, summary)
    if summary.failed or summary.missing:
        raise typer.Exit(1)


def take_known(study: Study, folder: Path, known: list[Path], *, dry_run: bool) -> None:
    """Copy the trials that other runs finished into the folder of this one."""
    from bitplan.reports.kept_results import open_run
    from bitplan.study.restore import restore

    if known and dry_run:
        raise InputError("--known writes into the run's folder, and --dry-run only looks: leave one of them out")
    for path in known:
        found = restore(study, folder, open_run(path))
        tell(f"{path}: {found.trials} trials, {found.estimates} estimates and {found.trainings} trainings are known")


def run_folder(name: str) -> Path:
    """Return the folder of a study's run. The name comes from a file and must not lead elsewhere."""
    if Path(name).name != name or name == "..":
        raise InputError(f"the name {name!r} is no name of a folder in runs: say where its run goes by --run FOLDER")
    return Path("runs") / name


def compare(
    run: RunOrFile,
    against: Annotated[
        str | None,
        typer.Option(show_default="the study's first", help="The method to compare with others; 'all' lists any two."),
    ] = None,
    corrected: Annotated[bool, typer.Option("--corrected", help="Correct p for several budgets (Holm).")] = False,
    json: Json = False,
) -> None:
    """Compare the methods or quantizers of a run: scores, the cost of choosing, and the significant differences."""
    from bitplan.reports.kept_results import open_run
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

    folder = open_run(run)
    study = folder.study
    quantizing = [one.title for one in study.quantizers]
    if json:
        from bitplan.cli.show import print_tables

        made = {"quantizers": quantizer_scores(folder)} if quantizing else {}
        if study.methods:
            tests = significance(folder, None, corrected=corrected)
            made |= {"scores": scores(folder), "spend": spend_by_budget(folder), "tests": tests}
            paired = windows(folder)
            made |= {"windows": paired} if paired.rows else {}
        print_tables(made)
        return
    from bitplan.cli.show import show_table

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
    """Print the differences on the same windows, if results keep the losses of windows."""
    from bitplan.cli.show import show_table
    from bitplan.reports.tables import windows

    table = windows(folder, against)
    if table.rows:
        show_table(table)


def report(
    run: RunOrFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", show_default="none", help="Write one page (.html) here.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(show_default="none", help="Draw the paper's figures into this folder.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(show_default="the study's middle one", help="Answer for this budget.")
    ] = None,
) -> None:
    """Show a run: one page that opens anywhere, or the paper's figures (SVG, PDF, PNG)."""
    if output is None and figures is None:
        raise InputError("say what to make: -o report.html for the page, --figures DIR for the figures")
    if output is not None:
        from bitplan.reports.document import report as write_report

        tell_written(write_report(run, output, budget=budget))
    if figures is not None:
        from bitplan.reports.figures import write_figures

        made = write_figures(run, figures, budget=budget)
        for path in made.paths:
            tell_written(path)
        for name, reason in made.left_out.items():
            tell(f"no {name} figure: {reason}")


def demo(
    run: Annotated[Path, typer.Option(help="The folder where results go.")] = Path("runs/demo"),
    workers: Workers = None,
) -> None:
    """Compare methods on handwritten digits, from a float network to p-values and a page, in a few minutes."""
    if run_demo(run, workers).failed:
        raise typer.Exit(1)


def run_sweep(
    study: Study,
    folder: Path,
    *,
    workers: int | None = None,
    **options: Any,
) -> Summary:
    """Sweep, with a bar on a terminal or else a line per event."""
    from bitplan.study.sweep import sweep as sweep_study

    engine = ready_to_train(workers)
    try:
        with showing_progress("starting", every_event=True) as progress:
            return sweep_study(study, folder, engine=engine, progress=progress, **options)
    except WriteError as error:
        tell_error(f"{error}. What is finished is kept: make room and sweep again")
        raise typer.Exit(1) from None


def ready_to_train(workers: int | None) -> Engine | None:
    """Return the engine asked for instead of the study's; keep the memory of this process, which may train too."""
    from bitplan.core.malloc_tuning import keep_freed_memory
    from bitplan.store.engines import Local

    keep_freed_memory()
    return None if workers is None else Local(workers=workers)


def tell_damage(study: Study, written: Path, folder: Path, summary: Summary) -> None:
    """Tell which files a sweep found damaged, which trials are missing, and the command that does them again."""
    for path in summary.set_aside:
        tell(f"damaged, and set aside: {path}")
    for trial in summary.missing:
        tell(f"missing: {study.words(trial)}, whose result was damaged")
    if summary.missing:
        tell(f"To do them again: bitplan sweep {written} --run {folder} --redo-damaged")


def show_run(folder: Path) -> None:
    """Print the frontier, if there is one, and the trials that are not done."""
    from bitplan.cli.show import show_status, show_table
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


def run_demo(folder: Path, workers: int | None) -> Summary:
    """Sweep the study that comes with the package, then print its tables and two sentences about them."""
    os.environ["OMP_NUM_THREADS"] = "1"  # sums depend on the number of threads; so the numbers are those of any machine
    from bitplan.cli.show import show_table
    from bitplan.core.progress import clock
    from bitplan.reports.document import report as write_report
    from bitplan.reports.tables import costs, frontier, versus
    from bitplan.store.run_folder import RunFolder

    study = demo_study()
    titles = ", ".join(method.title for method in study.methods)
    tell(
        f"{len(study.methods)} methods ({titles}) at {', '.join(study.budgets)} of {study.cost}, {len(study.seeds)} "
        f"seeds: everything goes to {folder}; run again, it goes on or only shows"
    )
    summary = run_sweep(study, folder, workers=workers)
    run = RunFolder(folder)
    if not any(result.trial.budgets for result in run.results):
        return summary
    for table in (frontier(run), versus(run, study.methods[0].title), costs(run)):
        show_table(table)
    say(f"{summary.done} of {summary.total} trials are in {folder} ({clock(summary.seconds)} this time). They say:")
    for sentence in findings(run):
        say(f"  {sentence}")
    page = write_report(run, run.page)
    say(f"The same to look at: {page}")
    say(f"More of it: bitplan compare {folder} --against all · bitplan run tables {folder} --which layers")
    say(NEXT)
    return summary


def demo_study() -> Study:
    """The study of the demonstration."""
    from bitplan.study.spec import read_study

    with as_file(files("bitplan.study") / "demo.toml") as path:
        return read_study(path)


def findings(run: RunFolder) -> list[str]:
    """Return two sentences: why bits matter here, and which method places them best."""
    return [sentence for sentence in (_describe_stakes(run), _describe_best(run)) if sentence]


def _describe_stakes(run: RunFolder) -> str | None:
    """Compare the networks at the lowest and the highest precision; return None while they have no scores."""
    from bitplan.stats.compare import cells
    from bitplan.stats.ranksum import rank_sum

    study = run.study
    by_title = {cell.title: cell for cell in cells(study, run.results, run.plans) if not cell.budget}
    low, high = by_title.get(str(study.choices[0])), by_title.get(str(study.choices[-1]))
    if low is None or high is None:
        return None
    p = rank_sum(low.scores, high.scores)
    sure = "there is" if p <= ALPHA else "there may not be"
    return (
        f"All layers at {low.title} score {low.mean:.2f}, all at {high.title} {high.mean:.2f} "
        f"({high.mean - low.mean:+.2f}, p = {p:.2g}): {sure} something to lose by choosing badly."
    )


def _describe_best(run: RunFolder) -> str | None:
    """Name the method of the best mean score over the budgets; return None while no method has them all."""
    from bitplan.stats.compare import areas, cells
    from bitplan.stats.compare import compare as compare_methods

    study, results = run.study, run.results
    means = {title: area.value for title, area in areas(study, cells(study, results)).items()}
    if not means:
        return None
    ranked = sorted(means, key=lambda title: means[title], reverse=results[0].higher_is_better)
    best, worst = ranked[0], ranked[-1]
    budgets_apart: set[str] = set()  # where the best and the worst differ significantly
    beaten: set[str] = set()
    for test in compare_methods(study, results, run.plans):
        pair = {test.first, test.second}
        if {best, worst} <= pair and test.significant():
            budgets_apart.add(test.budget)
        if test.better() == best:
            beaten |= pair - {best}
    return (
        f"Over the budgets {best} reaches the best mean score ({means[best]:.2f}), {worst} the worst "
        f"({means[worst]:.2f}; they differ significantly at {len(budgets_apart)} of {len(study.budgets)} budgets); "
        f"{best} is significantly better (p ≤ {ALPHA}, not corrected) at some budget than "
        f"{', '.join(sorted(beaten)) or 'no other method'}."
    )

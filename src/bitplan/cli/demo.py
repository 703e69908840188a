"""`bitplan demo`: methods and controls on embedded data, from a float network to p-values and a page."""

from __future__ import annotations

import os
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from bitplan.cli.show_runs import show_table
from bitplan.cli.terminal import say, tell
from bitplan.core.progress import clock
from bitplan.reports.document import report as write_report
from bitplan.reports.tables import costs, frontier, versus
from bitplan.stats.compare import areas, cells, compare
from bitplan.stats.ranksum import rank_sum
from bitplan.store.run_folder import RunFolder

if TYPE_CHECKING:
    from bitplan.core.studies import Study
    from bitplan.study.sweep import Summary

ALPHA = 0.05
NEXT = """\
Next, with your model (MODEL: package.module:factory, a function of yours that returns it with an input for it):
  bitplan plan MODEL --budget 70% --explain --html plan.html    which layers get how many bits, and why
  bitplan plan MODEL --budget 70% --data package.module:loader    the same by what your batches say
  bitplan plan model.safetensors --budget 3.2bpw --choices w2a16,w3a16,w4a16    from a checkpoint alone
  bitplan list gains    all methods; bitplan sweep STUDY.toml compares them on your task, as was done here"""


def run_demo(folder: Path, workers: int | None) -> Summary:
    """Sweep the study that comes with the package, then show what it says."""
    os.environ["OMP_NUM_THREADS"] = "1"  # sums depend on the number of threads; so the numbers are those of any machine
    from bitplan.cli.studies import run_sweep

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
    say(f"More of it: bitplan compare {folder} --against all · bitplan tables {folder} --which layers")
    say(NEXT)
    return summary


def demo_study() -> Study:
    """The study of the demonstration."""
    from bitplan.study.spec import read_study

    with as_file(files("bitplan.study") / "demo.toml") as path:
        return read_study(path)


def findings(run: RunFolder) -> list[str]:
    """What the results say, in two sentences: why bits matter here, and which method places them best."""
    return [sentence for sentence in (_what_is_at_stake(run), _who_is_best(run)) if sentence]


def _what_is_at_stake(run: RunFolder) -> str | None:
    """How far apart the networks at the lowest and at the highest choice are; None while they have no scores."""
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


def _who_is_best(run: RunFolder) -> str | None:
    """Which method has the best mean score over the budgets, and whom it beats; None while no method has them all."""
    study, results = run.study, run.results
    means = {title: area.value for title, area in areas(study, cells(study, results)).items()}
    if not means:
        return None
    ranked = sorted(means, key=lambda title: means[title], reverse=results[0].higher_is_better)
    best, worst = ranked[0], ranked[-1]
    budgets_apart: set[str] = set()  # where the best and the worst differ significantly
    beaten: set[str] = set()
    for test in compare(study, results, run.plans):
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

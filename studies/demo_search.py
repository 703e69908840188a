"""A search for a demonstration in which choosing matters: the spread between random plans against that between seeds.

python studies/demo_search.py [NAME …] [--screen] [--work FOLDER] [--json FILE]

For each candidate (studies/demo_candidates.py), or those named: 20 random plans within 70 % of the cost, each
fine-tuned with 5 seeds from one start, exactly as trials of `bitplan sweep` are. A random plan is what the exact
selection makes of the gain `random`, which is one number between 0 and 1 per group; all plans fill the budget, and no
two are the same. Then

    within²  = the mean over plans of the variance of scores over seeds             (pooled, 4 degrees of freedom each)
    between² = the variance over plans of their mean score, less within² / 5        (what seeds alone would make of it)
    ratio    = between / within

A candidate is taken if its ratio is at least 3, its float network scores at least 90, the start (all layers at the
highest choice) is at most 5 points below it, and a training takes at most 2 s of one core, so that the demonstration
stays below five minutes. Of all that are, the first in the order of the list is the demonstration. No method is run
here.

`--screen` does 6 plans with 3 seeds, to see where the rest is worth its time; nothing is taken by it, and its plans
are other draws than those of the criterion.

Killed, it goes on with what its folder lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # sums depend on the number of threads; so does `bitplan demo`

from demo_candidates import CANDIDATES
from scipy.stats import f as f_distribution

from bitplan.core.records import Plan
from bitplan.core.studies import Study
from bitplan.gains.base import Context, estimate
from bitplan.selection.base import select
from bitplan.store.engines import Local
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext
from bitplan.study.sweep import sweep
from bitplan.study.trials import trials

PLANS = 20
SCREENED_PLANS, SCREENED_SEEDS = 6, (0, 1, 2)
SCREENED_FROM, FROM = 0, 1000  # draws of `random`: what a screen has shown has no part in the criterion
BUDGET = "70%"
LEAST_RATIO = 3.0
LEAST_FLOAT = 90.0
MOST_LOST = 5.0
MOST_SECONDS = 2.0
MOST_DRAWS = 1000  # where so many draws have not given 20 plans, there are too few to choose from


@dataclasses.dataclass(frozen=True)
class Spread:
    """The two standard deviations and their ratio, with an interval that holds it in 95 of 100 searches.

    The interval is that of a one-way layout with random effects and normal errors, by the quantiles of F.
    """

    between: float
    within: float
    ratio: float
    low: float
    high: float


def spread(scores: Sequence[Sequence[float]]) -> Spread:
    """Of the scores of plans, a row each, over seeds."""
    plans, seeds = len(scores), len(scores[0])
    within = statistics.fmean(statistics.variance(row) for row in scores)
    of_means = statistics.variance([statistics.fmean(row) for row in scores])
    if within == 0:
        raise SystemExit("scores are the same with every seed: nothing to compare the plans' spread with")
    ratios = [
        of_means * seeds / within / by
        for by in (1.0, *f_distribution.ppf((0.975, 0.025), plans - 1, plans * (seeds - 1)))
    ]
    ratio, low, high = (math.sqrt(max(0.0, (f - 1) / seeds)) for f in ratios)
    return Spread(math.sqrt(max(0.0, of_means - within / seeds)), math.sqrt(within), ratio, low, high)


def random_studies(study: Study, folder: Path, plans: int, *, first: int = FROM) -> list[Study]:
    """The study with the first seeds of `random`, from one on, that give different plans, one each."""
    setting = RunContext(study, RunFolder(folder), trust=True)
    graph = setting.trace()
    costs = setting.costs(graph)
    found: dict[str, Study] = {}
    for seed in range(first, first + MOST_DRAWS):
        gains = estimate("random", None, graph, choices=study.choices, context=Context(seed=seed))
        plan: Plan = select(graph, gains, costs, budget=BUDGET)
        chosen = json.dumps({name: str(precision) for name, precision in plan.precisions.items()})
        found.setdefault(chosen, study.model_copy(update={"gain_seed": seed}))
        if len(found) == plans:
            break
    return list(found.values())


def search(name: str, studies: Sequence[Study], folder: Path) -> dict[str, Any]:
    """Train what is missing, and say what it comes to; the studies differ only in their plans."""
    study = studies[0]
    run = RunFolder(folder)
    told: dict[str, Any] = {"candidate": name, "plans": len(studies)}
    rows: list[list[float]] = []
    seconds: list[float] = []
    for one in studies:
        begin = time.process_time()
        summary = sweep(one, folder, engine=Local(), trust=True)
        if summary.failed:
            raise SystemExit(f"{name}: {summary.failed[0].error}")
        if summary.trained == len(study.seeds):  # not where starts and references were made too, or all was there
            seconds.append((time.process_time() - begin) / summary.trained)
        rows.append(scores_of(one, run, "choice"))
    told["float"] = scores_of(study, run, "float")[0]
    told["start"] = scores_of(study, run, "start")[0]
    for choice in (study.choices[0], study.choices[-1]) if study.references else ():
        told[f"all at {choice}"] = scores_of(study, run, "reference", str(choice))
    told["scores"] = rows
    told["CPU seconds per training"] = statistics.median(seconds) if seconds else None
    return told


def scores_of(study: Study, run: RunFolder, role: str, method: str | None = None) -> list[float]:
    """The scores of the trials that have a role, in the order of seeds."""
    wanted = [trial for trial in trials(study) if trial.role == role and method in (None, trial.method)]
    return [run.trials.read(trial.id).score for trial in wanted]


def judged(told: dict[str, Any]) -> dict[str, Any]:
    """What was measured, with the criterion and what else is asked."""
    found = spread(told["scores"])
    seconds = told["CPU seconds per training"]
    failing = [
        words
        for words, holds in (
            (f"fewer than {PLANS} plans", told["plans"] == PLANS),
            (f"ratio below {LEAST_RATIO:g}", found.ratio >= LEAST_RATIO),
            (f"float below {LEAST_FLOAT:g}", told["float"] >= LEAST_FLOAT),
            (f"the start loses more than {MOST_LOST:g}", told["float"] - told["start"] <= MOST_LOST),
            (f"a training takes more than {MOST_SECONDS:g} s", seconds is None or seconds <= MOST_SECONDS),
        )
        if not holds
    ]
    return told | dataclasses.asdict(found) | {"taken": not failing, "failing": failing}


def show(told: dict[str, Any]) -> str:
    """One line of a table."""
    means = [statistics.fmean(row) for row in told["scores"]]
    ends = [statistics.fmean(scores) for key, scores in told.items() if key.startswith("all at ")] or [math.nan] * 2
    seconds = told["CPU seconds per training"] or 0
    return (
        f"| {told['candidate']} | {told['float']:.2f} | {told['start']:.2f} | {ends[1]:.2f} | {ends[0]:.2f} | "
        f"{min(means):.2f} to {max(means):.2f} | {told['between']:.2f} | {told['within']:.2f} | "
        f"**{told['ratio']:.2f}** ({told['low']:.2f} to {told['high']:.2f}) | {seconds:.2f} | "
        f"{'taken' if told['taken'] else ', '.join(told['failing'])} |"
    )


def main() -> None:
    """Search, print a line per candidate, keep everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="candidates; all of them unless given")
    parser.add_argument("--screen", action="store_true", help="fewer plans and seeds, to see where more is worth it")
    parser.add_argument("--work", type=Path, default=Path("runs/demo_search"))
    parser.add_argument("--json", type=Path, default=Path("runs/demo_search.json"))
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for name in options.names or CANDIDATES:
        study, plans, first = CANDIDATES[name], PLANS, FROM
        if options.screen:
            study = study.model_copy(update={"seeds": SCREENED_SEEDS, "references": False})
            plans, first = SCREENED_PLANS, SCREENED_FROM
        folder = options.work / study.model.replace(":", "_")  # trials of one network share its start
        told = search(name, random_studies(study, folder, plans, first=first), folder)
        if told["CPU seconds per training"] is None:
            told["CPU seconds per training"] = known.get(name, {}).get("CPU seconds per training")
        known[name] = judged(told)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(known, indent=1))
        print(show(known[name]), flush=True)
    taken = [name for name in CANDIDATES if known.get(name, {}).get("taken")]
    print(f"the demonstration: {taken[0] if taken else 'none yet'}")


if __name__ == "__main__":
    main()

"""additivity: test whether the drops of single groups add up, as the knapsack assumes (the paper's appendix)."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.progress import Progress
from bitplan.core.records import Graph
from bitplan.core.studies import Fit, Pair, Pairs, Study
from bitplan.gains.base import Context
from bitplan.gains.drop import Measure, measures_by_batch
from bitplan.gains.jobs import do_jobs, lowered_jobs
from bitplan.gains.lowering import By, check_task, check_top, lower, sign_for, try_task
from bitplan.gains.regression import Regression
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext, make_study_engine, remake_missing_starts
from bitplan.study.trials import starts

HOLDS = 0.9
"""The least correlation at which we say that gains add up; the paper's are 0.98 (pairs) and 0.999 (regression)."""


def pair_drops(
    model: Any,
    graph: Graph,
    choices: Sequence[Precision],
    context: Context,
    *,
    count: int = 80,
    samples: int = 512,
    batch_size: int = 64,
    by: By = "score",
) -> Pairs:
    """Lower random pairs of groups together, without training, and compare each drop with the sum of both groups' own.

    The drop is that of the score on training samples (the paper), or by="loss" the rise of the loss.
    """
    begin = time.perf_counter()
    names = [group.name for group in graph.selectable]
    if len(names) < 2:
        raise InputError(f"pairs need at least two groups to choose, {graph.model} has {len(names)}")
    drawn = _draw_pairs(names, count, context.seed)
    sets: list[tuple[str, ...]] = [(), *((name,) for name in names), *drawn]
    lowered = [dict.fromkeys(groups, choices[0]) for groups in sets]
    goodness = _measure(model, graph, choices, context, lowered, samples, batch_size, by)
    drops = {groups: goodness[0] - good for groups, good in zip(sets, goodness, strict=True)}
    pairs = []
    for first, second in drawn:
        predicted = drops[first,] + drops[second,]
        pairs.append(Pair(first=first, second=second, predicted=predicted, measured=drops[first, second]))
    return Pairs(
        graph=graph.id,
        metric=f"training {context.task.metric}" if by == "score" else "training loss",
        alone={name: drops[name,] for name in names},
        pairs=tuple(pairs),
        correlation=correlation([pair.predicted for pair in pairs], [pair.measured for pair in pairs]),
        seconds=time.perf_counter() - begin,
    )


def _draw_pairs(names: Sequence[str], count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` different random pairs, or all pairs if there are fewer, in the order of the groups."""
    every = list(itertools.combinations(names, 2))
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    return sorted(drawn, key=every.index)


def study_pairs(
    study: Study, folder: str | Path, *, progress: Progress | None = None, trust: bool = False, **options: Any
) -> Pairs:
    """Run the first experiment on a run's network at the highest choice, and keep the pairs in its folder."""
    run = RunFolder(Path(folder))
    model, graph, context = _prepare(RunContext(study, run, trust), progress)
    pairs = pair_drops(model, graph, study.choices, context, **options)
    run.keep(pairs)
    return pairs


def study_fit(
    study: Study, folder: str | Path, *, progress: Progress | None = None, trust: bool = False, **options: Any
) -> Fit:
    """Run the second experiment by the study's recipe; `options` are those of `gains/regression.py`."""
    run = RunFolder(Path(folder))
    model, graph, context = _prepare(RunContext(study, run, trust), progress)
    fit = Regression(**options).fit(model, graph, study.choices, context)
    run.keep(fit)
    return fit


def _prepare(setting: RunContext, progress: Progress | None) -> tuple[Any, Graph, Context]:
    study, run, graph = setting.study, setting.run, setting.run.graph
    high, tell = starts(study).high, progress or (lambda *_: None)
    if graph is None or not run.trials.has(high.id):
        raise InputError(f"{run.path} has no network at {study.choices[-1]} yet: `bitplan sweep` makes it first")
    engine = make_study_engine(study, trust=setting.trust)
    remake_missing_starts(setting, {high.id}, engine, partial(tell, 0, 1))
    context = Context(
        task=setting.task,
        recipe=study.recipe,
        teacher=setting.teacher(study.recipe, high.id),
        seed=study.gain_seed,
        engine=engine,
        store=run.jobs,
        progress=progress,
    )
    return setting.start(high.id), graph, context


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Pearson's R; raise InputError if one side does not vary."""
    if len(first) < 2 or not np.ptp(first) or not np.ptp(second):
        raise InputError(
            "all drops are the same, so that there is no correlation: take more samples, more pairs, or by=loss"
        )
    return float(np.clip(np.corrcoef(first, second)[0, 1], -1.0, 1.0))


def doubts(pairs: Pairs | None, fit: Fit | None) -> list[str]:
    """Return the objections to the knapsack's assumption for this network, a sentence each."""
    reasons = []
    if pairs is not None and pairs.correlation < HOLDS:
        reasons.append(
            f"the drops of pairs do not add up here (R = {pairs.correlation:.3f}, below {HOLDS}): the knapsack's plans "
            "may be far from the best; compare methods by training, not by their gains"
        )
    if fit is not None:
        held_out = fit.correlation if fit.correlation_held_out is None else fit.correlation_held_out
        if held_out < HOLDS:
            reasons.append(
                f"the score of whole plans is not a sum over groups here (R = {held_out:.3f} on networks that were "
                f"held out, below {HOLDS})"
            )
    return reasons


def _measure(
    model: Any,
    graph: Graph,
    choices: Sequence[Precision],
    context: Context,
    lowered: Sequence[Mapping[str, Precision]],
    samples: int,
    batch_size: int,
    by: By,
) -> list[float]:
    """Return the quality of the network with each set of groups lowered; more is better."""
    task = check_task(context.task, "additivity", "runs the network on data")
    check_top(model, graph, choices, "additivity")
    try_task(lower(model, {}), task, by, "additivity")
    jobs = lowered_jobs("drop", model, graph, context, lowered, samples, batch_size)
    done = do_jobs(Measure(model, task), jobs, context, "additivity")
    sign = sign_for(by, task)
    goodness = []
    for job in jobs:
        values = measures_by_batch(done[job.id], by)
        goodness.append(sign * math.fsum(values) / len(values))
    return goodness

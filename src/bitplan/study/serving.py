"""From trials to plans, from plans to trainings that serve one or more trials, and from what they gave to results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bitplan.core.precision import Precision
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.run_files import title_at
from bitplan.core.studies import Estimation, Method, Study, Trained, Training
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.selection.base import select_each
from bitplan.study.trials import all_starts, estimations


def references(graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
    """The plans of the trials that have all layers at one precision."""
    return {trial.id: Plan.uniform(graph, trial.precision) for trial in wanted if trial.precision is not None}


class Served(NamedTuple):
    """A method whose gains an estimate gives, what these are called, and the trials that they are for."""

    method: Method
    title: str
    trials: list[Trial]


def estimates_for(study: Study, graph: str, wanted: Sequence[Trial]) -> Iterator[tuple[Estimation, Served]]:
    """Every estimate of every method from every start, and the trials from there that it is for: all of its budget."""
    by: dict[tuple[str, str], list[Trial]] = {}
    for trial in wanted:
        if trial.role == "choice":
            by.setdefault((trial.start, study.title_of(trial)), []).append(trial)
    for place, first in enumerate(all_starts(study)):
        seed = study.start.seeds[place] if place else None
        for method in study.methods:
            own = by.get((first.high.id, method.title), [])
            for job in estimations(study, graph, method, first):
                title = title_at(method.title, job.budgets, job.seed, start=seed)
                yield job, Served(method, title, _served_by(job, own))


def _served_by(job: Estimation, trials: Sequence[Trial]) -> list[Trial]:
    """The trials of a method that an estimate of it is for: those of its budget and seed, or all."""
    of_job = job.budgets, job.seed
    return [trial for trial in trials if not job.budgets or (trial.budgets, trial.gain_seed) == of_job]


def plans_of(
    graph: Graph, gains: Gains, costs: list[Costs], method: Method, trials: Sequence[Trial]
) -> dict[str, Plan]:  # fmt: skip
    """The plans of a method's trials, selected once per budget and together."""
    budgets = list(dict.fromkeys(trial.budgets for trial in trials))
    plans = select_each(graph, gains, costs, budgets=budgets, selector=method.selector)
    chosen = dict(zip(budgets, plans, strict=True))
    return {trial.id: chosen[trial.budgets] for trial in trials}


def trainings_of(
    study: Study, wanted: Sequence[Trial], plans: Mapping[str, Plan]
) -> dict[str, tuple[Training, list[Trial]]]:
    """Id → the training and the trials that it serves; the first seed of all comes before the second."""
    served: dict[str, tuple[Training, list[Trial]]] = {}
    turn = {seed: place for place, seed in enumerate(study.seeds)}
    for trial in sorted(wanted, key=lambda trial: turn[trial.seed]):
        assert trial.recipe is not None, "only starts may go untrained"
        precisions = plans[trial.id].precisions
        job = training_for(trial, trial.recipe, precisions)
        served.setdefault(job.id, (job, []))[1].append(trial)
    return served


def training_for(trial: Trial, recipe: Recipe, precisions: dict[str, Precision]) -> Training:
    """The training of a trial whose plan gives these precisions."""
    quantizer = trial.method if trial.role == "quantizer" else ""
    return Training(
        task=trial.task, start=trial.start, precisions=precisions, recipe=recipe, seed=trial.seed, quantizer=quantizer
    )


def result_of(trial: Trial, plan: Plan, trained: Trained) -> Result:
    """What a trial reached, by what its training gave."""
    return Result(
        trial=trial,
        plan=plan.id,
        training=trained.training,
        score=trained.score,
        metric=trained.metric,
        losses=trained.losses,
        higher_is_better=trained.higher_is_better,
        log=trained.log,
        seconds=trained.seconds,
        device=trained.device,
        versions=trained.versions,
    )


def trained_of(result: Result) -> Trained:
    """What the training of a result gave, by the result."""
    return Trained(
        training=result.training,
        score=result.score,
        metric=result.metric,
        losses=result.losses,
        higher_is_better=result.higher_is_better,
        log=result.log,
        seconds=result.seconds,
        device=result.device,
        versions=result.versions,
    )

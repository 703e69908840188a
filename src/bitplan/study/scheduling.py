"""Turn trials into plans, plans into trainings that serve one or more trials, and their outcomes into results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import nn

from bitplan.core.precision import Precision
from bitplan.core.progress import Progress
from bitplan.core.records import Costs, Gains, Graph, Plan
from bitplan.core.studies import Estimation, Method, Study, Trained, Training
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.gains.base import Context, estimate
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import save_checkpoint
from bitplan.quant.convert import quantize
from bitplan.selection.base import select_each
from bitplan.store.engines import Engine
from bitplan.store.run_folder import title_of_gains
from bitplan.study.context import CALIBRATION, RunContext, describe_training, some_batches
from bitplan.study.trials import all_starts, estimations
from bitplan.tasks.base import choosing_task
from bitplan.tune.loop import finetune_
from bitplan.tune.resume import train_or_restart


def references(graph: Graph, wanted: Sequence[Trial]) -> dict[str, Plan]:
    """Return the plans of the trials that have all layers at one precision."""
    return {trial.id: Plan.uniform(graph, trial.precision) for trial in wanted if trial.precision is not None}


class Served(NamedTuple):
    """A method whose gains an estimate gives, the title of these gains, and the trials that choose by them."""

    method: Method
    title: str
    trials: list[Trial]


def estimates_for(study: Study, graph: str, wanted: Sequence[Trial]) -> Iterator[tuple[Estimation, Served]]:
    """Yield every estimate of every method from every start, with the trials that choose by it."""
    by: dict[tuple[str, str], list[Trial]] = {}
    for trial in wanted:
        if trial.role == "choice":
            by.setdefault((trial.start, study.title_of(trial)), []).append(trial)
    for place, first in enumerate(all_starts(study)):
        seed = study.start.seeds[place] if place else None
        for method in study.methods:
            own = by.get((first.high.id, method.title), [])
            for job in estimations(study, graph, method, first):
                title = title_of_gains(method.title, job.budgets, job.seed, start=seed)
                yield job, Served(method, title, _trials_of(job, own))


def _trials_of(job: Estimation, trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of a method that choose by an estimate: those of its budget and seed, or all."""
    of_job = job.budgets, job.seed
    return [trial for trial in trials if not job.budgets or (trial.budgets, trial.gain_seed) == of_job]


def plans_of(
    graph: Graph, gains: Gains, costs: list[Costs], method: Method, trials: Sequence[Trial]
) -> dict[str, Plan]:  # fmt: skip
    """Return the plans of a method's trials; all budgets are selected together."""
    budgets = list(dict.fromkeys(trial.budgets for trial in trials))
    plans = select_each(graph, gains, costs, budgets=budgets, selector=method.selector)
    chosen = dict(zip(budgets, plans, strict=True))
    return {trial.id: chosen[trial.budgets] for trial in trials}


def trainings_of(
    study: Study, wanted: Sequence[Trial], plans: Mapping[str, Plan]
) -> dict[str, tuple[Training, list[Trial]]]:
    """Return id → training and the trials that it serves; the first seed of all comes before the second."""
    served: dict[str, tuple[Training, list[Trial]]] = {}
    turn = {seed: place for place, seed in enumerate(study.seeds)}
    for trial in sorted(wanted, key=lambda trial: turn[trial.seed]):
        assert trial.recipe is not None, "only starts may go untrained"
        precisions = plans[trial.id].precisions
        job = training_for(trial, trial.recipe, precisions)
        served.setdefault(job.id, (job, []))[1].append(trial)
    return served


def training_for(trial: Trial, recipe: Recipe, precisions: dict[str, Precision]) -> Training:
    """Return the training of a trial whose plan gives these precisions."""
    quantizer = trial.method if trial.role == "quantizer" else ""
    return Training(
        task=trial.task, start=trial.start, precisions=precisions, recipe=recipe, seed=trial.seed, quantizer=quantizer
    )


def result_of(trial: Trial, plan: Plan, trained: Trained) -> Result:
    """Return the result of a trial from the outcome of its training."""
    return Result(trial=trial, plan=plan.id, **{name: getattr(trained, name) for name in Trained.model_fields})


def trained_of(result: Result) -> Trained:
    """Return the outcome of a result's training."""
    return Trained(**{name: getattr(result, name) for name in Trained.model_fields})


# The work of a sweep, one job at a time: train a network, estimate gains.


def first_network(setting: RunContext, job: Training) -> nn.Module:
    """Return the network that a training begins with: its start at other precisions, or a quantized float network."""
    start, plan = setting.start(job.start), setting.plan(dict(job.precisions))
    if not job.quantizer:
        return quantize(start, plan)
    options: dict[str, Any] = {**setting.study.start.options, "method": job.quantizer}
    model = quantize(start, plan, **options)
    batches = some_batches(setting.task, job.recipe.batch_size, setting.study.start.seed, CALIBRATION)
    calibrate_(model, batches, forward=setting.task.forward)
    return model


@final
@dataclass(frozen=True)
class Train:
    """Train one network, and return the outcome."""

    setting: RunContext
    progress: Progress | None = None

    def __call__(self, job: Training) -> Trained:
        """Give the start its precisions, fine-tune and score it; a killed training goes on from its checkpoint.

        A study that keeps its networks has this one on disk before its outcome is known.
        """
        begin = time.perf_counter()
        setting = self.setting
        task = choosing_task(setting.task, job.hold_out)
        teacher, folder = setting.teacher(job.recipe, job.start), setting.run.running.path(job.id)
        model, log = train_or_restart(
            lambda model: finetune_(
                model, task, job.recipe, teacher=teacher, seed=job.seed, folder=folder, progress=self.progress
            ),
            lambda: first_network(setting, job),
            setting.run.running,
            job.id,
        )
        measured = describe_training(model, task, log.lines, begin, in_integers=setting.study.in_integers)
        trained = Trained(training=job.id, **measured)
        if setting.study.keep_networks:
            place = setting.run.networks.path(job.id)
            save_checkpoint(model, place, spec=setting.spec, graph_id=setting.graph.id, of=job.id)
            setting.run.kept.keep(job.id, trained)
        return trained


@final
@dataclass(frozen=True)
class Estimate:
    """Estimate gains in this process; the method's own jobs go to the engine."""

    setting: RunContext
    engine: Engine
    progress: Progress

    def __call__(self, job: Estimation) -> Gains:
        """Estimate from the network at the highest choice."""
        setting = self.setting
        context = Context(
            task=setting.choosing_task,
            recipe=job.recipe,
            teacher=setting.teacher(job.recipe, job.start),
            seed=job.seed,
            engine=self.engine,
            store=setting.run.jobs,
            progress=lambda done, total, what: self.progress(done, total, f"{job.method}: {what}"),
            aim=setting.aim(job.budgets),
            epochs=job.spend,
        )
        model, options = setting.start(job.start), dict[str, Any](job.options)
        return estimate(job.method, model, setting.graph, choices=job.choices, context=context, **options)

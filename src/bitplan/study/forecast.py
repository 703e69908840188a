"""forecast: estimate the time and disk of a sweep by a few steps of its own training."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.records import Graph, Plan
from bitplan.core.studies import Method, Study
from bitplan.core.trials import Recipe, Trial
from bitplan.gains.base import Context, make_gain
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize
from bitplan.store.run_folder import RunFolder
from bitplan.study.context import RunContext, some_batches
from bitplan.study.trials import all_starts, chooses_within_budget, estimations, trials, trials_of_starts, with_controls
from bitplan.tune.length import samples_of
from bitplan.tune.loop import finetune_

STEPS = 3
_RECORD_BYTES = 30_000  # a Result with its log, and what its training left


@dataclass(frozen=True)
class TrialForecast:
    """One trial, whether it is done, and its expected seconds."""

    trial: Trial
    done: bool
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """Every trial, the seconds of all that are left one after the other, and the bytes that they write.

    Trials with the same precisions are trained once, so this is an upper bound. `methods` has the seconds of estimates
    that train; those of other methods are not known beforehand.
    """

    lines: tuple[TrialForecast, ...]
    methods: dict[str, float]
    step_seconds: float
    seconds: float
    bytes_kept: int
    bytes_passing: int


def forecast(study: Study, run_folder: str | Path, *, trust: bool = False) -> Forecast:
    """Time a few steps of the study's training on random weights; the run's folder is only read."""
    study = with_controls(study)
    setting = RunContext(study, RunFolder(Path(run_folder)), trust)
    graph = setting.trace()
    setting.costs(graph)
    network, high = make_untrained(setting, graph)
    teacher = network if study.recipe.distills else None
    pace = _time_step(setting, high, study.recipe, teacher)
    float_pace = _time_step(setting, network, study.recipe.for_floats(), None)
    score = _time_score(setting, high)
    lines = [
        _forecast_trial(setting, trial, float_pace if trial.role == "float" else pace, score) for trial in trials(study)
    ]
    methods = _forecast_methods(setting, high, network, graph)
    left = [line for line in lines if not line.done]
    size = sum(value.numel() * value.element_size() for value in network.state_dict().values())
    kept = len(trials_of_starts(study)) + _count_networks(
        study, left
    )  # those that trials start from: float, and highest choice
    return Forecast(
        lines=tuple(lines),
        methods=methods,
        step_seconds=pace,
        seconds=sum(line.seconds for line in left) + sum(methods.values()),
        bytes_kept=len(left) * _RECORD_BYTES + kept * size,
        bytes_passing=3 * size,
    )


def _forecast_methods(setting: RunContext, high: nn.Module, network: nn.Module, graph: Graph) -> dict[str, float]:
    """Return the expected seconds of the methods that can tell them and are not done."""
    study, seconds = setting.study, dict[str, float]()
    for method in study.methods:
        gain, _ = make_gain(method.name, method.options)
        for job in [one for first in all_starts(study) for one in estimations(study, graph.id, method, first)]:
            if setting.run.estimates.has(job.id):
                continue
            teacher = network if job.recipe and job.recipe.distills else None
            context = Context(
                task=setting.choosing_task, recipe=job.recipe, teacher=teacher, seed=job.seed, epochs=job.spend,
                aim=setting.aim(job.budgets, graph),
            )  # fmt: skip
            trainings = gain.trainings(high, graph, study.choices, context)
            if trainings is not None:
                seconds[method.title] = seconds.get(method.title, 0.0) + trainings.estimate_time().seconds
    return seconds


def _forecast_trial(setting: RunContext, trial: Trial, pace: float, score: float) -> TrialForecast:
    """Return the forecast of a trial from the seconds of a step (`pace`) and of scoring once (`score`)."""
    seconds = score
    if trial.recipe is not None:
        samples = samples_of(setting.task, trial.recipe)
        seconds = samples / setting.study.recipe.batch_size * pace + score
    return TrialForecast(trial, setting.run.trials.has(trial.id), seconds)


def _count_networks(study: Study, left: Sequence[TrialForecast]) -> int:
    """Return how many trained networks are kept at most, without those that others start from."""
    if not study.keep_networks:
        return 0
    own = trials_of_starts(study)
    return sum(line.trial not in own for line in left)


def _time_step(setting: RunContext, model: nn.Module, recipe: Recipe, teacher: nn.Module | None) -> float:
    """Return the seconds of the quickest of a few steps: the first also reads data and sets things up."""
    few = recipe.model_copy(update={"steps": STEPS, "epochs": None, "then": None})
    taught = copy.deepcopy(teacher) if few.distills else None
    log = finetune_(copy.deepcopy(model), setting.task, few, teacher=taught)
    return min(recipe.batch_size / line.samples_per_second for line in log.lines)


def _time_score(setting: RunContext, model: nn.Module) -> float:
    """Return the seconds of scoring, from the forward pass of one batch."""
    task, size = setting.task, setting.study.recipe.batch_size
    batch = some_batches(task, size, 0, 1)[0]
    model.eval()
    with torch.no_grad():
        task.forward(model, batch)  # the first one also sets things up
        begin = time.perf_counter()
        task.forward(model, batch)
    seconds = time.perf_counter() - begin
    return seconds * task.size("test") / min(size, task.size("train"))


# Checks before anything is trained.


def make_untrained(setting: RunContext, graph: Graph) -> tuple[nn.Module, nn.Module]:
    """Return the network with random weights, and the same at the highest choice, calibrated."""
    study = setting.study
    network = setting.network(study.start.seed)
    high = quantize(network, Plan.uniform(graph, study.choices[-1]), **study.start.options)  # type: ignore[arg-type]
    calibrate_(high, some_batches(setting.task, study.recipe.batch_size, 0, 1), forward=setting.task.forward)
    return network, high


def check_limits(setting: RunContext, graph: Graph) -> None:
    """Raise InputError if a spend is too small for a method that chooses within a budget and is not done yet."""
    study = setting.study
    made: tuple[nn.Module, nn.Module] | None = None
    for method in study.methods:
        _check_budgets(method, study.budgets)
        if not chooses_within_budget(method):
            continue
        jobs = [one for first in all_starts(study) for one in estimations(study, graph.id, method, first)]
        job = next((one for one in jobs if not setting.run.estimates.has(one.id)), None)
        gain, _ = make_gain(method.name, method.options)
        check = getattr(gain, "check_limit", None)  # searches and relaxations have one
        if check is None or job is None or (job.spend is None and getattr(gain, "spend", None) is None):
            continue
        made = made or make_untrained(setting, graph)
        network, high = made
        teacher = network if job.recipe and job.recipe.distills else None
        context = Context(
            task=setting.choosing_task, recipe=job.recipe, teacher=teacher, seed=job.seed, epochs=job.spend
        )
        try:
            check(high, graph, study.choices, context)
        except InputError as error:
            raise InputError(f"method {method.title}: {error}") from None


def _check_budgets(method: Method, budgets: Sequence[str]) -> None:
    """Raise InputError if a method needs to be told its budgets and is not."""
    if getattr(make_gain(method.name, method.options)[0], "budgets", None) == ():
        said = ", ".join(f'"{budget}"' for budget in budgets)
        raise InputError(f"method {method.title}: say for which budgets it is, options = {{ budgets = [{said}] }}")

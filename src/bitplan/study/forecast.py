"""forecast: what a sweep would take in time and disk, by a few steps of its own training."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitplan.core.records import Plan
from bitplan.core.studies import Study
from bitplan.core.trials import Recipe, Trial
from bitplan.gains.base import looks_at_model, make_gain
from bitplan.quant.convert import quantize
from bitplan.study.setting import Setting, some_batches, training_steps
from bitplan.study.trials import FLOAT, trials
from bitplan.tune.loop import finetune_

STEPS = 3
_RECORD_BYTES = 30_000  # a Result with its log, and what its training left


@dataclass(frozen=True)
class Line:
    """One trial, whether it is done, and about how many seconds it takes."""

    trial: Trial
    done: bool
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """Every trial, the seconds of all that are left in turn, and the bytes that they write.

    Trials that turn out to have the same precisions are trained once, so that this is the most. What methods take to
    estimate is not in it: `training_methods` names those that may train.
    """

    lines: tuple[Line, ...]
    step_seconds: float
    seconds: float
    bytes_kept: int
    bytes_passing: int
    training_methods: tuple[str, ...]


def forecast(study: Study, run_folder: str | Path) -> Forecast:
    """Time a few steps of the study's training on random weights; the run's folder is only read."""
    setting = Setting(study, Path(run_folder))
    setting.costs(graph := setting.graph())
    network = setting.network(study.start.seed)
    high = quantize(network, Plan.uniform(graph, study.choices[-1]), **study.start.options)  # type: ignore[arg-type]
    paces = {
        False: _step_seconds(setting, high, study.recipe, network if study.recipe.distill else None),
        True: _step_seconds(setting, network, _undistilled(study.recipe), None),
    }
    score = _score_seconds(setting, high)
    samples = setting.task.size("train")
    lines = tuple(_line(setting, trial, paces[trial.method == FLOAT], score, samples) for trial in trials(study))
    size = sum(value.numel() * value.element_size() for value in network.state_dict().values())
    left = [line for line in lines if not line.done]
    methods = [one.title for one in study.methods if looks_at_model(make_gain(one.name, one.options)[0])]
    return Forecast(
        lines=lines,
        step_seconds=paces[False],
        seconds=sum(line.seconds for line in left),
        bytes_kept=len(left) * _RECORD_BYTES + 2 * size,
        bytes_passing=3 * size,
        training_methods=tuple(methods),
    )


def _line(setting: Setting, trial: Trial, pace: float, score: float, samples: int) -> Line:
    steps = training_steps(trial.recipe, samples) if trial.recipe else 0
    share = 1.0 if trial.recipe is None else trial.recipe.batch_size / setting.study.recipe.batch_size
    done = (setting.folder / "trials" / f"{trial.id}.json").is_file()
    return Line(trial, done, steps * pace * share + score)


def _step_seconds(setting: Setting, model: nn.Module, recipe: Recipe, teacher: nn.Module | None) -> float:
    """The quickest of a few steps: the first also reads data and sets things up."""
    few = recipe.model_copy(update={"steps": STEPS, "epochs": None})
    log = finetune_(copy.deepcopy(model), setting.task, few, teacher=copy.deepcopy(teacher))
    return min(recipe.batch_size / line.samples_per_second for line in log.lines)


def _undistilled(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"distill": 0.0})


def _score_seconds(setting: Setting, model: nn.Module) -> float:
    """Seconds of scoring, by the forward pass of one batch."""
    task, size = setting.task, setting.study.recipe.batch_size
    batch = some_batches(task, size, 0, 1)[0]
    model.eval()
    with torch.no_grad():
        task.forward(model, batch)
        begin = time.perf_counter()
        task.forward(model, batch)
    return (time.perf_counter() - begin) * task.size("test") / min(size, task.size("train"))

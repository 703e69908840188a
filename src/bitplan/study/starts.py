"""The networks that all trials start from: the float one, and from it the one at the highest choice."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn

from bitplan.core.checkpoints import ABOUT, Checkpoint
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Plan
from bitplan.core.runs import RunFolder
from bitplan.core.store import load
from bitplan.core.studies import FLOAT
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import load_checkpoint, save_checkpoint
from bitplan.quant.convert import is_quantized, plan_of, quantize
from bitplan.quant.loading import load_weights_
from bitplan.study.setting import Setting, scored, some_batches
from bitplan.study.trials import starts
from bitplan.tune.log import TrainLog
from bitplan.tune.loop import finetune_
from bitplan.weights.opened import check_weights

CALIBRATION = 512  # training samples that set the first input steps


@final
@dataclass(frozen=True)
class MakeStart:
    """Work of an engine: the trial of a start → its Result; the network is kept as a checkpoint of the run."""

    setting: Setting

    def __call__(self, trial: Trial) -> Result:
        """Make, train where the trial has a recipe, keep and score."""
        begin = time.perf_counter()
        setting = self.setting
        model = self._float() if trial.role == "float" else self._high()
        log = self._train(model, trial) if trial.recipe else TrainLog((), complete=True)
        measured = scored(model, setting.task, log.lines, begin)
        save_checkpoint(model, setting.run.starts.path(trial.id), spec=setting.spec, graph_id=setting.graph.id)
        plan = plan_of(model).id if is_quantized(model) else FLOAT
        return Result(trial=trial, plan=plan, **measured)

    def _float(self) -> nn.Module:
        start = self.setting.study.start
        network = self.setting.network(start.seed)
        if start.weights is None:
            return network
        if (Path(start.weights) / ABOUT).is_file():  # bitplan's own
            return load_checkpoint(start.weights, network)
        load_weights_(network, start.weights, fresh=start.fresh)
        return network

    def _high(self) -> nn.Module:
        study, setting = self.setting.study, self.setting
        if study.start.checkpoint is not None:
            return self._ready(study.start.checkpoint)
        floating = starts(study).floating
        assert floating is not None, "read_study wants weights, a float recipe or a checkpoint"
        options = dict(study.start.options)
        highest = Plan.uniform(setting.graph, study.choices[-1])
        model = quantize(setting.start(floating.id), highest, **options)  # type: ignore[arg-type]
        recipe = study.start.recipe or study.recipe
        batches = some_batches(setting.task, recipe.batch_size, study.start.seed, CALIBRATION)
        calibrate_(model, batches, forward=setting.task.forward)
        return model

    def _ready(self, checkpoint: str) -> nn.Module:
        """A checkpoint that somebody trained: it must follow the graph and the highest choice of this study."""
        model = load_checkpoint(checkpoint, self.setting.network(self.setting.study.start.seed))
        wanted = Plan.uniform(self.setting.graph, self.setting.study.choices[-1]).precisions
        found = plan_of(model).precisions if is_quantized(model) else {}
        for layer, precision in wanted.items():
            if found.get(layer) != precision:
                raise InputError(
                    f"the start {checkpoint} has {layer} at {found.get(layer, 'full precision')}, this study at "
                    f"{precision}: take one of its highest choice, under the same rules"
                )
        return model

    def _train(self, model: nn.Module, trial: Trial) -> TrainLog:
        recipe: Recipe | None = trial.recipe
        assert recipe is not None
        return finetune_(
            model,
            self.setting.task,
            recipe,
            teacher=self.setting.teacher(recipe),
            seed=trial.seed,
            folder=self.setting.run.running.path(trial.id),
        )


def is_made(run: RunFolder, trial: Trial) -> bool:
    """Whether a start is there, result and network; one without the other is made again."""
    return run.trials.has(trial.id) and run.starts.has(trial.id)


def check_start(run: RunFolder, trial: Trial) -> None:
    """Refuse a start that is not as it was written, once for all the trials that would begin with it."""
    folder = run.starts.path(trial.id)
    try:
        check_weights(folder, load(folder / ABOUT, Checkpoint, sealed=True), sealed=True)
    except FileError as error:
        raise FileError(f"{error}. All trials start from it: delete {folder}, and a sweep makes it again") from None

"""The work of a sweep, one job at a time: train a network, estimate gains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from bitplan.core.progress import Progress
from bitplan.core.records import Gains
from bitplan.core.studies import Estimation, Trained, Training
from bitplan.engines.base import Engine
from bitplan.gains.base import Context, estimate
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import save_checkpoint
from bitplan.quant.convert import quantize
from bitplan.study.setting import CALIBRATION, Setting, scored, some_batches
from bitplan.tasks.choosing import choosing_task
from bitplan.tune.anew import begun_anew
from bitplan.tune.loop import finetune_


def first_network(setting: Setting, job: Training) -> nn.Module:
    """What a training begins with: its start at other precisions, or the float network quantized and calibrated."""
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
    """Work of an engine: a training → what came of it."""

    setting: Setting
    progress: Progress | None = None

    def __call__(self, job: Training) -> Trained:
        """Give the start the precisions, or quantize it, fine-tune and score; a killed training goes on where it was.

        A study that keeps its networks has this one before its outcome is known, and a score beside it.
        """
        begin = time.perf_counter()
        setting = self.setting
        task = choosing_task(setting.task, job.hold_out)
        teacher, folder = setting.teacher(job.recipe, job.start), setting.run.running.path(job.id)
        model, log = begun_anew(
            lambda model: finetune_(
                model, task, job.recipe, teacher=teacher, seed=job.seed, folder=folder, progress=self.progress
            ),
            lambda: first_network(setting, job),
            setting.run.running,
            job.id,
        )
        measured = scored(model, task, log.lines, begin, in_integers=setting.study.in_integers)
        trained = Trained(training=job.id, **measured)
        if setting.study.keep_networks:
            place = setting.run.networks.path(job.id)
            save_checkpoint(model, place, spec=setting.spec, graph_id=setting.graph.id, of=job.id)
            setting.run.kept.keep(job.id, trained)
        return trained


@final
@dataclass(frozen=True)
class Estimate:
    """An estimation → gains, in this process; jobs that the method has go to the engine."""

    setting: Setting
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

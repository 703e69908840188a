"""The training loop. There is no other: one process or many, by how accelerate is launched."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, send_to_device
from torch import Tensor, nn

from bitplan.core.errors import Diverged, InputError
from bitplan.core.progress import Progress
from bitplan.core.spend import Spend, charge, uncharged
from bitplan.core.trials import Recipe
from bitplan.quant.blend import Shares, shares_of
from bitplan.tasks.base import Batch, Task, WithWindows, samples_in
from bitplan.tasks.choosing import judged_by
from bitplan.tune.blame import blame
from bitplan.tune.distill import check_teacher, objective
from bitplan.tune.judge import Judge, judge_of
from bitplan.tune.log import LogFile, LogLine, TrainLog, read_log, stage_folder
from bitplan.tune.meter import Meter
from bitplan.tune.optim import build_optimizer, limited, rate, set_rate_
from bitplan.tune.pace import Pace, pace_of, parts_of, steps_of
from bitplan.tune.prepare import deterministic, layout, mixed, modes, seed_, warn_of_slow_products
from bitplan.tune.resume import Mark, TrainingFolder, describe_run
from bitplan.tune.sharpness import at_the_worst, check_sharpness, noted
from bitplan.tune.states import watched

_log = logging.getLogger(__name__)


def finetune_(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    teacher: nn.Module | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainLog:
    """Train a model in place by a recipe; the same seed gives the same weights on the same device.

    With a folder, log and checkpoints go there, and a killed run that is started again with the same arguments
    goes on where it was; a second stage has a folder in that of the first. `stop` is asked before every step; True ends
    the training early, to be resumed later. The model ends up on the device that accelerate chose. An incomplete last
    batch of an epoch is left out.
    """
    check_teacher(model, teacher, recipe)
    stages = recipe.stages
    for stage in stages:
        check_sharpness(model, stage.sharpness)
    total = steps_of(task, recipe)  # which says now what a later stage could not do
    log = TrainLog((), complete=True)
    for number, stage in enumerate(stages):
        home = None if folder is None else stage_folder(folder, number)
        taught = teacher if stage.distills else None
        told = partial(_told_in_all, progress, len(log.lines), total) if progress else None
        own_seed = mixed(seed, "stage", number) if number else seed  # or it would see the same batches again
        log = log.followed_by(_stage_(model, task, stage, taught, own_seed, home, told, stop))
        if not log.complete:
            break
    return log


def _stage_(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    teacher: nn.Module | None,
    seed: int,
    folder: Path | None,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> TrainLog:
    """Train by a recipe of one stage."""
    accelerator = _accelerator(recipe)
    warn_of_slow_products(recipe.precision, accelerator.device)
    trained_on, judging = parts_of(task, recipe)
    pace = pace_of(trained_on, recipe, accelerator.num_processes)
    home = None
    if folder is not None:
        run = describe_run(model, task, recipe, teacher, seed).model_copy(update={"processes": pace.processes})
        home = TrainingFolder(folder, run, main=accelerator.is_main_process)
    with modes(model, teacher), layout(model, teacher, wanted=recipe.channels_last, device=accelerator.device):
        wrapped = accelerator.prepare_model(model)
        model.__dict__.pop("_is_accelerate_prepared", None)  # or a second training would not be prepared
        if teacher is not None:
            teacher.to(accelerator.device)
        optimizer = build_optimizer(model, recipe)
        judge = judge_of(trained_on, judging, recipe, pace.total, pace.per_epoch)
        point = home.restore_(model, optimizer, judge) if home else Mark()
        loop = _Loop(
            wrapped, model, optimizer, trained_on, recipe, teacher, seed, pace, accelerator, judge, shares_of(model)
        )  # fmt: skip
        with deterministic(accelerator.device):
            return _run_(loop, home, point, progress, stop)


def evaluate(model: nn.Module, task: Task) -> float:
    """The score on the task's test split."""
    return evaluate_each(model, task)[0]


def evaluate_each(model: nn.Module, task: Task) -> tuple[float, tuple[float, ...]]:
    """The score on the task's test split, and the loss of each window where it is made of such."""
    if task.size("test") < 1:
        raise InputError(f"the test split of task {task.name} is empty: there is nothing to score")
    charge(Spend(forwards=task.size("test"), labels=True, tested=judged_by(task) == "train"))
    if not isinstance(task, WithWindows):
        return float(task.score(model)), ()
    losses = task.each(model)
    return task.scores_of(losses)[task.metric], tuple(losses)


def _told_in_all(progress: Progress, before: int, total: int, done: int, _: int, what: str) -> None:
    """Tell the steps of a stage as those of the whole training."""
    progress(before + done, total, what)


@dataclass(frozen=True)
class _Loop:
    """What every step needs: `model` is `network` as it runs on several devices."""

    model: nn.Module
    network: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    recipe: Recipe
    teacher: nn.Module | None
    seed: int
    pace: Pace
    accelerator: Accelerator
    judge: Judge
    shares: Shares

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Outputs and loss of a batch, in the recipe's precision."""
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            with watched(self.network, self.recipe) as states:
                outputs = self.task.forward(self.model, batch)
            loss = objective(self.task, outputs, batch, self.teacher, self.recipe, states)
        samples = samples_in(batch)
        charge(Spend(forwards=samples if self.teacher is None else 2 * samples, labels=self.recipe.distill < 1))
        return outputs, self.shares.objective(loss)

    def look(self, step: int) -> None:
        """Let the judge look where it is time; all processes hear what the main one saw.

        A network that changes its own precisions is not compared with what it was.
        """
        if self.shares.learns or not self.judge.is_due(step, self.pace.total):
            return
        with uncharged():  # it is our look at the training, whose part it is only where weights are chosen by it
            scores = [self.judge.scores(self.network) if self.accelerator.is_main_process else ()]
        if self.judge.keeps:
            charge(Spend(forwards=self.judge.samples, labels=True))
        self.judge.note(self.network, step, broadcast_object_list(scores)[0])


def _run_(
    loop: _Loop,
    home: TrainingFolder | None,
    point: Mark,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> TrainLog:
    """Take all steps that are left, writing down each."""
    total, size, main = loop.pace.total, loop.recipe.batch_size, loop.accelerator.is_main_process
    lines = read_log(home.log, up_to=point.step) if home else []
    meter = Meter(progress if main else None, total, point.step, size)
    batches = _batches(loop, point.step)
    seconds = point.seconds
    with contextlib.ExitStack() as stack:
        file = None
        if home and main:
            file = stack.enter_context(contextlib.closing(LogFile(home.log, lines)))
        step = point.step
        loop.look(step)
        while step < total and not (stop is not None and stop()):
            start = time.perf_counter()
            loss, score, lr = _step_(loop, batches, step)
            took = time.perf_counter() - start
            seconds += took
            epoch = step // loop.pace.per_epoch
            step += 1
            line = LogLine(step, epoch, loss, score, lr, size / took, seconds)
            lines.append(line)
            meter.tell(line)
            if file:
                file.add(line)
            loop.look(step)
            if home and file and home.due() and step < total:
                file.sync()
                home.save(loop.network, loop.optimizer, Mark(step, seconds), loop.judge)
        if home and file and step > point.step:
            file.sync()
            home.save(loop.network, loop.optimizer, Mark(step, seconds), loop.judge)
    loop.accelerator.wait_for_everyone()
    if step == total:
        _conclude_(loop)
    return TrainLog(tuple(lines), complete=step == total)


def _conclude_(loop: _Loop) -> None:
    """Give the model its best weights, if they were kept; say so if training did harm."""
    told = loop.judge.conclude_(loop.network)
    if told and loop.accelerator.is_main_process:
        advice = "" if loop.judge.keeps else ", or let held_out keep the best weights"
        _log.warning("training %s; lower lr (%g)%s", told, loop.recipe.lr, advice)


def _step_(loop: _Loop, batches: Iterator[Batch], step: int) -> tuple[float, float | None, float]:
    """One step of the optimizer, counted from 0: its loss, score and learning rate."""
    accelerator, recipe = loop.accelerator, loop.recipe
    lr = rate(recipe, step, loop.pace.total)
    set_rate_(loop.optimizer, recipe, lr)
    losses, scores = 0.0, 0.0
    for piece in range(recipe.accumulate):
        batch = next(batches)
        draw = mixed(loop.seed, "step", step, piece, accelerator.process_index)
        seed_(draw, accelerator.device)
        loop.shares.begin_(step, loop.pace.total)
        with accelerator.accumulate(loop.model):
            with noted(loop.network, recipe.sharpness) as weights:
                outputs, loss = loop.forward(batch)
            losses += loss.item()
            if not math.isfinite(losses):
                _diverge(loop, batch, draw, step, loss.item())
            with torch.no_grad():
                scores += loop.task.batch_score(outputs, batch)
            if recipe.sharpness:
                seed_(draw, accelerator.device)
                loss = at_the_worst(loop.network, recipe.sharpness, loss, weights, lambda: loop.forward(batch)[1])  # noqa: B023
            accelerator.backward(loss)
        charge(Spend(backwards=samples_in(batch) * (2 if recipe.sharpness else 1)))
    loop.shares.spare_(list(loop.network.parameters()))
    if recipe.grad_clip is not None:
        relaxed = {id(parameter) for parameter in loop.shares.parameters()}
        clipped = [parameter for parameter in loop.model.parameters() if id(parameter) not in relaxed]
        accelerator.clip_grad_norm_(clipped, recipe.grad_clip)
    with limited(loop.optimizer, recipe.move_limit * lr / recipe.lr):
        loop.optimizer.step()
    loop.shares.end_(lr / recipe.lr)
    loop.optimizer.zero_grad(set_to_none=True)
    if loop.pace.processes > 1:
        sums = torch.tensor([losses, scores], device=accelerator.device)
        losses, scores = accelerator.reduce(sums, "mean").tolist()
    loss_of_step, score_of_step = losses / recipe.accumulate, scores / recipe.accumulate
    return loss_of_step, score_of_step if math.isfinite(score_of_step) else None, lr


def _batches(loop: _Loop, start: int) -> Iterator[Batch]:
    """This process's pieces from a step on, epoch after epoch; their order depends on seed and epoch only."""
    pace, device = loop.pace, loop.accelerator.device
    pieces_per_step = loop.recipe.accumulate * pace.processes
    epoch, skipped = divmod(start, pace.per_epoch)  # skipped: the steps of this epoch that are done already
    while True:
        pieces = loop.task.batches("train", pace.piece, seed=mixed(loop.seed, "epoch", epoch))
        first = skipped * pieces_per_step + loop.accelerator.process_index
        end = pace.per_epoch * pieces_per_step
        count = 0
        for batch in itertools.islice(pieces, first, end, pace.processes):  # processes take turns
            yield batch if device.type == "cpu" else send_to_device(batch, device)
            count += 1
        if count < (pace.per_epoch - skipped) * loop.recipe.accumulate:
            samples = loop.task.size("train")
            raise InputError(f"task {loop.task.name} ran out of batches in epoch {epoch}, before its {samples} samples")
        epoch, skipped = epoch + 1, 0


def _diverge(loop: _Loop, batch: Batch, draw: int, step: int, loss: float) -> NoReturn:
    def rerun() -> None:
        seed_(draw, loop.accelerator.device)
        loop.forward(batch)

    culprit = blame(loop.network, rerun, batch)
    lr = f"{loop.recipe.lr:g}"
    raise Diverged(
        f"the loss of step {step + 1} is {loss}: {culprit}; if the data is right, lower lr ({lr}) or set grad_clip"
    )


def _accelerator(recipe: Recipe) -> Accelerator:
    pieces = GradientAccumulationPlugin(num_steps=recipe.accumulate, sync_with_dataloader=False)
    joined_before = torch.distributed.is_available() and torch.distributed.is_initialized()
    accelerator = Accelerator(gradient_accumulation_plugin=pieces)
    if accelerator.num_processes > 1 and not joined_before:
        atexit.register(_leave_the_group)
    if accelerator.mixed_precision not in ("no", recipe.precision):
        raise InputError(
            f"accelerate is set up for mixed precision {accelerator.mixed_precision}, the recipe for "
            f"{recipe.precision}: launch with --mixed_precision no, the recipe decides"
        )
    if accelerator.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise InputError(f"training on {accelerator.distributed_type.value} is not supported: launch with --multi_gpu")
    return accelerator


def _leave_the_group() -> None:
    """What this process joined it leaves when it ends: gloo's threads would abort one that exits with them running."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

"""The training loop. There is no other: one process or many, by how accelerate is launched."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, send_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitplan.adapters.torch import modes_kept, multiplies_bf16, usable_device
from bitplan.core.errors import Diverged, InputError
from bitplan.core.progress import Progress
from bitplan.core.spend import Spend, charge, pause_charging
from bitplan.core.trials import Recipe
from bitplan.quant.blend import Shares, shares_of
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.tasks.base import Batch, Task, WithWindows, measuring_split, samples_in
from bitplan.tune.distillation import check_teacher, objective, watch_states
from bitplan.tune.length import Pace, pace_of, parts_of, steps_of
from bitplan.tune.log import LogFile, LogLine, TrainLog, read_log, stage_folder
from bitplan.tune.optim import build_optimizer, limit_moves, rate, set_rate_
from bitplan.tune.resume import Mark, TrainingFolder, describe_run
from bitplan.tune.validation import Judge, judge_of

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
    total = steps_of(task, recipe)  # refuses a later stage now
    log = TrainLog((), complete=True)
    for number, stage in enumerate(stages):
        home = None if folder is None else stage_folder(folder, number)
        taught = teacher if stage.distills else None
        in_all = partial(_count_from, progress, len(log.lines), total) if progress else None
        own_seed = mix_seed(seed, "stage", number) if number else seed  # or it would see the same batches again
        log = log.followed_by(_train_stage_(model, task, stage, taught, own_seed, home, in_all, stop))
        if not log.complete:
            break
    return log


def _train_stage_(
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
        mark = home.restore_(model, optimizer, judge) if home else Mark()
        shares = shares_of(model)
        stage = _Stage(wrapped, model, optimizer, trained_on, recipe, teacher, seed, pace, accelerator, judge, shares)
        with deterministic(accelerator.device):
            return stage.run_(home, mark, progress, stop)


def evaluate(model: nn.Module, task: Task) -> float:
    """Return the score on the task's test split."""
    return evaluate_each(model, task)[0]


def evaluate_each(model: nn.Module, task: Task) -> tuple[float, tuple[float, ...]]:
    """Return the score on the task's test split, and the loss of each window if it consists of windows."""
    if task.size("test") < 1:
        raise InputError(f"the test split of task {task.name} is empty: there is nothing to score")
    charge(Spend(forwards=task.size("test"), labels=True, tested=measuring_split(task) == "train"))
    if not isinstance(task, WithWindows):
        return float(task.score(model)), ()
    losses = task.each(model)
    return task.scores_of(losses)[task.metric], tuple(losses)


def _count_from(progress: Progress, before: int, total: int, done: int, _: int, what: str) -> None:
    """Report the steps of a stage as steps of the whole training."""
    progress(before + done, total, what)


@dataclass(frozen=True)
class _Stage:
    """The training of one stage: `model` is `network` wrapped for several devices."""

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

    def run_(
        self, home: TrainingFolder | None, mark: Mark, progress: Progress | None, stop: Callable[[], bool] | None
    ) -> TrainLog:
        """Take all steps that are left, and write a line for each."""
        total, size, is_main = self.pace.total, self.recipe.batch_size, self.accelerator.is_main_process
        lines = read_log(home.log, up_to=mark.step) if home else []
        meter = Meter(progress if is_main else None, total, mark.step, size)
        batches = self._batches(mark.step)
        step, seconds = mark.step, mark.seconds
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(contextlib.closing(LogFile(home.log, lines))) if home and is_main else None
            self._look(step)
            while step < total and not (stop is not None and stop()):
                start = time.perf_counter()
                loss, score, lr = self._step_(batches, step)
                took = time.perf_counter() - start
                seconds += took
                epoch = step // self.pace.per_epoch
                step += 1
                line = LogLine(step, epoch, loss, score, lr, size / took, seconds)
                lines.append(line)
                meter.tell(line)
                if file:
                    file.add(line)
                self._look(step)
                if home and file and home.due() and step < total:
                    file.sync()
                    home.save(self.network, self.optimizer, Mark(step, seconds), self.judge)
            if home and file and step > mark.step:
                file.sync()
                home.save(self.network, self.optimizer, Mark(step, seconds), self.judge)
        self.accelerator.wait_for_everyone()
        if step == total:
            self._conclude_()
        return TrainLog(tuple(lines), complete=step == total)

    def _step_(self, batches: Iterator[Batch], step: int) -> tuple[float, float | None, float]:
        """Take one step of the optimizer, counted from 0; return its loss, score and learning rate."""
        accelerator, recipe, shares = self.accelerator, self.recipe, self.shares
        lr = rate(recipe, step, self.pace.total)
        set_rate_(self.optimizer, recipe, lr)
        losses, scores = 0.0, 0.0
        for piece in range(recipe.accumulate):
            batch = next(batches)
            seed = mix_seed(self.seed, "step", step, piece, accelerator.process_index)
            seed_(seed, accelerator.device)
            shares.begin_(step, self.pace.total)
            with accelerator.accumulate(self.model):
                with record_quantized_weights(self.network, recipe.sharpness) as weights:
                    outputs, loss = self._forward(batch)
                losses += loss.item()
                if not math.isfinite(losses):
                    self._diverge(batch, seed, step, loss.item())
                with torch.no_grad():
                    scores += self.task.batch_score(outputs, batch)
                if recipe.sharpness:
                    seed_(seed, accelerator.device)
                    loss = loss_at_the_worst(
                        self.network,
                        recipe.sharpness,
                        loss,
                        weights,
                        lambda: self._forward(batch)[1],  # noqa: B023
                    )
                accelerator.backward(loss)
            charge(Spend(backwards=samples_in(batch) * (2 if recipe.sharpness else 1)))
        shares.spare_(list(self.network.parameters()))
        if recipe.grad_clip is not None:
            relaxed = {id(parameter) for parameter in shares.parameters()}
            clipped = [parameter for parameter in self.model.parameters() if id(parameter) not in relaxed]
            accelerator.clip_grad_norm_(clipped, recipe.grad_clip)
        with limit_moves(self.optimizer, recipe.move_limit * lr / recipe.lr):
            self.optimizer.step()
        shares.end_(lr / recipe.lr)
        self.optimizer.zero_grad(set_to_none=True)
        if self.pace.processes > 1:
            sums = torch.tensor([losses, scores], device=accelerator.device)
            losses, scores = accelerator.reduce(sums, "mean").tolist()
        score = scores / recipe.accumulate
        return losses / recipe.accumulate, score if math.isfinite(score) else None, lr

    def _forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return outputs and loss of a batch, in the recipe's precision."""
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            with watch_states(self.network, self.recipe) as states:
                outputs = self.task.forward(self.model, batch)
            loss = objective(self.task, outputs, batch, self.teacher, self.recipe, states)
        samples = samples_in(batch)
        charge(Spend(forwards=samples if self.teacher is None else 2 * samples, labels=self.recipe.distill < 1))
        return outputs, self.shares.objective(loss)

    def _batches(self, start: int) -> Iterator[Batch]:
        """Yield this process's pieces from a step on, epoch after epoch; their order depends on seed and epoch only."""
        pace, device = self.pace, self.accelerator.device
        pieces_per_step = self.recipe.accumulate * pace.processes
        epoch, skipped = divmod(start, pace.per_epoch)  # skipped: the steps of this epoch that are done already
        while True:
            pieces = self.task.batches("train", pace.piece, seed=mix_seed(self.seed, "epoch", epoch))
            first = skipped * pieces_per_step + self.accelerator.process_index
            end = pace.per_epoch * pieces_per_step
            count = 0
            for batch in itertools.islice(pieces, first, end, pace.processes):  # processes take turns
                yield batch if device.type == "cpu" else send_to_device(batch, device)
                count += 1
            if count < (pace.per_epoch - skipped) * self.recipe.accumulate:
                samples = self.task.size("train")
                raise InputError(
                    f"task {self.task.name} ran out of batches in epoch {epoch}, before its {samples} samples"
                )
            epoch, skipped = epoch + 1, 0

    def _look(self, step: int) -> None:
        """Let the judge look if it is time; all processes get the scores of the main one.

        A network that changes its own precisions is not compared with its beginning.
        """
        if self.shares.learns or not self.judge.is_due(step, self.pace.total):
            return
        with pause_charging():  # a look counts as spend only if weights are chosen by it
            scores = [self.judge.scores(self.network) if self.accelerator.is_main_process else ()]
        if self.judge.keeps:
            charge(Spend(forwards=self.judge.samples, labels=True))
        self.judge.note(self.network, step, broadcast_object_list(scores)[0])

    def _conclude_(self) -> None:
        """Give the model its best weights, if they were kept; warn if training did harm."""
        verdict = self.judge.conclude_(self.network)
        if verdict and self.accelerator.is_main_process:
            advice = "" if self.judge.keeps else ", or let held_out keep the best weights"
            _log.warning("training %s; lower lr (%g)%s", verdict, self.recipe.lr, advice)

    def _diverge(self, batch: Batch, seed: int, step: int, loss: float) -> NoReturn:
        def rerun() -> None:
            seed_(seed, self.accelerator.device)
            self._forward(batch)

        culprit = name_culprit(self.network, rerun, batch)
        lr = f"{self.recipe.lr:g}"
        raise Diverged(
            f"the loss of step {step + 1} is {loss}: {culprit}; if the data is right, lower lr ({lr}) or set grad_clip"
        )


def _accelerator(recipe: Recipe) -> Accelerator:
    pieces = GradientAccumulationPlugin(num_steps=recipe.accumulate, sync_with_dataloader=False)
    joined_before = torch.distributed.is_available() and torch.distributed.is_initialized()
    accelerator = Accelerator(gradient_accumulation_plugin=pieces)
    if accelerator.num_processes > 1 and not joined_before:
        atexit.register(_leave_group)
    if accelerator.mixed_precision not in ("no", recipe.precision):
        raise InputError(
            f"accelerate is set up for mixed precision {accelerator.mixed_precision}, the recipe for "
            f"{recipe.precision}: launch with --mixed_precision no, the recipe decides"
        )
    if accelerator.distributed_type.value in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise InputError(f"training on {accelerator.distributed_type.value} is not supported: launch with --multi_gpu")
    return accelerator


def _leave_group() -> None:
    """Leave the process group at exit: gloo's threads would abort a process that exits with them running."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# Set while a model is trained, and undone afterwards: modes, memory layout, random numbers, the device.

_DEVICE = "ACCELERATE_TORCH_DEVICE"  # what accelerate asks


@cache
def warn_of_slow_products(precision: str, device: torch.device) -> None:
    """Warn, once in a process, that a recipe's precision makes training slower on this processor."""
    if precision == "bf16" and not multiplies_bf16(device):
        _log.warning(
            "this processor has no products of bfloat16, and trains longer by precision = bf16 than without, 2.2 "
            "to 2.4 times as long on the one that we measured: leave it out here"
        )


@contextmanager
def training_on(name: str | None) -> Iterator[None]:
    """Set the device that accelerate takes if this process trains for the first time; None leaves it the choice."""
    if name is None:
        yield
        return
    before = os.environ.get(_DEVICE)
    os.environ[_DEVICE] = str(usable_device(name))
    try:
        yield
    finally:
        os.environ.pop(_DEVICE)
        if before is not None:
            os.environ[_DEVICE] = before


@contextmanager
def modes(model: nn.Module, teacher: nn.Module | None) -> Iterator[None]:
    """Put the model into training mode and its teacher into inference mode inside this block."""
    with modes_kept(model, *([] if teacher is None else [teacher])):
        model.train()
        if teacher is not None:
            teacher.eval()
        yield


@contextmanager
def layout(model: nn.Module, teacher: nn.Module | None, *, wanted: bool, device: torch.device) -> Iterator[None]:
    """Store the weights of convolutions as channels_last on a CPU: the images between layers follow them."""
    both = [
        one
        for one in (model, teacher)
        if one is not None and wanted and device.type == "cpu" and _has_convolutions(one)
    ]
    for one in both:
        one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        for one in both:
            one.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use algorithms that repeat, and restore the caller's random numbers when the block ends."""
    backend = torch.backends.cudnn
    before = backend.deterministic, backend.benchmark
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            backend.deterministic, backend.benchmark = True, False
        try:
            yield
        finally:
            if device.type == "cuda":
                backend.deterministic, backend.benchmark = before


def _has_convolutions(model: nn.Module) -> bool:
    """Return True if there are images to lay out, and none is laid out so already."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    return bool(weights) and all(weight.is_contiguous() for weight in weights)


def mix_seed(*parts: object) -> int:
    """Return a seed of 31 bits that depends on all parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def seed_(seed: int, device: torch.device) -> None:
    """Seed dropout and the like before each step, so that a resumed run needs no generator's state."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


# SAQ's sharpness step: train for the worst loss of quantized weights that are moved a little.

Batchnorm = nn.modules.batchnorm._BatchNorm


def check_sharpness(model: nn.Module, radius: float) -> None:
    """Refuse a radius where nothing is quantized."""
    if radius and not any(isinstance(module, WeightQuantizer) for module in model.modules()):
        raise InputError(
            f"the recipe's sharpness ({radius:g}) moves quantized weights, and this model has none: quantize it first, "
            "or set sharpness to 0"
        )


@contextmanager
def record_quantized_weights(model: nn.Module, radius: float) -> Iterator[list[Tensor]]:
    """Record the quantized weights of the forward pass in this block, by call; nothing without a radius."""
    weights: list[Tensor] = []

    def note(_: nn.Module, __: Any, out: Tensor) -> None:
        if out.requires_grad:
            weights.append(out)

    with _hook_quantizers(model if radius else None, note):
        yield weights


def loss_at_the_worst(
    model: nn.Module, radius: float, loss: Tensor, weights: Sequence[Tensor], again: Callable[[], Tensor]
) -> Tensor:
    """Return the loss of the same pass with quantized weights moved by `radius` to where the loss grows fastest."""
    slopes = torch.autograd.grad(loss, weights, allow_unused=True)
    known = [slope for slope in slopes if slope is not None]
    norm = torch.stack([slope.float().norm() for slope in known]).norm() if known else torch.zeros(())
    scale = radius / norm.clamp_min(torch.finfo(torch.float32).tiny)
    moves = deque(None if slope is None else (slope * scale).to(slope.dtype) for slope in slopes)

    def move(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        change = moves.popleft() if out.requires_grad else None
        return out if change is None else out + change

    with _hook_quantizers(model, move), _keep_statistics(model):
        return again()


@contextmanager
def _hook_quantizers(model: nn.Module | None, hook: Callable[..., Any]) -> Iterator[None]:
    quantizers = [] if model is None else [one for one in model.modules() if isinstance(one, WeightQuantizer)]
    handles = [quantizer.register_forward_hook(hook) for quantizer in quantizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _keep_statistics(model: nn.Module) -> Iterator[None]:
    """Keep the running statistics as the pass with unmoved weights left them."""
    norms = [one for one in model.modules() if isinstance(one, Batchnorm) and one.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum = momentum
            if count is not None and norm.training:
                count.sub_(1)


# Find the layer that made a loss NaN or infinite.


def name_culprit(model: nn.Module, rerun: Callable[[], Any], batch: Any) -> str:
    """Return words for the origin of the first NaN or infinite value; the batch that showed it is run again.

    The culprit is the first module that finishes with such an output of finite inputs; quantizers count as their layer.
    """
    if not _is_finite(batch, masks=True):
        return "the batch itself has NaN or infinite values: check the data"
    culprits: list[str] = []
    with _hook_modules(model, culprits), torch.no_grad():
        rerun()
    if not culprits:
        return "the output of every layer is finite, so the loss itself makes it: check the labels and the loss"
    layer = model.get_submodule(culprits[0])
    broken = [name for name, value in layer.named_parameters() if not _is_finite(value)]
    why = f" (its {broken[0]} is not finite)" if broken else ""
    return f"the first layer with NaN or infinite output is {culprits[0] or 'the model itself'}{why}"


@contextmanager
def _hook_modules(model: nn.Module, culprits: list[str]) -> Iterator[None]:
    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            if not culprits and not _is_finite(output) and _is_finite((arguments, options), masks=True):
                culprits.append(name)

        return hook

    handles = [
        module.register_forward_hook(look(name), with_kwargs=True)
        for name, module in model.named_modules()
        if not isinstance(module, WeightQuantizer | InputQuantizer)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(tree: Any, *, masks: bool = False) -> bool:
    """Return True if no tensor of a tree has NaN or infinite values; with `masks`, −∞ passes."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return all(bool((tensor < torch.inf if masks else torch.isfinite(tensor)).all()) for tensor in tensors)


# The line that progress shows while a network is trained.

_PAUSE = 0.1  # seconds between two calls of progress


class Meter:
    """Report steps to `progress`, not more often than an eye can follow."""

    def __init__(self, progress: Progress | None, total: int, begin: int, batch_size: int) -> None:
        self._progress = progress
        self._total = total
        self._begin = begin
        self._batch_size = batch_size
        self._start = time.perf_counter()
        self._next = 0.0

    def tell(self, line: LogLine) -> None:
        """Report loss, score and the speed since the start."""
        now = time.perf_counter()
        if self._progress is None or (now < self._next and line.step < self._total):
            return
        self._next = now + _PAUSE
        pace = max(now - self._start, 1e-9) / (line.step - self._begin)
        score = "" if line.score is None else f" · score {line.score:.4g}"
        self._progress(line.step, self._total, f"loss {line.loss:.4g}{score} · {self._batch_size / pace:.4g} samples/s")

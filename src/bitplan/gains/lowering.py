"""From the network at the highest choice: the same with some groups lowered, steps rescaled, nothing trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NoReturn, TypeVar

from torch import nn

from bitplan.core.errors import InputError, Unfinished, WriteError
from bitplan.core.jobs import Dropped, Lowered, Probes, Relaxed
from bitplan.core.precision import Precision
from bitplan.core.record import Record
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import lacks
from bitplan.core.spend import charge, metering, uncharged
from bitplan.gains.base import Context
from bitplan.quant.convert import is_quantized, plan_of, quantize, quantizers_of
from bitplan.quant.other_precisions import is_off, switch_off_
from bitplan.store.engines import Failure
from bitplan.store.jobs import run_jobs
from bitplan.store.record_store import Shelf
from bitplan.tasks.base import Task, WithLoss, draw, judged_by, measure_

# --- What methods that run the network share: a task that can be used, batches for all alike, and jobs that may
# fail.

By = Literal["loss", "score"]
Job = TypeVar("Job", bound=Lowered | Dropped | Probes | Relaxed)
Outcome = TypeVar("Outcome", bound=Record)

_TRIED = 4  # samples on which the task is tried before long work starts


def check_by(by: str) -> None:
    """Refuse a measure other than the loss and the score."""
    if by not in ("loss", "score"):
        raise InputError(f"gains are measured by loss or by score, not by {by!r}")


def sign_of(by: By, task: Task) -> float:
    """What a measured loss or score is multiplied by, so that more is better."""
    return 1.0 if by == "score" and task.higher_is_better else -1.0


def check_task(task: Any, method: str, work: str, needed: Any = WithLoss) -> Task:
    """The task, where there is one with what is needed (a protocol of `tasks/base.py`) and with training data."""
    if task is None:
        raise InputError(
            f"{method} {work}: give a task, --task, or batches, --data package.module:loader (in Python: "
            "Context(task=…), or batches=…)"
        )
    missing = lacks(task, needed)
    name = type(task).__name__ if "name" in missing else task.name
    if missing:
        raise InputError(f"{method} {work}, but task {name} has no {missing[0]}: choose a task that has one")
    if task.size("train") < 1:
        raise InputError(f"the training split of task {name} is empty: {method} {work} and needs training data")
    checked: Task = task
    return checked


def try_task(model: nn.Module, task: Task, by: By, method: str) -> None:
    """Compute the loss of a few samples, so that what cannot work is said before long work starts.

    `model` is changed: give a copy.
    """
    split = judged_by(task)
    size = min(_TRIED, task.size(split))
    try:
        with uncharged():
            losses, scores = measure_(model, task, draw(model, task, 1, size, None, split))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the loss of task {task.name} cannot be computed on its training data ({type(error).__name__}: {error}): "
            f"{method} needs labelled batches that fit the model"
        ) from error
    if not all(map(math.isfinite, losses)):
        raise InputError(f"the loss of task {task.name} is {losses[0]} for the model as it is: train it first")
    if by == "score" and scores is None:
        raise InputError(f"task {task.name} has no score for a batch: use by=loss")


def options_of_task(task: Task) -> dict[str, str]:
    """A task's options, such as the size of its images, as far as it is a dataclass."""
    if not dataclasses.is_dataclass(task):
        return {}
    return {field.name: repr(getattr(task, field.name)) for field in dataclasses.fields(task)}


@dataclass(frozen=True)
class Metered(Generic[Job, Outcome]):
    """Work whose outcomes say what they spent, whichever process does it."""

    work: Callable[[Job], Outcome]

    def __call__(self, job: Job) -> Outcome:
        """Do the job beside a meter."""
        with metering() as meter:
            outcome = self.work(job)
        return outcome.model_copy(update={"spend": meter.spent}) if "spend" in type(outcome).model_fields else outcome


def finish(
    work: Callable[[Job], Outcome], jobs: Sequence[Job], kind: type[Outcome], context: Context, method: str
) -> dict[str, Outcome]:
    """Do all jobs, telling progress; their outcomes by job id. What they spent, now or before, is charged.

    Where outcomes are kept, the others are finished before a failed one is raised: they are not done again.
    """
    once = {job.id: job for job in jobs}
    shelf = None if context.shelf is None else context.shelf.holding(kind)
    done: dict[str, Outcome] = {}
    failed: list[tuple[Job, Failure]] = []
    for job, outcome in run_jobs(Metered(work), list(once.values()), shelf=shelf, engine=context.engine):
        if isinstance(outcome, Failure):
            failed.append((job, outcome))
            if shelf is None:
                break
        else:
            done[job.id] = outcome
            charge(getattr(outcome, "spend", None))
        if context.progress is not None:
            ended = len(done) + len(failed)
            context.progress(ended, len(once), job.words)
    if failed:
        _raise(failed, len(once), shelf, method)
    return done


def _raise(failed: Sequence[tuple[Job, Failure]], total: int, shelf: Shelf[Outcome] | None, method: str) -> NoReturn:
    """Say what failed first; a disk that cannot be written is nobody's fault but its own."""
    job, failure = failed[0]
    if failure.fault == "store":
        raise WriteError(failure.message)
    many = "" if len(failed) == 1 else f", and {len(failed) - 1} more of {total} jobs"
    then = (
        "nothing was kept, for there is no store"
        if shelf is None
        else f"the other outcomes are kept in {shelf.folder}, so that only what failed is done again"
    )
    error = Unfinished(f"{method} failed with {job.words} (seed {job.seed}){many}: {failure.error}; {then}")
    error.add_note(failure.traceback)
    raise error


def check_top(model: Any, graph: Graph, choices: Sequence[Precision], method: str) -> None:
    """Raise unless every selectable layer of the model is at the highest choice."""
    top = choices[-1]
    if not isinstance(model, nn.Module):
        raise InputError(f"{method} runs the network, so it needs the model itself, not {_shown(model)}")
    if not is_quantized(model):
        raise InputError(
            f"{method} lowers groups of a network that is trained at {top}, but this model is not quantized: "
            f"quantize it with Plan.uniform(graph, '{top}') and fine-tune it first"
        )
    precisions = plan_of(model).precisions
    for layer in (layer.name for group in graph.selectable for layer in group.layers):
        if layer not in precisions:
            raise InputError(f"the model's plan has no layer {layer!r}: the graph must come from this model")
        if precisions[layer] != top:
            raise InputError(
                f"{method} starts from every selectable layer at the highest choice, {top}, but {layer} is at "
                f"{precisions[layer]}: quantize and fine-tune the model at {top} first, or choose up to what it has"
            )


def check_seen(method: str, choices: Sequence[Precision], *, inputs: bool = True) -> None:
    """Refuse choices that quantize weights or inputs which the highest leaves alone: these have no quantizer."""
    top = choices[-1]
    for choice in choices[:-1]:
        unseen = {
            "weights": choice.quantizes_weights and not top.quantizes_weights,
            "inputs": inputs and choice.quantizes_inputs and not top.quantizes_inputs,
        }
        for role in (role for role, found in unseen.items() if found):
            raise InputError(
                f"{method} cannot tell what {choice} changes about {role}, which {top} leaves alone: take a highest "
                "choice that quantizes them, or another method, such as drift"
            )


def layers_of(graph: Graph, lowered: Mapping[str, Precision]) -> dict[str, Precision]:
    """What each layer of the named groups is lowered to: linked layers go together."""
    return {
        layer.name: lowered[group.name] for group in graph.selectable if group.name in lowered for layer in group.layers
    }


def lower(model: nn.Module, layers: Mapping[str, Precision]) -> nn.Module:
    """A copy of a quantized model with these layers at other precisions, their steps times 2^(b1−b2).

    What is switched off stays so, unless it is lowered.
    """
    plan = plan_of(model)
    made = quantize(model, Plan(**(dict(plan) | {"precisions": plan.precisions | dict(layers)})))
    switch_off_(made, (name for name, found in quantizers_of(model).items() if is_off(found) and name not in layers))
    return made


def is_float(model: nn.Module, graph: Graph) -> bool:
    """Return True if the weight quantizers of all groups are switched off, to be switched on at every choice.

    A layer at w16a16 has no quantizer: it is at the highest choice, and only lower ones change it.
    """
    found = quantizers_of(model)
    layers = [layer.name for group in graph.selectable for layer in group.layers]
    return all(name in found and is_off(found[name]) for name in layers)


def lowered_choices(model: nn.Module, graph: Graph, choices: Sequence[Precision]) -> Sequence[Precision]:
    """The choices that differ from the network as it is: all of them where it is float, else those below the top."""
    return choices if is_float(model, graph) else choices[:-1]


def by_first_layer(graph: Graph, rows: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """What was measured of whole groups, by layer: it is the first one's, others add 0."""
    return {
        layer.name: tuple(rows[group.name]) if number == 0 else (0.0,) * len(rows[group.name])
        for group in graph.selectable
        for number, layer in enumerate(group.layers)
    }


def _shown(model: Any) -> str:
    if model is None:
        return "only its graph"
    return f"a file ({getattr(model, 'path', model)}): read it with load_checkpoint(path, model)"

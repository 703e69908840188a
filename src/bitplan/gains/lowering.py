"""Lower groups of a network that is at the highest choice, and check first that this is possible."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.core.registry import find_missing_members
from bitplan.core.spend import pause_charging
from bitplan.quant.convert import is_quantized, plan_of, quantize, quantizers_of
from bitplan.quant.other_precisions import is_off, switch_off_
from bitplan.tasks.base import Task, WithLoss, draw, measure_, measuring_split

By = Literal["loss", "score"]

_TRIED = 4  # samples on which the task is tried before long work starts


def check_by(by: str) -> None:
    """Refuse a measure other than the loss and the score."""
    if by not in ("loss", "score"):
        raise InputError(f"gains are measured by loss or by score, not by {by!r}")


def sign_for(by: By, task: Task) -> float:
    """Return the factor for a measured loss or score, so that more is better."""
    return 1.0 if by == "score" and task.higher_is_better else -1.0


def check_task(task: Any, method: str, work: str, needed: Any = WithLoss) -> Task:
    """Return the task. Raise if there is none, or it lacks training data or a part of the `needed` protocol."""
    if task is None:
        raise InputError(
            f"{method} {work}: give a task, --task, or batches, --data package.module:loader (in Python: "
            "Context(task=…), or batches=…)"
        )
    missing = find_missing_members(task, needed)
    name = type(task).__name__ if "name" in missing else task.name
    if missing:
        raise InputError(f"{method} {work}, but task {name} has no {missing[0]}: choose a task that has one")
    if task.size("train") < 1:
        raise InputError(f"the training split of task {name} is empty: {method} {work} and needs training data")
    checked: Task = task
    return checked


def try_task(model: nn.Module, task: Task, by: By, method: str) -> None:
    """Compute the loss of a few samples, so that errors come before long work starts. Changes `model`: give a copy."""
    split = measuring_split(task)
    size = min(_TRIED, task.size(split))
    try:
        with pause_charging():
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


def check_top(model: Any, graph: Graph, choices: Sequence[Precision], method: str) -> None:
    """Raise unless every selectable layer of the model is at the highest choice."""
    top = choices[-1]
    if not isinstance(model, nn.Module):
        raise InputError(f"{method} runs the network, so it needs the model itself, not {_describe(model)}")
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
    """Refuse choices that quantize weights or inputs which the highest choice leaves without a quantizer."""
    top = choices[-1]
    for choice in choices[:-1]:
        without_quantizer = {
            "weights": choice.quantizes_weights and not top.quantizes_weights,
            "inputs": inputs and choice.quantizes_inputs and not top.quantizes_inputs,
        }
        for role in (role for role, is_missing in without_quantizer.items() if is_missing):
            raise InputError(
                f"{method} cannot tell what {choice} changes about {role}, which {top} leaves alone: take a highest "
                "choice that quantizes them, or another method, such as drift"
            )


def layers_of(graph: Graph, lowered: Mapping[str, Precision]) -> dict[str, Precision]:
    """Return the precision of each layer of the lowered groups: linked layers go together."""
    return {
        layer.name: lowered[group.name] for group in graph.selectable if group.name in lowered for layer in group.layers
    }


def lower(model: nn.Module, layers: Mapping[str, Precision]) -> nn.Module:
    """Return a copy of a quantized model with these layers at other precisions, their steps times 2^(b1−b2).

    Quantizers that are switched off stay so, unless their layer is lowered.
    """
    plan = plan_of(model)
    lowered = quantize(model, Plan(**(dict(plan) | {"precisions": plan.precisions | dict(layers)})))
    off = (name for name, quantizers in quantizers_of(model).items() if is_off(quantizers) and name not in layers)
    switch_off_(lowered, off)
    return lowered


def is_float(model: nn.Module, graph: Graph) -> bool:
    """Return True if the weight quantizers of all groups are switched off, to be switched on at every choice.

    A layer at w16a16 has no quantizer: it is at the highest choice, and only lower ones change it.
    """
    quantizers = quantizers_of(model)
    layers = [layer.name for group in graph.selectable for layer in group.layers]
    return all(name in quantizers and is_off(quantizers[name]) for name in layers)


def lowered_choices(model: nn.Module, graph: Graph, choices: Sequence[Precision]) -> Sequence[Precision]:
    """Return the choices that differ from the network as it is: all if it is float, else those below the top."""
    return choices if is_float(model, graph) else choices[:-1]


def rows_by_layer(graph: Graph, rows: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Return the rows of groups by layer: the first layer has its group's row, the others add 0."""
    return {
        layer.name: tuple(rows[group.name]) if number == 0 else (0.0,) * len(rows[group.name])
        for group in graph.selectable
        for number, layer in enumerate(group.layers)
    }


def _describe(model: Any) -> str:
    if model is None:
        return "only its graph"
    return f"a file ({getattr(model, 'path', model)}): read it with load_checkpoint(path, model)"

"""Data for methods as users have it, and a start for those that lower a network: one that is only calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.gains.base import Context, Gain
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import is_quantized, quantize
from bitplan.quant.other_precisions import switch_off_
from bitplan.quant.quantizers import InputQuantizer
from bitplan.tasks.base import WithData, draw
from bitplan.tasks.loaded import samples_of
from bitplan.tasks.loaded import task as task_of
from bitplan.weights.opened import CheckpointLike, open_if_path

_SAMPLES, _AT_ONCE = 512, 64  # that set input steps
_STREAMED = 2048  # samples that are read of what does not tell its length: more than methods look at by default


def add_data(context: Context, batches: Any, loss: Callable[[Any, Any], Any] | None) -> Context:
    """The context with a task of these batches; `batches` may be a task itself."""
    if batches is None:
        if loss is not None:
            raise InputError("loss=… is that of batches=…: give both, or a task in the context, which has its own")
        return context
    if context.task is not None:
        raise InputError("there are batches and a task: give one of them")
    if isinstance(batches, WithData):
        if loss is not None:
            raise InputError(f"the task {batches.name} has its own loss: leave loss=… out")
        return replace(context, task=batches)
    return replace(context, task=task_of(train=samples_of(batches, most=_STREAMED), loss=loss, name="batches"))


def start_network(
    gain: Gain, name: str, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context
) -> tuple[Any, tuple[str, ...]]:
    """The network that groups are lowered of, and what is to say: a float one is quantized and calibrated first.

    Where weights alone are quantized there is nothing to calibrate, and a method that can start `from_float` is given
    the float network, its quantizers switched off.
    """
    task, top = context.task, choices[-1]
    if isinstance(model, CheckpointLike) and task is not None and getattr(gain, "streams", None):
        path = open_if_path(model).path
        return model, (f"start: {name} runs the float network of {path}, which is read block by block",)
    if not isinstance(model, nn.Module) or is_quantized(model) or task is None or not task.size("train"):
        return model, ()
    how = context.quantizer_for(choices)
    start = quantize(model, Plan.uniform(graph, top), method=how)
    samples = 0
    if any(isinstance(module, InputQuantizer) for module in start.modules()):
        size = min(_AT_ONCE, task.size("train"))
        samples = min(_SAMPLES, task.size("train")) // size * size
        calibrate_(start, draw(start, task, samples // size, size, seed=context.seed), forward=task.forward)
    if getattr(gain, "from_float", False) and not any(choice.quantizes_inputs for choice in choices):
        switch_off_(start, [layer.name for group in graph.selectable for layer in group.layers])
        return start, (f"start: {name} lowers groups of the float network, weights as {how} makes them",)
    calibrated = f"{samples} samples calibrated and " if samples else ""
    return start, (f"start: {name} lowers a copy at {top} that {calibrated}nothing has trained",)

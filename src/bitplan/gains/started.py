"""Data for methods as users have it, and a start for those that lower a network: one that is only calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.gains.base import Context
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import is_quantized, quantize
from bitplan.tasks.base import WithData
from bitplan.tasks.loaded import task as task_of
from bitplan.tasks.measured import draw
from bitplan.tasks.samples import samples_of

_SAMPLES, _AT_ONCE = 512, 64  # that set input steps
_STREAMED = 2048  # samples that are read of what does not tell its length: more than methods look at by default


def with_data(context: Context, batches: Any, loss: Callable[[Any, Any], Any] | None) -> Context:
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


def started(
    model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context, method: str
) -> tuple[Any, tuple[str, ...]]:
    """The network that groups are lowered of, and what is to say: a float one is quantized and calibrated first."""
    task, top = context.task, choices[-1]
    if not isinstance(model, nn.Module) or is_quantized(model) or task is None or not task.size("train"):
        return model, ()
    size = min(_AT_ONCE, task.size("train"))
    count = min(_SAMPLES, task.size("train")) // size
    start = quantize(model, Plan.uniform(graph, top))
    calibrate_(start, draw(start, task, count, size, seed=context.seed), forward=task.forward)
    return start, (
        f"start: {method} lowers a copy at {top} that {count * size} samples calibrated and nothing has trained",
    )

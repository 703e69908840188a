"""trace: model + example input → Graph, from shapes alone."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from bitplan.core.errors import InputError, TraceError
from bitplan.core.naming import layer_of, layer_of_quantizer
from bitplan.core.records import Graph, Layer
from bitplan.core.rules import Rules
from bitplan.forward.shadow import Shadow
from bitplan.graph.ends import Ends
from bitplan.graph.links import find_links
from bitplan.graph.names import trace_checkpoint
from bitplan.graph.rules import apply_rules
from bitplan.graph.uses import told_uses
from bitplan.graph.watch import Watch
from bitplan.quant.convert import unquantized
from bitplan.quant.integer_places import IntegerWatch
from bitplan.quant.layers import original
from bitplan.weights.opened import CheckpointLike


def trace(
    model: nn.Module | CheckpointLike,
    example: Any = None,
    *,
    rules: Rules | None = None,
    name: str | None = None,
    values: bool = False,
) -> Graph:
    """Find the layers of a model, what they cost and which of them are linked.

    Of a checkpoint file the graph follows from its names and shapes alone (`graph/names.py`), without an example.
    `example` is a tensor, a tuple of positional arguments, or a dict of keyword arguments; only its shapes matter
    (meta tensors do), and the model is neither run nor changed. MACs are those of the example, its batch included.

    `values` is for models that decide by the values of tensors: the path is followed that they take for this example,
    by running a copy which shares the parameters.
    """
    if not isinstance(model, nn.Module):
        if values:
            raise InputError("a file of weights is not run, so there are no values to follow: leave values out")
        return trace_checkpoint(model, rules)
    if example is None:
        raise InputError("an example input is needed to trace a model: trace(model, example)")
    shadow = Shadow(model, values=values)
    watch = Watch(shadow.model, shadow.parameters, few_steps=not shadow.follows_values)
    integers = IntegerWatch(shadow.model)
    _run(shadow, watch, integers, example)
    if not watch.layers:
        raise TraceError(f"{type(model).__name__} has no layer that multiplies by weights; there is nothing to plan")
    keys = {key: watch.values.producer(key) for seen in watch.layers.values() for key in seen.inputs}
    graph = Graph(
        model=name or original(model).__name__,
        layers=tuple(
            Layer(
                name=seen.name,
                kind=seen.kind,
                macs=seen.macs,
                weights=seen.weights,
                in_features=seen.in_features,
            )
            for seen in watch.layers.values()
        ),
        links=find_links({seen.name: seen.inputs for seen in watch.layers.values() if seen.inputs}, keys),
        unreached=_unreached(shadow, watch),
        uses=told_uses(shadow.model, watch),
        integers=integers.found,
    )
    weighted = next((layer.name for layer in graph.layers if layer.weights), None)
    return apply_rules(graph, rules or Rules(), Ends(weighted, watch.last_weighted))


def _run(shadow: Shadow, watch: Watch, integers: IntegerWatch, example: Any) -> None:
    positional, keyword = shadow.example(example)
    integers.add_inputs((positional, keyword))
    labelled = [(f"model input {number}", value) for number, value in enumerate(positional)]
    labelled += [(f"model input {key!r}", value) for key, value in keyword.items()]
    for label, value in labelled:
        for tensor in tree_leaves(value):
            if hasattr(tensor, "untyped_storage"):
                watch.values.add_input(tensor, label)
    try:
        with (
            shadow.running(),
            unquantized(shadow.model),
            watch,
            integers,
        ):  # a quantized network is the float one it was
            integers.add_outputs(shadow.model(*positional, **keyword))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise TraceError(
            f"{_place(watch)} decides by the values of a tensor ({error.func}), which shapes alone cannot follow: "
            "trace it with data, --input values (in Python: trace(model, example, values=True))"
        ) from error
    except Exception as error:
        message = str(error).strip().splitlines()
        # Some operations know the shapes of fewer types than they compute (torch's grouped products: bf16 only).
        hint = (
            "" if shadow.follows_values else " (if the model runs on it: --input values, or values=True, traces a run)"
        )
        misfit = isinstance(error, RuntimeError | TypeError | ValueError | IndexError)
        told = "the example input does not fit the model" if misfit else "the model's own code fails"
        raise TraceError(
            f"{told}: in {_place(watch)}: {message[0] if message else repr(error)}{hint if misfit else ''}"
        ) from error


def _place(watch: Watch) -> str:
    path, module = watch.where
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def _unreached(shadow: Shadow, watch: Watch) -> tuple[str, ...]:
    """Layers whose weights no operation has read."""
    never = {
        name: parameter
        for name, parameter in shadow.parameters.items()
        if name not in watch.touched and parameter.dim() >= 2 and layer_of_quantizer(name) is None
    }
    return tuple(dict.fromkeys(layer_of(name) for name in never))

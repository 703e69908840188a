"""From the network at the highest choice: the same with some groups lowered, steps rescaled, nothing trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Graph, Plan
from bitplan.quant.convert import is_quantized, plan_of, quantize, quantizers_of
from bitplan.quant.switching import is_off, switch_off_


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
    """What was measured of whole groups, by layer: it is the first one's, others add 0 (docs/decisions/0009, 3)."""
    return {
        layer.name: tuple(rows[group.name]) if number == 0 else (0.0,) * len(rows[group.name])
        for group in graph.selectable
        for number, layer in enumerate(group.layers)
    }


def _shown(model: Any) -> str:
    if model is None:
        return "only its graph"
    return f"a file ({getattr(model, 'path', model)}): read it with load_checkpoint(path, model)"

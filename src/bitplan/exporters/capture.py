"""A quantized model → an ONNX graph in which every quantizer is one node, for an exporter to put its own words there.

`bitplan::Quantize(v)` stands for an input quantizer (attributes `path`, `scale`, `low`, `high`), `bitplan::Weight()`
for a quantized weight (attribute `layer`). Both take and give floats.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.onnx.ops
from torch import Tensor, nn

from bitplan.adapters.onnxscript import graph_of
from bitplan.core.errors import InputError
from bitplan.quant.convert import quantizers_of
from bitplan.quant.integer import settle_
from bitplan.quant.layers import Adopted, adopt_, family, release_
from bitplan.quant.lsq import MASK, positive
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.quantizing import why_no_multiples

DOMAIN = "bitplan"


def capture(model: nn.Module, example: Any, *, opset: int) -> Any:
    """The ONNX proto of a calibrated model, its batch dimension free; the model stays as it was."""
    marked = copy.deepcopy(model).cpu().eval()
    settle_(marked)
    layers = {id(both.weight): layer for layer, both in quantizers_of(marked).items() if both.weight is not None}
    for path, module in marked.named_modules():
        if isinstance(module, InputQuantizer):
            _mark_input_(module, path)
        elif isinstance(module, WeightQuantizer):
            if id(module) not in layers:
                raise InputError(f"{path} belongs to no layer of the plan: quantize the model again")
            module.__class__ = _WeightMarker
            cast(_WeightMarker, module).layer = layers[id(module)]
        elif isinstance(module, Adopted):
            _show_whole_weights_(module, path)
    args, kwargs = inputs_of(example)
    names: list[str] = []
    marked.register_forward_hook(lambda _, __, outputs: names.extend(_names(outputs)))
    with torch.no_grad():
        proto = graph_of(marked, args, kwargs, _batches_free(args, kwargs), opset=opset)
    _rename_outputs_(proto, names)
    return proto


class _Input(InputQuantizer):
    """An input quantizer as a node."""

    path: str
    scale: float
    limits: tuple[int, int]

    def forward(self, v: Tensor, *, times: int = 1) -> Tensor:
        """One node, and around it the mask of attention scores."""
        if not v.is_floating_point():
            return v
        if not self.masked:
            return self._node(v)
        return torch.where(v < MASK, v, self._node(v.clamp_min(MASK)))

    def _node(self, v: Tensor) -> Tensor:
        low, high = self.limits
        attributes: dict[str, Any] = {"path": self.path, "scale": self.scale, "low": low, "high": high}
        return torch.onnx.ops.symbolic(f"{DOMAIN}::Quantize", (v,), attributes, dtype=v.dtype, shape=v.shape, version=1)


class _WeightMarker(WeightQuantizer):
    """A quantized weight as a node."""

    layer: str

    def forward(self, weight: Tensor, *, numel: int | None = None, step: Tensor | None = None) -> Tensor:
        """One node; the float weight is not among its inputs, so it is not written."""
        shape, kind = tuple(weight.shape), weight.dtype
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::Weight", (), {"layer": self.layer}, dtype=kind, shape=shape, version=1
        )


def _show_whole_weights_(module: Adopted, path: str) -> None:
    """Let a layer's counterpart quantize its weight as a whole: a node stands for all of it."""
    layer_type = family(module)
    if layer_type is not None and layer_type.quantized is not None and isinstance(module, layer_type.quantized):
        captured = layer_type.captured(module, path)
        if captured is not layer_type.quantized:
            release_(module)
            adopt_(module, captured)


def _mark_input_(module: InputQuantizer, path: str) -> None:
    limits = module.range
    if limits is None:
        raise InputError(
            f"the input step of layer {module.name!r} is not set: call calibrate_(model, batches), or train for one "
            "batch, before the model is exported"
        )
    why = why_no_multiples(module)
    if why:
        raise InputError(
            f"the input of layer {module.name!r} is not rounded to multiples of a step, as other programs do it: {why}"
            "; quantize with another method, or keep a checkpoint (save_checkpoint)"
        )
    scale = positive(module.step.detach()).item()
    module.__class__ = _Input
    marked = cast(_Input, module)
    marked.path, marked.limits, marked.scale = path, limits, scale


def inputs_of(example: Any, batch: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with real tensors of a batch, for torch of two: one it takes for a constant."""
    if isinstance(example, Mapping):
        return (), {name: _repeated(value, batch) for name, value in example.items()}
    values = example if isinstance(example, tuple | list) else (example,)
    return tuple(_repeated(value, batch) for value in values), {}


def _repeated(value: Any, batch: int) -> Any:
    """The first sample again and again; one only described (device meta) gets zeros, or ones for indices and masks."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shape = (batch, *value.shape[1:])
    if value.device.type == "meta":
        fill = torch.zeros if value.is_floating_point() else torch.ones
        return fill(shape, dtype=value.dtype)
    return value.detach().cpu()[:1].expand(shape).contiguous()


def _names(outputs: Any) -> list[str]:
    """What to call the outputs: by their keys, or numbered."""
    if isinstance(outputs, Mapping):
        return [str(name) for name, value in outputs.items() if isinstance(value, Tensor)]
    if isinstance(outputs, tuple | list):
        return [f"output_{place}" for place in range(len(outputs))]
    return ["output"]


def _rename_outputs_(proto: Any, names: list[str]) -> None:
    """Call the graph's outputs so, unless one of the names, or of the outputs, is that of another value."""
    graph = proto.graph
    outputs = [value.name for value in graph.output]
    computed = {name for node in graph.node for name in node.output}
    given = {value.name for value in (*graph.input, *graph.initializer)}
    others = given | (computed - set(outputs))
    if len(names) != len(outputs) or not others.isdisjoint(names):
        return
    if not others.isdisjoint(outputs):  # an output that is an input: its name stays
        return
    new = dict(zip(outputs, names, strict=True))
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in graph.output:
        value.name = new[value.name]


def _batches_free(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    batch = torch.export.Dim("batch")

    def free(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.dim() else None

    if kwargs:
        return {name: free(value) for name, value in kwargs.items()}
    return tuple(free(value) for value in args)

"""qonnx: `Quant` nodes with the bit width as an input, for FINN and hls4ml.

Quant(v, scale, zero point, bits) = round(clip(v/scale, low, high))·scale, halves to even, is LSQ's own formula, so any
precision is kept as it is. A weight is stored as float values that lie on its grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name, content_of, onnx, parts
from bitplan.core.codes import code_bits
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import INPUT_QUANTIZER, OWN_WEIGHT, join_names, layer_of_quantizer
from bitplan.core.parsing import first_line
from bitplan.core.records import Plan
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.divergence import ActivationComparison
from bitplan.exporters.onnx_graph import Draft, Node, Weight, exporter_in, reading_plan
from bitplan.exporters.onnx_running import RunnableGraph

_NAME = "qonnx"
_DOMAIN = "qonnx.custom_op.general"
_OPSET = 18
_WEIGHT = ".weight_quant"


@final
@dataclass(frozen=True)
class Qonnx(Exporter):
    """ONNX with `Quant` nodes; hardware flows want a fixed batch, `batch=0` leaves it free."""

    batch: int = 1
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph, replace every quantizer by a Quant, check and write."""
        if self.batch < 0:
            raise InputError(f"the batch is a number of samples, or 0 for any, not {self.batch}")
        draft = Draft(source, _OPSET)
        draft.replace("Weight", lambda node, about: _quantize_weight(draft, draft.weights[about["layer"]], node))
        draft.replace("Quantize", lambda node, about: _quantize_input(draft, node, about))
        if self.batch:
            _fix_batch_(draft, self.batch)
        draft.proto.opset_import.append(onnx().helper.make_opsetid(_DOMAIN, 1))
        draft.save(source, path, exporter=_NAME)

    def read(self, path: Path) -> ReadBack:
        """Return the plan in the file, after checking every Quant against it, and the codes."""
        with reading_plan(path) as (proto, plan):
            tensors = {tensor.name: onnx().numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
            codes: dict[str, Tensor] = {}
            for node in proto.graph.node:
                if node.domain != _DOMAIN:
                    continue
                try:
                    scale, bits = tensors[node.input[1]], int(tensors[node.input[3]])
                except (KeyError, IndexError, TypeError):
                    raise FileError(f"{path}: the Quant {node.name!r} lacks a constant step or bit width") from None
                if node.name.endswith(_WEIGHT):
                    layer = node.name.removesuffix(_WEIGHT)
                    codes[layer] = _codes(tensors[node.input[0]], scale)
                _check_bits(plan, node.name, bits, path)
        return ReadBack(plan.precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for an ONNX file that names this exporter."""
        return exporter_in(path) == _NAME

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Run it by the qonnx package and compare every quantized activation."""
        return Execution(RunnableGraph(QuantSession(path)), ties=ActivationComparison(path, model, QuantSession))


def _codes(weight: np.ndarray, scale: np.ndarray) -> Tensor:
    """Return the codes of a weight; refuse a step that does not broadcast to its shape."""
    if np.broadcast_shapes(weight.shape, scale.shape) != weight.shape or not np.all(scale > 0):
        raise InputError("a step does not fit its weight, or is not positive")
    return torch.from_numpy(np.round(weight / scale).astype(np.int32))


def _quantize_weight(draft: Draft, weight: Weight, node: Node) -> list[Node]:
    if weight.layer in draft.written:
        return [draft.node("Identity", (draft.written[weight.layer],), node.output[0], node.name)]
    draft.written[weight.layer] = node.output[0]
    name = weight.layer
    values = draft.floats(join_names(name, OWN_WEIGHT), weight.codes * weight.steps)
    steps = weight.steps if weight.steps.numel() > 1 else weight.steps.flatten()[0]
    return [_quant_node(draft, values, node.output[0], f"{name}{_WEIGHT}", steps, weight.bits, signed=True)]


def _quantize_input(draft: Draft, node: Node, about: Mapping[str, Any]) -> list[Node]:
    bits = code_bits(about["low"], about["high"])
    name = draft.fresh(about["path"])  # a layer may run twice
    return [_quant_node(draft, node.input[0], node.output[0], name, about["scale"], bits, signed=about["low"] < 0)]


def _quant_node(draft: Draft, value: str, output: str, name: str, scale: Any, bits: int, *, signed: bool) -> Node:
    step = draft.floats(f"{name}.scale", scale)
    inputs = (value, step, draft.floats(f"{name}.zero", 0.0), draft.floats(f"{name}.bits", float(bits)))
    flags = {"signed": int(signed), "narrow": 0, "rounding_mode": "ROUND"}
    return draft.node("Quant", inputs, output, name, domain=_DOMAIN, **flags)


def _fix_batch_(draft: Draft, batch: int) -> None:
    """Fix the batch dimension of all inputs and outputs."""
    for value in (*draft.graph.input, *draft.graph.output):
        for place, size in enumerate(value.type.tensor_type.shape.dim):
            if not place and size.dim_param:
                size.dim_value = batch


def _check_bits(plan: Plan, name: str, bits: int, path: Path) -> None:
    """Raise if a Quant has other bits than the plan gives its layer."""
    of_weight, of_input = name.endswith(_WEIGHT), name.endswith(f".{INPUT_QUANTIZER}")
    layer = name.removesuffix(_WEIGHT) if of_weight else layer_of_quantizer(name) if of_input else None
    precision = plan.precisions.get(layer) if layer else None
    if precision is None:  # a product's operand, or a layer that runs once more
        return
    if bits != (precision.weight_bits if of_weight else precision.act_bits):
        raise FileError(f"{path}: {name} has {bits} bits, the plan says {precision}")


_STANDARD = ("", "ai.onnx")
_QUANT = ("qonnx.custom_op.general", "Quant")
_IR = 10  # qonnx writes every node under onnx's newest IR, which may be ahead of what ONNX Runtime reads


class QuantSession:
    """A model that the qonnx package executes; the same face as ONNX Runtime's `Session`.

    The dialect wants fixed shapes: those of a file are set to what it is given, and shapes are inferred again.
    """

    def __init__(self, model: bytes | Path) -> None:
        require("qonnx", "export", "running QONNX")
        self._content = content_of(model)
        proto = onnx().load_model_from_string(self._content)
        _refuse_foreign(proto, "this graph" if isinstance(model, bytes) else str(model))
        graph = proto.graph
        self.inputs: list[str] = [value.name for value in graph.input]
        self.outputs: list[str] = [value.name for value in graph.output]
        self._ready: tuple[dict[str, tuple[int, ...]], Any] | None = None

    def run(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return all outputs."""
        from qonnx.core.onnx_exec import execute_onnx

        named = by_name(inputs, self.inputs)
        shapes = {name: array.shape for name, array in named.items()}
        with _known_ir():
            try:
                outputs = execute_onnx(self._prepared(shapes), named)
            except Exception as error:  # it raises Exception itself
                raise FileError(f"qonnx cannot run this graph ({first_line(error, 200)})") from None
        return [outputs[name] for name in self.outputs]

    def _prepared(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        """Return the model with its inputs fixed to these shapes; the last one is kept."""
        if self._ready is not None:
            ready_shapes, ready_model = self._ready
            if ready_shapes == shapes:
                return ready_model
        from qonnx.core.modelwrapper import ModelWrapper
        from qonnx.transformation.fold_constants import FoldConstants
        from qonnx.transformation.infer_shapes import InferShapes

        proto = onnx().load_model_from_string(self._content)
        for value in proto.graph.input:
            for dimension, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dimension.dim_value = size
        for value in proto.graph.output:
            value.type.tensor_type.ClearField("shape")
        del proto.graph.value_info[:]
        model = ModelWrapper(proto)
        for change in (InferShapes(), FoldConstants(exclude_op_types=["Quant"]), InferShapes()):
            model = model.transform(change)
        self._ready = shapes, model
        return model


def _refuse_foreign(proto: Any, what: str) -> None:
    """Refuse nodes that are neither ONNX's own nor `Quant`.

    qonnx imports the Python module that the domain of a node names, and some nodes of its own read further files.
    """
    for node in parts(proto, onnx().NodeProto):
        if node.domain not in _STANDARD and (node.domain, node.op_type) != _QUANT:
            raise FileError(
                f"{what} has a node {node.op_type!r} of domain {node.domain!r}, which no QONNX export writes"
            )


@contextmanager
def _known_ir() -> Iterator[None]:
    library: Any = onnx()
    newest = library.IR_VERSION
    library.IR_VERSION = min(newest, _IR)
    try:
        yield
    finally:
        library.IR_VERSION = newest

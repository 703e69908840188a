"""qonnx: run an ONNX file with `Quant` nodes, node by node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name, content_of, onnx, parts
from bitplan.core.errors import FileError
from bitplan.core.parsing import first_line

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
        """All outputs."""
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
        """The model with its inputs fixed to these shapes; kept for as long as they stay the same."""
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

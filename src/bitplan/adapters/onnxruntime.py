"""ONNX Runtime: run an ONNX file on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name
from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import first_line


class Session:
    """A model that ONNX Runtime executes: arrays by input name → arrays in the order of its outputs."""

    name = "ONNX Runtime"

    def __init__(self, model: bytes | str | Path, *, threads: int | None = None, optimize: bool = True) -> None:
        require("onnxruntime", "export", "running ONNX")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        if threads is not None:
            options.intra_op_num_threads = threads
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        content, name = (model, "this graph") if isinstance(model, bytes) else (str(model), str(model))
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own kinds, which share no base
            raise FileError(f"ONNX Runtime cannot run {name} ({first_line(error, 200)})") from None
        self.inputs: list[str] = [value.name for value in self._session.get_inputs()]
        self.outputs: list[str] = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        """All outputs."""
        named = by_name(inputs, self.inputs)
        try:
            outputs: list[np.ndarray] = self._session.run(None, named)
        except Exception as error:  # of shapes or types that the graph does not take
            line = " ".join(str(error).split())[:200]
            raise InputError(f"ONNX Runtime cannot run the graph on these inputs ({line})") from None
        return outputs

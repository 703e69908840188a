"""OpenVINO: run an ONNX file on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name, content_of, onnx
from bitplan.core.errors import FileError, InputError


class OpenVinoSession:
    """A model that OpenVINO executes; the same face as ONNX Runtime's `Session`."""

    name = "OpenVINO"

    def __init__(self, model: bytes | Path, *, threads: int | None = None, profile: bool = False) -> None:
        require("openvino", "openvino", "running OpenVINO")
        import openvino

        content = content_of(model)
        what = "this graph" if isinstance(model, bytes) else str(model)
        graph = onnx().load_model_from_string(content).graph
        _refuse_narrow(graph, what)
        self.inputs: list[str] = [value.name for value in graph.input]
        self.outputs: list[str] = [value.name for value in graph.output]
        # Latency, not throughput: one request at a time. Floats stay float32, where a CPU would take bfloat16, or 8
        # bits of its own choice for the inputs of layers whose weights alone are quantized.
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "PERF_COUNT": profile,
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        try:
            core = openvino.Core()
            self._request = core.compile_model(core.read_model(content), "CPU", options).create_infer_request()
        except Exception as error:  # RuntimeError, with a trace of its own sources
            line = " ".join(str(error).split())[-200:]
            raise FileError(f"OpenVINO cannot run {what} ({line})") from None

    def run(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        """All outputs."""
        try:
            self._request.infer(by_name(inputs, self.inputs))
        except Exception as error:  # of shapes or types that the graph does not take
            line = " ".join(str(error).split())[-200:]
            raise InputError(f"OpenVINO cannot run the graph on these inputs ({line})") from None
        return [np.array(tensor.data) for tensor in self._request.output_tensors]

    def profiled(self) -> list[tuple[str, float]]:
        """The nodes of the last run, in the order in which they ran, and their seconds; opened with `profile`."""
        nodes = [node for node in self._request.profiling_info if node.status == node.Status.EXECUTED]
        return [(node.node_name, node.real_time.total_seconds()) for node in nodes]


def _refuse_narrow(graph: Any, what: str) -> None:
    """Refuse integers of 2 bits, of which OpenVINO only says that an element type is unknown."""
    narrow = [onnx().TensorProto.DataType.Value(name) for name in ("INT2", "UINT2")]
    found = [tensor.name for tensor in graph.initializer if tensor.data_type in narrow]
    if found:
        raise FileError(
            f"OpenVINO reads no integers of 2 bits, such as {found[0]} in {what}: export the model with --format "
            "openvino, which stores them in 4"
        )

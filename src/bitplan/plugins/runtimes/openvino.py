"""openvino: an ONNX file in the form that OpenVINO executes in integers, run by OpenVINO itself.

The file differs from `onnx` in what this runtime wants: 2 bits are stored in INT4 (it reads no INT2), signed
activations are INT8, and biases stay as they are, for its kernels add them in floats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from torch import nn

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name, content_of, onnx
from bitplan.core.codes import code_bits
from bitplan.core.errors import FileError, InputError
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.divergence import ActivationComparison
from bitplan.exporters.onnx_forms import (
    CLIP,
    DEQUANTIZE,
    clip_codes_,
    name_float_products,
    quantize_in_bytes_,
    read_back,
)
from bitplan.exporters.onnx_graph import Draft, Node, exporter_in
from bitplan.exporters.onnx_passes import fold_norms_
from bitplan.exporters.onnx_running import RunnableGraph
from bitplan.exporters.onnx_weights import dequantize_weights_, look_up_codes_
from bitplan.quant.lsq import FLOOR

_NAME = "openvino"
_OPSET = 21
_WIDTHS = (4, 8, 16)


@final
@dataclass(frozen=True)
class OpenVino(Exporter):
    """ONNX for OpenVINO: integer weights and activations that its integer kernels execute."""

    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph, rewrite it so that OpenVINO computes integers, check and write."""
        draft = Draft(source, _OPSET)
        fold_norms_(draft)
        name_float_products(draft, "OpenVINO", lacking=())
        dequantize_weights_(draft, _WIDTHS, cast=True)
        _round_in_floats_(draft)
        quantize_in_bytes_(draft, _WIDTHS, unsigned=False)
        clip_codes_(draft, idle_only=True)  # one of attention scores would hide what `_add_nothing_` looks for
        _add_nothing_(draft)
        look_up_codes_(draft)
        draft.save(source, path, exporter=_NAME)
        OpenVinoSession(path)  # refuses here what it cannot run

    def read(self, path: Path) -> ReadBack:
        """Return the plan in the file, after checking the graph against it, and the codes."""
        return read_back(path)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for an ONNX file that names this exporter."""
        return exporter_in(path) == _NAME

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Run it by OpenVINO and compare every quantized activation."""
        return Execution(
            RunnableGraph(OpenVinoSession(path)),
            ties=ActivationComparison(path, model, OpenVinoSession),
            runtime=OpenVinoSession,
        )


def _round_in_floats_(draft: Draft) -> None:
    """Quantize by float operations where OpenVINO 2026.4 silently computes something else.

    These are activations of more than 8 bits, and those that are only added: OpenVINO fuses a convolution, the
    addition behind it and the next quantizer into one kernel that lacks the quantizer of the other operand.
    """

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        readers, bits = draft.readers(node.output[0]), code_bits(about["low"], about["high"])
        is_added = not draft.is_output(node.output[0]) and all(reader.op_type == "Add" for reader in readers)
        if bits <= 8 and not is_added:
            return [node]
        path = draft.fresh(about["path"])  # a layer may run twice
        step = draft.floats(f"{path}.step", about["scale"])
        low, high = (draft.floats(f"{path}.{end}", about[end]) for end in ("low", "high"))
        ratios, whole, codes = (draft.fresh(f"{path}.{name}") for name in ("ratios", "whole", "codes"))
        return [
            draft.node("Div", (node.input[0], step), ratios, f"{path}.divide"),
            draft.node("Round", (ratios,), whole, f"{path}.round"),
            draft.node("Clip", (whole, low, high), codes, f"{path}{CLIP}"),
            draft.node("Mul", (codes, step), node.output[0], f"{path}{DEQUANTIZE}"),
        ]

    draft.replace("Quantize", rewrite)


def _add_nothing_(draft: Draft) -> None:
    """Add a tiny number, which changes no sum, to products without a bias that a quantizer and another node read.

    OpenVINO 2026.4 multiplies an integer sum by both steps when it is read. If two nodes read it and nothing was added,
    it multiplies twice. An added zero would be removed.
    """
    makers = draft.makers()
    values = [node.input[0] for node in draft.graph.node if node.op_type == "QuantizeLinear"]
    shared = {value for value in values if len(draft.readers(value)) > 1 or draft.is_output(value)}
    products = [_bare_product(draft, value, makers) for value in shared]
    bare = {node.name for node in products if node is not None}

    def rewrite(node: Node) -> list[Node]:
        if node.name not in bare:
            return [node]
        output, before = node.output[0], draft.fresh(f"{node.output[0]}.before")
        node.output[0] = before
        return [node, draft.node("Add", (before, draft.floats("nothing", FLOOR)), output, f"{node.name}.nothing")]

    draft.rebuild(rewrite)


def _bare_product(draft: Draft, value: str, makers: Mapping[str, Node]) -> Node | None:
    """Return the product of quantized values that a value comes from with nothing added, or None."""
    node = makers.get(value)
    while node is not None:
        if any(name in makers and makers[name].op_type == "DequantizeLinear" for name in node.input[:2]):
            biased = len(node.input) > 2 and np.any(draft.array(node.input[2]))
            return None if biased else node
        computed = [name for name in node.input if name and draft.array(name) is None]
        if node.op_type == "Add" or len(computed) != 1:
            return None
        node = makers.get(computed[0])
    return None


class OpenVinoSession:
    """A model that OpenVINO executes on the CPU, with the interface of ONNX Runtime's `Session`."""

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
        """Return all outputs."""
        try:
            self._request.infer(by_name(inputs, self.inputs))
        except Exception as error:  # of shapes or types that the graph does not take
            line = " ".join(str(error).split())[-200:]
            raise InputError(f"OpenVINO cannot run the graph on these inputs ({line})") from None
        return [np.array(tensor.data) for tensor in self._request.output_tensors]

    def profiled(self) -> list[tuple[str, float]]:
        """Return the nodes of the last run in their order with their seconds; needs `profile`."""
        nodes = [node for node in self._request.profiling_info if node.status == node.Status.EXECUTED]
        return [(node.node_name, node.real_time.total_seconds()) for node in nodes]


def _refuse_narrow(graph: Any, what: str) -> None:
    """Refuse integers of 2 bits: OpenVINO would only say that an element type is unknown."""
    narrow = [onnx().TensorProto.DataType.Value(name) for name in ("INT2", "UINT2")]
    found = [tensor.name for tensor in graph.initializer if tensor.data_type in narrow]
    if found:
        raise FileError(
            f"OpenVINO reads no integers of 2 bits, such as {found[0]} in {what}: export the model with --format "
            "openvino, which stores them in 4"
        )

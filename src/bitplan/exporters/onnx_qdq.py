"""onnx: QuantizeLinear and DequantizeLinear around every quantized tensor, the weights stored as packed integers.

The ranges of INT2, UINT2, INT4, UINT4, INT8 and UINT8 are LSQ's grids exactly, with zero point 0 and rounding half to
even; a precision between them takes the next wider type, clipped before it, so codes and values stay the same. ONNX
Runtime 1.31 fails on a Clip before a type of fewer than 8 bits, so clipping is written as Max and Min; and on zero
points where it moves a Transpose, so the type is said by `output_dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from bitplan.adapters.onnx import onnx
from bitplan.adapters.onnxruntime import Session
from bitplan.core.codes import code_bits, code_range
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import INPUT_QUANTIZER, layer_of_quantizer
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.divergence import Taps
from bitplan.exporters.folding import fold_norms_
from bitplan.exporters.onnx_graph import (
    Draft,
    Node,
    Weight,
    dialect_of,
    is_ours,
    read_codes,
    read_plan,
    type_number,
    width_of,
)
from bitplan.exporters.onnx_running import Executed

_NAME = "onnx"
_WIDTHS = {25: (2, 4, 8, 16), 21: (4, 8, 16)}  # opset → the integers it can store
CODES = ".codes"


@final
@dataclass(frozen=True)
class Onnx(Exporter):
    """ONNX with integer weights and activations; `opset` 21 stores 2 bits in 4, `fold` takes batch norms into steps."""

    opset: int = 25
    fold: bool = False
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def __post_init__(self) -> None:
        if self.opset not in _WIDTHS:
            raise InputError(f"the opset is 25 (2-bit integers) or 21 (for older runtimes), not {self.opset}")

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph, say it in ONNX's words, check and write."""
        draft = Draft(source, self.opset)
        widths = _WIDTHS[self.opset]
        if self.fold:
            fold_norms_(draft)
        _part_biases_(draft)
        draft.replace("Weight", lambda node, about: dequantized(draft, draft.weights[about["layer"]], node, widths))
        draft.replace("Quantize", lambda node, about: _quantized(draft, node, about, widths))
        _look_up_codes_(draft)
        _open_clips_(draft)
        draft.save(source, path, exporter=_NAME)

    def read(self, path: Path) -> ReadBack:
        """The plan in the file, after checking the graph against it, and the codes."""
        proto, plan = read_plan(path)
        codes = stored_codes(proto, plan, path)
        for quantizer, bits in _input_ranges(proto).items():
            layer = layer_of_quantizer(quantizer) if quantizer.endswith(f".{INPUT_QUANTIZER}") else None
            precision = plan.precisions.get(layer) if layer else None
            if precision is not None and bits != precision.act_bits:
                raise FileError(f"{path}: the input of {layer!r} has {bits} bits, the plan says {precision}")
        return ReadBack(plan.precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """An ONNX file that says so, or that says nothing and has no operator of another dialect."""
        found = dialect_of(path)
        plain = found is not None and found.operators.isdisjoint({"Quant", "MatMulNBits"})
        return found is not None and found.is_for(_NAME, otherwise=plain)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """By ONNX Runtime, every quantized activation tapped."""
        return Execution(Executed(Session(path)), ties=Taps(path, model, Session))


def dequantized(draft: Draft, weight: Weight, node: Node, widths: tuple[int, ...]) -> list[Node]:
    """DequantizeLinear of stored codes, in the place of a weight; steps per channel along one axis."""
    if weight.layer in draft.written:
        return [draft.node("Identity", (draft.written[weight.layer],), node.output[0], node.name)]
    draft.written[weight.layer] = node.output[0]
    width = storage(weight.bits, widths, weight.layer)
    codes = draft.codes(weight.layer + CODES, weight.codes, width)
    name, output = weight.layer, node.output[0]
    steps = weight.steps
    varying = [axis for axis, size in enumerate(steps.shape) if size > 1]
    if len(varying) < 2:
        axis: dict[str, Any] = {"axis": varying[0]} if varying else {}
        scale = draft.floats(f"{name}.step", steps.flatten() if varying else steps.flatten()[0])
        return [draft.node("DequantizeLinear", (codes, scale), output, f"{name}.dequantize", **axis)]
    one, scale = draft.floats("one", 1.0), draft.floats(f"{name}.step", steps)
    whole = draft.fresh(f"{name}.whole")
    return [
        draft.node("DequantizeLinear", (codes, one), whole, f"{name}.dequantize"),
        draft.node("Mul", (whole, scale), output, f"{name}.scale"),
    ]


def storage(bits: int, widths: tuple[int, ...], layer: str) -> int:
    """The narrowest type that holds codes of so many bits."""
    fitting = [width for width in widths if width >= bits]
    if not fitting:
        raise InputError(f"layer {layer!r} has {bits} bits, and this target stores at most {widths[-1]}")
    return fitting[0]


def _quantized(draft: Draft, node: Node, about: Mapping[str, Any], widths: tuple[int, ...]) -> list[Node]:
    """QuantizeLinear and DequantizeLinear in the place of an input quantizer."""
    low, high, step = about["low"], about["high"], torch.tensor(about["scale"])
    bits = code_bits(low, high)
    width = storage(bits, widths, about["path"])
    path = draft.fresh(about["path"])  # a layer may run twice
    value, nodes = node.input[0], []
    scale = draft.floats(f"{path}.step", step)
    if width != bits:
        least, most = draft.floats(f"{path}.low", step * low), draft.floats(f"{path}.high", step * high)
        raised, clipped = draft.fresh(f"{path}.raised"), draft.fresh(f"{path}.clipped")
        nodes.append(draft.node("Max", (value, least), raised, f"{path}.raise"))
        nodes.append(draft.node("Min", (raised, most), clipped, f"{path}.clip"))
        value = clipped
    kind, codes = type_number(f"{'INT' if low else 'UINT'}{width}"), draft.fresh(f"{path}.codes")
    return [
        *nodes,
        draft.node("QuantizeLinear", (value, scale), codes, f"{path}.quantize", output_dtype=kind),
        draft.node("DequantizeLinear", (codes, scale), node.output[0], f"{path}.dequantize"),
    ]


def _part_biases_(draft: Draft) -> None:
    """Add the biases of quantized layers in nodes of their own.

    ONNX Runtime makes one integer operation of a layer between two quantizers, and rounds a bias inside it to a
    multiple of both steps: with few bits, far from the bias.
    """
    weights = {node.output[0] for node in draft.graph.node if is_ours(node, "Weight")}
    weights |= {node.output[0] for node in draft.graph.node if node.op_type == "Transpose" and node.input[0] in weights}

    def rewrite(node: Node) -> list[Node]:
        layered = node.op_type in ("Conv", "ConvTranspose", "Gemm") and node.input[1] in weights
        bias = draft.array(node.input[2]) if layered and len(node.input) > 2 else None
        if bias is None or draft.attributes(node).get("beta", 1.0) != 1.0:
            return [node]
        spatial = 0 if node.op_type == "Gemm" else len(draft.attributes(node)["kernel_shape"])
        added = draft.floats(f"{node.input[2]}.parted", bias.reshape(*bias.shape, *[1] * spatial))
        output, before = node.output[0], draft.fresh(f"{node.name}.unbiased")
        node.input[:] = node.input[:2]
        node.output[0] = before
        return [node, draft.node("Add", (before, added), output, f"{node.name}.bias")]

    draft.rebuild(rewrite)


def _look_up_codes_(draft: Draft) -> None:
    """Let an embedding of 8 bits look up codes and dequantize those, not its whole table (runtimes gather no fewer)."""
    tensors = {tensor.name: tensor for tensor in draft.graph.initializer}
    tables: dict[str, Node] = {}
    for node in draft.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in tensors:
            codes, scale = (tensors[name] for name in node.input[:2])
            readers = draft.readers(node.output[0])
            alone = len(readers) == 1 and readers[0].op_type == "Gather" and readers[0].input[0] == node.output[0]
            if alone and not scale.dims and width_of(codes.data_type) >= 8 and not draft.attributes(readers[0])["axis"]:
                tables[node.output[0]] = node

    def rewrite(node: Node) -> list[Node]:
        if node.op_type == "DequantizeLinear" and node.output[0] in tables:
            return []
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None:
            return [node]
        rows = draft.fresh(f"{table.name}.rows")
        look_up = draft.node("Gather", (table.input[0], node.input[1]), rows, node.name, axis=0)
        return [look_up, draft.node("DequantizeLinear", (rows, table.input[1]), node.output[0], table.name)]

    draft.rebuild(rewrite)


def _open_clips_(draft: Draft) -> None:
    """Write the model's own Clip (a ReLU6) as Max and Min where it comes before a narrow type."""
    quantizes = [node for node in draft.graph.node if node.op_type == "QuantizeLinear"]
    narrow = {node.input[0] for node in quantizes if width_of(draft.attributes(node)["output_dtype"]) != 8}

    def rewrite(node: Node) -> list[Node]:
        if node.op_type != "Clip" or node.output[0] not in narrow:
            return [node]
        value, *ends = node.input
        bounds = [(kind, end) for kind, end in zip(("Max", "Min"), ends, strict=False) if end]
        nodes = []
        for place, (kind, end) in enumerate(bounds):
            output = node.output[0] if place == len(bounds) - 1 else draft.fresh(f"{node.name}.{kind}")
            nodes.append(draft.node(kind, (value, end), output, f"{node.name}.{kind}"))
            value = output
        return nodes

    draft.rebuild(rewrite)


def stored_codes(proto: Any, plan: Plan, path: Path) -> dict[str, Tensor]:
    """The codes of every layer, checked against the range that the plan gives them."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    found: dict[str, Tensor] = {}
    for layer, precision in plan.precisions.items():
        tensor = tensors.get(layer + CODES)
        if tensor is None:
            continue
        codes = read_codes(tensor)
        check_range(codes, layer, precision, path)
        found[layer] = codes
    return found


def check_range(codes: Tensor, layer: str, precision: Precision, path: Path) -> None:
    """Raise if a code is outside the range of the layer's precision."""
    low, high = code_range(precision.weight_bits)
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise FileError(f"{path}: layer {layer!r} has codes beyond {precision.weight_bits} bits, as the plan says")


def _input_ranges(proto: Any) -> dict[str, int]:
    """The bits of each input quantizer by its path: those of its type, or of the Clip before it."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    makers = {output: node for node in proto.graph.node for output in node.output}
    to_array = onnx().numpy_helper.to_array
    found: dict[str, int] = {}
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        kinds = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
        bits, before = width_of(*kinds), makers.get(node.input[0])
        if before is not None and before.name == f"{node.name.removesuffix('.quantize')}.clip":
            ends = before.input[1], makers[before.input[0]].input[1]
            high, low, step = (float(to_array(tensors[name])) for name in (*ends, node.input[1]))
            bits = code_bits(0, round(high / step - low / step))
        found[node.name.removesuffix(".quantize")] = bits
    return found

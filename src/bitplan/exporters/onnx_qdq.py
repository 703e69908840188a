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

import numpy as np
import torch
from torch import Tensor, nn

from bitplan.adapters.onnx import onnx
from bitplan.adapters.onnxruntime import Session
from bitplan.core.codes import code_bits
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import INPUT_QUANTIZER, layer_of_quantizer
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.divergence import Taps
from bitplan.exporters.folding import fold_norms_
from bitplan.exporters.onnx_graph import Draft, Node, dialect_of, is_ours, read_plan, type_number, width_of
from bitplan.exporters.onnx_running import Executed
from bitplan.exporters.onnx_weights import dequantize_weights_, storage, stored_codes

_NAME = "onnx"
_WIDTHS = {25: (2, 4, 8, 16), 21: (4, 8, 16)}  # opset → the integers it can store
_QUANTIZE, _CLIP = ".quantize", ".clip"  # end the names of an input quantizer's nodes, which begin with its path


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
        if self.fold:
            fold_norms_(draft)
        _say_in_pairs_(draft, _WIDTHS[self.opset])
        draft.save(source, path, exporter=_NAME)

    def read(self, path: Path) -> ReadBack:
        """The plan in the file, after checking the graph against it, and the codes."""
        proto, plan = read_plan(path)
        codes = stored_codes(proto, plan, path)
        for quantizer, bits in _input_bits(proto).items():
            if not quantizer.endswith(f".{INPUT_QUANTIZER}"):  # one of a product's, whose scores have bits of their own
                continue
            layer = layer_of_quantizer(quantizer)
            precision = plan.precisions.get(layer) if layer else None
            if precision is not None and bits != precision.act_bits:
                raise FileError(f"{path}: the input of {layer!r} has {bits} bits, the plan says {precision}")
        return ReadBack(plan.precisions, codes)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """An ONNX file that says so, or that says nothing and has no operator of another dialect."""
        dialect = dialect_of(path)
        if dialect is None:
            return False
        plain = dialect.operators.isdisjoint({"Quant", "MatMulNBits"})
        return dialect.is_for(_NAME, otherwise=plain)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """By ONNX Runtime, every quantized activation tapped."""
        return Execution(Executed(Session(path)), ties=Taps(path, model, Session))


def _say_in_pairs_(draft: Draft, widths: tuple[int, ...]) -> None:
    """The passes that make a captured graph this form of the file; another form is another list of passes."""
    _part_biases_(draft)
    dequantize_weights_(draft, widths)
    draft.replace("Quantize", lambda node, about: _quantized(draft, node, about, widths))
    _look_up_codes_(draft)
    _open_clips_(draft)


def _quantized(draft: Draft, node: Node, about: Mapping[str, Any], widths: tuple[int, ...]) -> list[Node]:
    """QuantizeLinear and DequantizeLinear in the place of an input quantizer, clipped first where the type is wider."""
    low, high, step = about["low"], about["high"], torch.tensor(about["scale"])
    bits = code_bits(low, high)
    width = storage(bits, widths, about["path"])
    path = draft.fresh(about["path"])  # a layer may run twice
    value = node.input[0]
    scale = draft.floats(f"{path}.step", step)
    clips: list[Node] = []
    if width != bits:
        clips = _clipped(draft, value, step * low, step * high, path)
        value = clips[-1].output[0]
    signed = low < 0
    number = type_number(f"INT{width}" if signed else f"UINT{width}")
    codes = draft.fresh(f"{path}.codes")
    return [
        *clips,
        draft.node("QuantizeLinear", (value, scale), codes, f"{path}{_QUANTIZE}", output_dtype=number),
        draft.node("DequantizeLinear", (codes, scale), node.output[0], f"{path}.dequantize"),
    ]


def _clipped(draft: Draft, value: str, low: Tensor, high: Tensor, path: str) -> list[Node]:
    """Max and Min that keep a value within the range of a quantizer."""
    least, most = draft.floats(f"{path}.low", low), draft.floats(f"{path}.high", high)
    raised, clipped = draft.fresh(f"{path}.raised"), draft.fresh(f"{path}.clipped")
    return [
        draft.node("Max", (value, least), raised, f"{path}.raise"),
        draft.node("Min", (raised, most), clipped, f"{path}{_CLIP}"),
    ]


def _part_biases_(draft: Draft) -> None:
    """Add the biases of quantized layers in nodes of their own.

    ONNX Runtime makes one integer operation of a layer between two quantizers, and rounds a bias inside it to a
    multiple of both steps: with few bits, far from the bias.
    """
    weights = _weight_values(draft)

    def rewrite(node: Node) -> list[Node]:
        bias = _bias_of(draft, node, weights)
        if bias is None:
            return [node]
        added = draft.floats(f"{node.input[2]}.parted", bias)
        output, before = node.output[0], draft.fresh(f"{node.name}.unbiased")
        node.input[:] = node.input[:2]
        node.output[0] = before
        return [node, draft.node("Add", (before, added), output, f"{node.name}.bias")]

    draft.rebuild(rewrite)


def _weight_values(draft: Draft) -> set[str]:
    """The values that are quantized weights, as they are stored or transposed."""
    stored = {node.output[0] for node in draft.graph.node if is_ours(node, "Weight")}
    transposes = [node for node in draft.graph.node if node.op_type == "Transpose"]
    return stored | {node.output[0] for node in transposes if node.input[0] in stored}


def _bias_of(draft: Draft, node: Node, weights: set[str]) -> np.ndarray | None:
    """The bias of a quantized layer in the shape that adds it to an output, (channels, 1, …); None: there is none."""
    is_layer = node.op_type in ("Conv", "ConvTranspose", "Gemm") and node.input[1] in weights
    if not is_layer or len(node.input) < 3:
        return None
    bias, about = draft.array(node.input[2]), draft.attributes(node)
    if bias is None or about.get("beta", 1.0) != 1.0:  # computed as the model runs, or scaled by Gemm
        return None
    spatial = 0 if node.op_type == "Gemm" else len(about["kernel_shape"])
    return bias.reshape(*bias.shape, *[1] * spatial)


def _look_up_codes_(draft: Draft) -> None:
    """Let an embedding of 8 bits look up codes and dequantize those, not its whole table (runtimes gather no fewer)."""
    tables = _tables_to_look_up(draft)

    def rewrite(node: Node) -> list[Node]:
        if node.op_type == "DequantizeLinear" and node.output[0] in tables:
            return []
        if node.op_type != "Gather" or node.input[0] not in tables:
            return [node]
        table, indices = tables[node.input[0]], node.input[1]
        codes, scale = table.input[:2]
        rows = draft.fresh(f"{table.name}.rows")
        return [
            draft.node("Gather", (codes, indices), rows, node.name, axis=0),
            draft.node("DequantizeLinear", (rows, scale), node.output[0], table.name),
        ]

    draft.rebuild(rewrite)


def _tables_to_look_up(draft: Draft) -> dict[str, Node]:
    """The DequantizeLinear of each table that one Gather reads by rows, by its output; all rows share a step."""
    tensors = {tensor.name: tensor for tensor in draft.graph.initializer}
    tables: dict[str, Node] = {}
    for node in draft.graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] not in tensors:
            continue
        table, (codes, scale) = node.output[0], (tensors[name] for name in node.input[:2])
        readers = draft.readers(table)
        if len(readers) != 1 or readers[0].op_type != "Gather" or readers[0].input[0] != table:
            continue
        by_rows = draft.attributes(readers[0]).get("axis", 0) == 0
        if by_rows and not scale.dims and width_of(codes.data_type) >= 8:
            tables[table] = node
    return tables


def _open_clips_(draft: Draft) -> None:
    """Write the model's own Clip (a ReLU6) as Max and Min where it comes before a narrow type."""
    quantizes = [node for node in draft.graph.node if node.op_type == "QuantizeLinear"]
    narrow = {node.input[0] for node in quantizes if width_of(draft.attributes(node)["output_dtype"]) != 8}

    def rewrite(node: Node) -> list[Node]:
        if node.op_type != "Clip" or node.output[0] not in narrow:
            return [node]
        value, *bounds = node.input
        given = [(kind, bound) for kind, bound in zip(("Max", "Min"), bounds, strict=False) if bound]  # "": no bound
        nodes = []
        for place, (kind, bound) in enumerate(given):
            is_last = place == len(given) - 1
            output = node.output[0] if is_last else draft.fresh(f"{node.name}.{kind}")
            nodes.append(draft.node(kind, (value, bound), output, f"{node.name}.{kind}"))
            value = output
        return nodes

    draft.rebuild(rewrite)


def _input_bits(proto: Any) -> dict[str, int]:
    """The bits of each input quantizer by its path: those of its type, or of the range that it is clipped to before."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    makers = {output: node for node in proto.graph.node for output in node.output}

    def number(name: str) -> float:
        return float(onnx().numpy_helper.to_array(tensors[name]))

    bits: dict[str, int] = {}
    for node in proto.graph.node:
        if node.op_type != "QuantizeLinear":
            continue
        path, (value, step) = node.name.removesuffix(_QUANTIZE), node.input[:2]
        minimum = makers.get(value)
        if minimum is not None and minimum.name == f"{path}{_CLIP}":
            raised, most = minimum.input
            least = makers[raised].input[1]
            bits[path] = code_bits(0, round(number(most) / number(step) - number(least) / number(step)))
        else:
            types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
            bits[path] = width_of(*types)
    return bits

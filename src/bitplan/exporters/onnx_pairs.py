"""The form of an ONNX file that keeps the narrow types: each activation in the integer type that its bits name.

The ranges of INT2, UINT2, INT4, UINT4, INT8 and UINT8 are LSQ's grids exactly, with zero point 0 and rounding half to
even; a precision between them takes the next wider type, clipped before it, so codes and values stay the same. ONNX
Runtime 1.31 fails on a Clip before a type of fewer than 8 bits, so clipping is written as Max and Min; and on zero
points where it moves a Transpose, so the type is said by `output_dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitplan.core.codes import code_bits
from bitplan.exporters.onnx_graph import Draft, Node, type_number, width_of
from bitplan.exporters.onnx_weights import storage

QUANTIZE, CLIP, DEQUANTIZE = ".quantize", ".clip", ".dequantize"
"""End the names of an input quantizer's nodes, which begin with its path."""


def quantize_in_pairs_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Put QuantizeLinear and DequantizeLinear in the place of every input quantizer."""
    beside = _beside_bytes(draft)
    wider = tuple(width for width in widths if width > 2)

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        return quantized_in_pairs(draft, node, about, wider if node.output[0] in beside else widths)

    draft.replace("Quantize", rewrite)


def _beside_bytes(draft: Draft) -> set[str]:
    """What is multiplied by a matrix of bytes: of 2 bits ONNX Runtime 1.31 then makes an operation that it lacks."""
    types = {tensor.name: tensor.data_type for tensor in draft.graph.initializer}
    makers = draft.makers()
    found = set()
    for node in draft.graph.node:
        weight = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.op_type == "Transpose":
            weight = makers.get(weight.input[0])
        if (
            weight is not None
            and weight.op_type == "DequantizeLinear"
            and types[weight.input[0]] == type_number("INT8")
        ):
            found.add(node.input[0])
    return found


def quantized_in_pairs(draft: Draft, node: Node, about: Mapping[str, Any], widths: tuple[int, ...]) -> list[Node]:
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
        draft.node("QuantizeLinear", (value, scale), codes, f"{path}{QUANTIZE}", output_dtype=number),
        draft.node("DequantizeLinear", (codes, scale), node.output[0], f"{path}{DEQUANTIZE}"),
    ]


def _clipped(draft: Draft, value: str, low: Tensor, high: Tensor, path: str) -> list[Node]:
    """Max and Min that keep a value within the range of a quantizer."""
    least, most = draft.floats(f"{path}.low", low), draft.floats(f"{path}.high", high)
    raised, clipped = draft.fresh(f"{path}.raised"), draft.fresh(f"{path}.clipped")
    return [
        draft.node("Max", (value, least), raised, f"{path}.raise"),
        draft.node("Min", (raised, most), clipped, f"{path}{CLIP}"),
    ]


def open_clips_(draft: Draft) -> None:
    """Write the model's own Clip (a ReLU6) as Max and Min where it comes before a narrow type."""
    quantizes = [(node, draft.attributes(node)) for node in draft.graph.node if node.op_type == "QuantizeLinear"]
    typed = [(node.input[0], about["output_dtype"]) for node, about in quantizes if "output_dtype" in about]
    narrow = {value for value, number in typed if width_of(number) != 8}

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

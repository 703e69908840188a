"""What a file of QuantizeLinear and DequantizeLinear says, in either form: precisions and codes, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitplan.adapters.onnx import onnx
from bitplan.core.codes import code_bits
from bitplan.core.errors import FileError
from bitplan.core.naming import INPUT_QUANTIZER, layer_of_quantizer
from bitplan.core.records import Plan
from bitplan.exporters.base import ReadBack
from bitplan.exporters.onnx_graph import Node, reading_plan, width_of
from bitplan.exporters.onnx_pairs import CLIP, DEQUANTIZE, QUANTIZE
from bitplan.exporters.onnx_weights import stored_codes


def read_back(path: Path) -> ReadBack:
    """The plan in a file, after checking the graph against it, and the codes."""
    with reading_plan(path) as (proto, plan):
        codes = stored_codes(proto, plan, path)
        for quantizer, bits in _input_bits(proto).items():
            _check_bits(path, plan, quantizer, bits)
    return ReadBack(plan.precisions, codes)


def _check_bits(path: Path, plan: Plan, quantizer: str, bits: int) -> None:
    if not quantizer.endswith(f".{INPUT_QUANTIZER}"):  # one of a product's, whose scores have bits of their own
        return
    layer = layer_of_quantizer(quantizer)
    precision = plan.precisions.get(layer) if layer else None
    if precision is not None and bits != precision.act_bits:
        raise FileError(f"{path}: the input of {layer!r} has {bits} bits, the plan says {precision}")


def _input_bits(proto: Any) -> dict[str, int]:
    """The bits of each input quantizer by its path: of the range that it is clipped to, or of its type."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = {node.name: node for node in proto.graph.node}
    makers = {output: node for node in proto.graph.node for output in node.output}

    def number(name: str) -> float:
        return float(onnx().numpy_helper.to_array(tensors[name]))

    def width(node: Node) -> int:
        types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
        return width_of(types[0] if types else tensors[node.input[2]].data_type)

    bits: dict[str, int] = {}
    for node in proto.graph.node:
        if node.op_type == "Mul" and node.name.endswith(DEQUANTIZE):  # of codes that are floats
            path = node.name.removesuffix(DEQUANTIZE)
            _, least, most = nodes[f"{path}{CLIP}"].input
            bits[path] = code_bits(0, round(number(most) - number(least)))
        if node.op_type != "QuantizeLinear" or not node.name.endswith(QUANTIZE):
            continue
        path = node.name.removesuffix(QUANTIZE)
        clip = nodes.get(f"{path}{CLIP}")
        if clip is None:
            bits[path] = width(node)
        elif clip.op_type == "Clip":  # of codes
            _, least, most = map(str, clip.input)
            bits[path] = code_bits(0, round(number(most) - number(least)))
        else:  # the second of Max and Min, which clip values
            raised, most = clip.input
            least, step = makers[raised].input[1], number(node.input[1])
            bits[path] = code_bits(0, round(number(most) / step - number(least) / step))
    return bits

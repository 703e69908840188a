"""1×1 convolutions as products of matrices, where ONNX Runtime would compute the convolution in floats.

It computes a convolution in integers only between two quantizers and with a bias that is a multiple of both steps, a
product of matrices in any case. A 1×1 convolution is such a product, with the channels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bitplan.exporters.onnx_biases import bias_fits, weight_values
from bitplan.exporters.onnx_graph import Draft, Node, is_ours

_ELEMENTWISE = ("Relu", "Clip", "MaxPool")  # are computed on codes, so a quantizer behind them is as good


def multiply_points_(draft: Draft) -> None:
    """Put products of matrices in the place of 1×1 convolutions that would be computed in floats."""
    makers, weights = draft.makers(), weight_values(draft)
    found: dict[str, str] = {}  # a convolution by name → its layer
    for node in draft.graph.node:
        layer = weights.get(node.input[1]) if node.op_type == "Conv" else None
        if layer is None or not _is_point(draft, node) or not _is_quantized(draft, node, layer, makers):
            continue
        if not _is_read_as_codes(draft, node) or not bias_fits(draft, node, makers, weights):
            found[node.name] = layer
    for layer in found.values():
        draft.weights[layer] = replace(draft.weights[layer], as_matrix=True)
    draft.rebuild(lambda node: _product(draft, node) if node.name in found else [node])


def _is_point(draft: Draft, node: Node) -> bool:
    """A convolution of single points, all of them, each channel with each."""
    about = draft.attributes(node)
    alone = len(draft.readers(node.input[1])) == 1  # its weight is laid out for it
    plain = about.get("group", 1) == 1 and not any(about.get("pads", ())) and set(about.get("strides", (1,))) == {1}
    whole = len(node.input) < 3 or draft.array(node.input[2]) is not None
    return bool(alone and plain and whole and list(about["kernel_shape"]) == [1, 1])


def _is_quantized(draft: Draft, node: Node, layer: str, makers: Mapping[str, Node]) -> bool:
    quantizer = makers.get(node.input[0])
    if quantizer is None or not is_ours(quantizer, "Quantize") or draft.weights[layer].bits > 8:
        return False
    about = draft.attributes(quantizer)
    return bool(about["high"] - about["low"] < 256)


def _is_read_as_codes(draft: Draft, node: Node) -> bool:
    """Whether one quantizer, and nothing else, reads what a convolution makes."""
    value = node.output[0]
    while True:
        readers = draft.readers(value)
        if len(readers) != 1 or draft.is_output(value):
            return False
        if is_ours(readers[0], "Quantize"):
            return True
        if readers[0].op_type not in _ELEMENTWISE:
            return False
        value = readers[0].output[0]


def _product(draft: Draft, node: Node) -> list[Node]:
    """(B, C, H, W) → (B, H, W, C), times the weight (C, N), plus the bias, and back."""
    path, bias = node.name, draft.array(node.input[2]) if len(node.input) > 2 else None
    points, sums = draft.fresh(f"{path}.points"), draft.fresh(f"{path}.sums")
    nodes = [
        draft.node("Transpose", (node.input[0],), points, f"{path}.channels_last", perm=[0, 2, 3, 1]),
        draft.node("MatMul", (points, node.input[1]), sums, f"{path}.product"),
    ]
    if bias is not None:
        shifted, row = draft.fresh(f"{path}.shifted"), draft.floats(f"{path}.row", np.reshape(bias, (1, 1, -1)))
        nodes.append(draft.node("Add", (sums, row), shifted, f"{path}.bias"))
        sums = shifted
    return [*nodes, draft.node("Transpose", (sums,), node.output[0], f"{path}.channels_first", perm=[0, 3, 1, 2])]

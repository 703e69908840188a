"""Biases of quantized layers in an ONNX file: where they may stand so that no runtime changes them.

ONNX Runtime makes one integer operation of a layer between two quantizers, and rounds a bias inside it to a multiple
of both steps: with few bits, far from the bias. So a bias is added in a node of its own, unless it is such a multiple.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bitplan.exporters.onnx_graph import Draft, Node, is_ours

_OFF = 2.0**-8  # of a grid's distance: what float32 leaves of a multiple with thousands of them
_MOST = 2**30  # leaves room for the sum that the bias is added to


def part_biases_(draft: Draft) -> None:
    """Add the biases of quantized layers in nodes of their own."""
    _rewrite_(draft, whole=False)


def place_biases_(draft: Draft) -> list[str]:
    """Put biases that are multiples of both steps inside convolutions, as integers, and add all others in nodes.

    A linear layer's bias is never inside: its product takes integers without it, and of MatMul and a bias (N) ONNX
    Runtime makes one operation in floats, of a bias (1, 1, N) it does not. Gives the layers whose convolutions have a
    bias between the multiples.
    """
    between = _rewrite_(draft, whole=True)
    makers = draft.makers()
    for node in draft.graph.node:
        if node.op_type != "Add":
            continue
        for place, name in enumerate(node.input):
            product, bias = makers.get(node.input[1 - place]), draft.array(name)
            if product is None or product.op_type != "MatMul" or bias is None or bias.ndim != 1:
                continue
            if (draft.rank(product.output[0]) or 0) >= 3:
                node.input[place] = draft.floats(f"{name}.parted", bias.reshape(1, 1, -1))
    return between


def _rewrite_(draft: Draft, *, whole: bool) -> list[str]:
    makers, weights = draft.makers(), weight_values(draft)
    between: list[str] = []

    def rewrite(node: Node) -> list[Node]:
        bias = _bias_of(draft, node, weights)
        if bias is None:
            return [node]
        if whole and node.op_type == "Conv":
            grid = _grid(draft, node, makers, weights)
            multiples = None if grid is None else _multiples(bias, grid)
            if grid is not None and multiples is not None:
                return [_inside(draft, node, multiples, grid), node]
            if grid is not None:
                between.append(weights[node.input[1]])
        return _apart(draft, node, bias)

    draft.rebuild(rewrite)
    return between


def bias_fits(draft: Draft, node: Node, makers: Mapping[str, Node], weights: Mapping[str, str]) -> bool:
    """Whether a convolution has no bias, or one that is a multiple of both steps."""
    bias, grid = _bias_of(draft, node, weights), _grid(draft, node, makers, weights)
    return bias is None or (grid is not None and _multiples(bias, grid) is not None)


def weight_values(draft: Draft) -> dict[str, str]:
    """The values that are quantized weights, as they are stored or transposed, and their layers."""
    stored = {node.output[0]: draft.attributes(node)["layer"] for node in draft.graph.node if is_ours(node, "Weight")}
    transposes = [node for node in draft.graph.node if node.op_type == "Transpose"]
    return stored | {node.output[0]: stored[node.input[0]] for node in transposes if node.input[0] in stored}


def _bias_of(draft: Draft, node: Node, weights: Mapping[str, str]) -> np.ndarray | None:
    """The bias (channels) of a quantized layer; None: there is none."""
    is_layer = node.op_type in ("Conv", "ConvTranspose", "Gemm") and node.input[1] in weights
    if not is_layer or len(node.input) < 3 or draft.attributes(node).get("beta", 1.0) != 1.0:  # scaled by Gemm
        return None
    return draft.array(node.input[2])  # None: computed as the model runs


def _grid(draft: Draft, node: Node, makers: Mapping[str, Node], weights: Mapping[str, str]) -> np.ndarray | None:
    """step_x·step_w per channel, in double precision; None where the input is not quantized."""
    quantizer = makers.get(node.input[0])
    if quantizer is None or not is_ours(quantizer, "Quantize"):
        return None
    weight = draft.weights[weights[node.input[1]]]
    steps = weight.steps.double().flatten().numpy()
    return np.float64(draft.attributes(quantizer)["scale"]) * np.broadcast_to(steps, len(weight.codes))


def _multiples(bias: np.ndarray, grid: np.ndarray) -> np.ndarray | None:
    """The bias in units of the grid, whole numbers; None where it lies between them, beyond what float32 rounds."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0: NaN and infinity are no multiples
        ratios = bias.astype(np.float64) / grid
        near = np.abs(ratios - np.round(ratios)) < _OFF
    if not (near & (np.abs(ratios) < _MOST)).all():
        return None
    return np.round(ratios).astype(np.int32)


def _inside(draft: Draft, node: Node, multiples: np.ndarray, grid: np.ndarray) -> Node:
    """The dequantized bias that a convolution then reads."""
    name, value = node.input[2], draft.fresh(f"{node.input[2]}.whole")
    codes, steps = draft.constant(f"{name}.multiples", multiples), draft.floats(f"{name}.grid", grid)
    node.input[2] = value
    return draft.node("DequantizeLinear", (codes, steps), value, f"{node.name}.bias", axis=0)


def _apart(draft: Draft, node: Node, bias: np.ndarray) -> list[Node]:
    spatial = 0 if node.op_type == "Gemm" else len(draft.attributes(node)["kernel_shape"])
    added = draft.floats(f"{node.input[2]}.parted", bias.reshape(*bias.shape, *[1] * spatial))
    output, before = node.output[0], draft.fresh(f"{node.name}.unbiased")
    node.input[:] = node.input[:2]
    node.output[0] = before
    return [node, draft.node("Add", (before, added), output, f"{node.name}.bias")]

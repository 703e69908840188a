"""Rewrite a captured ONNX graph so that integer kernels execute more of it: points, biases, float weights, norms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from bitplan.exporters.onnx_graph import Draft, Node, is_ours

_ELEMENTWISE = ("Relu", "Clip", "MaxPool")  # are computed on codes, so a quantizer behind them is as good


def multiply_points_(draft: Draft) -> None:
    """Replace 1×1 convolutions that would be computed in floats by products of matrices, with the channels last.

    ONNX Runtime computes a convolution in integers only between two quantizers and with a bias that is a multiple of
    both steps, a product of matrices in any case.
    """
    makers, weights = draft.makers(), weight_values(draft)
    layers: dict[str, str] = {}  # a convolution by name → its layer
    for node in draft.graph.node:
        layer = weights.get(node.input[1]) if node.op_type == "Conv" else None
        if layer is None or not _is_point(draft, node) or not _is_quantized(draft, node, layer, makers):
            continue
        if not _is_read_as_codes(draft, node) or not bias_fits(draft, node, makers, weights):
            layers[node.name] = layer
    for layer in layers.values():
        draft.weights[layer] = replace(draft.weights[layer], as_matrix=True)
    draft.rebuild(lambda node: _product(draft, node) if node.name in layers else [node])


def _is_point(draft: Draft, node: Node) -> bool:
    """Return True for a 1×1 convolution with stride 1, no padding and no groups."""
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
    """Return True if one quantizer, and nothing else, reads the output of a convolution."""
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


_OFF = 2.0**-8  # of a grid's distance: what float32 leaves of a multiple with thousands of them
_MOST = 2**30  # leaves room for the sum that the bias is added to


def part_biases_(draft: Draft) -> None:
    """Add the biases of quantized layers in nodes of their own."""
    _move_biases_(draft, whole=False)


def place_biases_(draft: Draft) -> list[str]:
    """Put biases that are multiples of both steps inside convolutions, as integers, and add all others in nodes.

    A linear layer's bias is never inside: its product takes integers without it. ONNX Runtime would fuse MatMul and a
    bias (N) into one float operation; a bias (1, 1, N) prevents that. Returns the layers whose convolutions have a bias
    between the multiples.
    """
    between = _move_biases_(draft, whole=True)
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


def _move_biases_(draft: Draft, *, whole: bool) -> list[str]:
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
                return [_integer_bias(draft, node, multiples, grid), node]
            if grid is not None:
                between.append(weights[node.input[1]])
        return _add_bias(draft, node, bias)

    draft.rebuild(rewrite)
    return between


def bias_fits(draft: Draft, node: Node, makers: Mapping[str, Node], weights: Mapping[str, str]) -> bool:
    """Return True if a convolution has no bias, or one that is a multiple of both steps."""
    bias, grid = _bias_of(draft, node, weights), _grid(draft, node, makers, weights)
    return bias is None or (grid is not None and _multiples(bias, grid) is not None)


def weight_values(draft: Draft) -> dict[str, str]:
    """Return the layer of each value that is a quantized weight, as stored or transposed."""
    stored = {node.output[0]: draft.attributes(node)["layer"] for node in draft.graph.node if is_ours(node, "Weight")}
    transposes = [node for node in draft.graph.node if node.op_type == "Transpose"]
    return stored | {node.output[0]: stored[node.input[0]] for node in transposes if node.input[0] in stored}


def _bias_of(draft: Draft, node: Node, weights: Mapping[str, str]) -> np.ndarray | None:
    """Return the bias (channels) of a quantized layer, or None."""
    is_layer = node.op_type in ("Conv", "ConvTranspose", "Gemm") and node.input[1] in weights
    if not is_layer or len(node.input) < 3 or draft.attributes(node).get("beta", 1.0) != 1.0:  # scaled by Gemm
        return None
    return draft.array(node.input[2])  # None: computed as the model runs


def _grid(draft: Draft, node: Node, makers: Mapping[str, Node], weights: Mapping[str, str]) -> np.ndarray | None:
    """Return step_x·step_w per channel in double precision, or None if the input is not quantized."""
    quantizer = makers.get(node.input[0])
    if quantizer is None or not is_ours(quantizer, "Quantize"):
        return None
    weight = draft.weights[weights[node.input[1]]]
    steps = weight.steps.double().flatten().numpy()
    return np.float64(draft.attributes(quantizer)["scale"]) * np.broadcast_to(steps, len(weight.codes))


def _multiples(bias: np.ndarray, grid: np.ndarray) -> np.ndarray | None:
    """Return the bias in whole units of the grid, or None if it lies between them by more than float32 rounds."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a step of 0: NaN and infinity are no multiples
        ratios = bias.astype(np.float64) / grid
        near = np.abs(ratios - np.round(ratios)) < _OFF
    if not (near & (np.abs(ratios) < _MOST)).all():
        return None
    return np.round(ratios).astype(np.int32)


def _integer_bias(draft: Draft, node: Node, multiples: np.ndarray, grid: np.ndarray) -> Node:
    """Return the dequantized bias that the convolution then reads."""
    name, value = node.input[2], draft.fresh(f"{node.input[2]}.whole")
    codes, steps = draft.constant(f"{name}.multiples", multiples), draft.floats(f"{name}.grid", grid)
    node.input[2] = value
    return draft.node("DequantizeLinear", (codes, steps), value, f"{node.name}.bias", axis=0)


def _add_bias(draft: Draft, node: Node, bias: np.ndarray) -> list[Node]:
    spatial = 0 if node.op_type == "Gemm" else len(draft.attributes(node)["kernel_shape"])
    added = draft.floats(f"{node.input[2]}.parted", bias.reshape(*bias.shape, *[1] * spatial))
    output, before = node.output[0], draft.fresh(f"{node.name}.unbiased")
    node.input[:] = node.input[:2]
    node.output[0] = before
    return [node, draft.node("Add", (before, added), output, f"{node.name}.bias")]


_TAKEN = ("Conv", "ConvTranspose", "Gemm")


def keep_float_weights_(draft: Draft) -> None:
    """Put max(input, lowest number), which changes nothing, before layers with float weights.

    ONNX Runtime would round the float weights of layers with quantized inputs to 8 bits as it loads.
    """
    makers = draft.makers()

    def rewrite(node: Node) -> list[Node]:
        maker = makers.get(node.input[0])
        if node.op_type not in _TAKEN or maker is None or maker.op_type != "DequantizeLinear":
            return [node]
        weight = draft.array(node.input[1])
        if weight is None or weight.dtype != np.float32:
            return [node]
        lowest = draft.floats("lowest", np.finfo(np.float32).min)
        read, node.input[0] = node.input[0], draft.fresh(f"{node.name}.inputs")
        return [draft.node("Max", (read, lowest), node.input[0], f"{node.name}.unchanged"), node]

    draft.rebuild(rewrite)


_log = logging.getLogger(__name__)


def fold_norms_(draft: Draft) -> list[str]:
    """Fold batch normalizations into the steps and bias of the quantized convolutions before them, keeping the codes.

    Returns the layers folded.
    """
    makers = draft.makers()
    folded = []
    for norm in [node for node in draft.graph.node if node.op_type == "BatchNormalization"]:
        convolution = makers.get(norm.input[0])
        if convolution is None or convolution.op_type != "Conv":
            continue
        marker = makers.get(convolution.input[1])
        if marker is None or not is_ours(marker, "Weight"):
            continue
        layer = draft.attributes(marker)["layer"]
        why = _why_not(draft, layer, marker, convolution, norm)
        if why:
            _log.warning("the batch normalization after %s is not folded: %s", layer, why)
            continue
        _fold_(draft, layer, convolution, norm)
        folded.append(layer)
    return folded


def _why_not(draft: Draft, layer: str, marker: Node, convolution: Node, norm: Node) -> str:
    if len(draft.readers(marker.output[0])) > 1:
        return "its weight is used more than once"
    if len(draft.readers(convolution.output[0])) > 1 or draft.is_output(convolution.output[0]):
        return "its output is used elsewhere too"
    if any(draft.array(name) is None for name in (*norm.input[1:], *convolution.input[2:])):
        return "its figures are not constants"
    return ""


def _factors(draft: Draft, norm: Node) -> np.ndarray:
    """k = γ/√(σ² + ε) per channel, in double precision."""
    gamma, _, _, variance = (np.asarray(draft.array(name), dtype=np.float64) for name in norm.input[1:])
    return gamma / np.sqrt(variance + draft.attributes(norm).get("epsilon", 1e-5))


def _fold_(draft: Draft, layer: str, convolution: Node, norm: Node) -> None:
    factors = _factors(draft, norm)
    _, beta, mean, _ = (np.asarray(draft.array(name), dtype=np.float64) for name in norm.input[1:])
    bias = draft.array(convolution.input[2]) if len(convolution.input) > 2 else None
    shifted = (-mean if bias is None else bias - mean) * factors + beta
    weight = draft.weights[layer]
    shape = (-1, *[1] * (weight.codes.dim() - 1))
    steps = weight.steps.double() * torch.from_numpy(factors).view(shape)
    draft.weights[layer] = replace(weight, steps=steps.float())
    convolution.input[:] = [*convolution.input[:2], draft.floats(f"{layer}.folded_bias", shifted)]
    old = convolution.output[0]
    convolution.output[0] = norm.output[0]
    norm.input[0], norm.output[0] = old, f"{old}.unused"  # pruned: nothing reads it

"""Batch normalization taken into the steps and the bias of the convolution before it, its codes left as they are.

y = γ·(s·Σ c·x + b − μ)/√(σ² + ε) + β = (s·k)·Σ c·x + (b − μ)·k + β with k = γ/√(σ² + ε): steps s·k per channel. Where k
is negative or zero, so is the step: nothing is quantized with it, codes that are stored are only multiplied by it.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from bitplan.exporters.onnx_graph import Draft, Node, is_ours

_log = logging.getLogger(__name__)


def fold_norms_(draft: Draft) -> list[str]:
    """Fold every batch normalization that directly follows a quantized convolution; gives the layers folded."""
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

"""Which quantized layers a runtime multiplies in floats, and why: said as the file is written, by their names."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from bitplan.core.codes import code_bits
from bitplan.exporters.onnx_graph import Draft, Node, is_ours
from bitplan.exporters.onnx_weights import varying_axes

_log = logging.getLogger(__name__)
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NAMED = 3  # layers per line
_BIAS = "a bias is no multiple of both steps (quantize(…, integer=True) makes it one; OpenVINO takes any)"


def name_float_products(draft: Draft, runtime: str, *, lacking: Collection[str], between: Collection[str] = ()) -> None:
    """Say which layers the runtime multiplies in floats, one line per reason.

    `lacking` are the operators that it has no integer kernel for, `between` layers whose bias it would round.
    """
    reasons: dict[str, list[str]] = {}
    for layer, why in [*((layer, _BIAS) for layer in between), *_others(draft, lacking)]:
        reasons.setdefault(why, []).append(layer)
    for why, layers in reasons.items():
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        _log.warning("%s multiplies %s%s in floats: %s", runtime, ", ".join(layers[:_NAMED]), more, why)


def _others(draft: Draft, lacking: Collection[str]) -> Iterator[tuple[str, str]]:
    makers = draft.makers()
    for node in draft.graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        layer = _layer_of(draft, node, makers)
        if layer is None:
            continue
        weight, bits = draft.weights[layer], _input_bits(draft, _maker(node.input[0], makers))
        if node.op_type in lacking:
            yield layer, f"it has no integer kernel for {node.op_type}"
        elif bits is None:
            yield layer, "the input is not quantized"
        elif bits > 8 or weight.bits > 8:
            yield layer, "integer kernels take 8 bits"
        elif len(varying_axes(weight)) > 1:
            yield layer, "the steps vary along two axes"


def _layer_of(draft: Draft, node: Node, makers: dict[str, Node]) -> str | None:
    """The layer whose weight a node multiplies by."""
    maker = _maker(node.input[1], makers)
    return draft.attributes(maker)["layer"] if maker is not None and is_ours(maker, "Weight") else None


def _maker(value: str, makers: dict[str, Node]) -> Node | None:
    """What makes a value, as it is or transposed."""
    maker = makers.get(value)
    return makers.get(maker.input[0]) if maker is not None and maker.op_type == "Transpose" else maker


def _input_bits(draft: Draft, maker: Node | None) -> int | None:
    if maker is None or not is_ours(maker, "Quantize"):
        return None
    about = draft.attributes(maker)
    return code_bits(about["low"], about["high"])

"""Weights in an ONNX file as integers behind DequantizeLinear: written, read back, checked against the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.exporters.onnx_graph import Draft, Node, Weight, read_codes

_CODES = ".codes"  # ends the name of a tensor of codes, which begins with its layer


def dequantize_weights_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Store every weight as codes of one of these widths, and dequantize them where the weight was."""

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        weight, output = draft.weights[about["layer"]], node.output[0]
        if weight.layer in draft.written:  # the layer runs twice, its codes are stored once
            return [draft.node("Identity", (draft.written[weight.layer],), output, node.name)]
        draft.written[weight.layer] = output
        return _dequantized(draft, weight, output, widths)

    draft.replace("Weight", rewrite)


def _dequantized(draft: Draft, weight: Weight, output: str, widths: tuple[int, ...]) -> list[Node]:
    """DequantizeLinear of stored codes; steps that vary along two axes are multiplied afterwards: it knows one axis."""
    name, steps = weight.layer, weight.steps
    width = storage(weight.bits, widths, name)
    codes = draft.codes(name + _CODES, weight.codes, width)
    varying = [axis for axis, size in enumerate(steps.shape) if size > 1]
    if not varying:
        scale = draft.floats(f"{name}.step", steps.flatten()[0])
        return [draft.node("DequantizeLinear", (codes, scale), output, f"{name}.dequantize")]
    if len(varying) == 1:
        scale = draft.floats(f"{name}.step", steps.flatten())
        return [draft.node("DequantizeLinear", (codes, scale), output, f"{name}.dequantize", axis=varying[0])]
    one, scale = draft.floats("one", 1.0), draft.floats(f"{name}.step", steps)
    codes_as_floats = draft.fresh(f"{name}.whole")
    return [
        draft.node("DequantizeLinear", (codes, one), codes_as_floats, f"{name}.dequantize"),
        draft.node("Mul", (codes_as_floats, scale), output, f"{name}.scale"),
    ]


def storage(bits: int, widths: tuple[int, ...], layer: str) -> int:
    """The narrowest type that holds codes of so many bits."""
    fitting = [width for width in widths if width >= bits]
    if not fitting:
        raise InputError(f"layer {layer!r} has {bits} bits, and this target stores at most {widths[-1]}")
    return fitting[0]


def stored_codes(proto: Any, plan: Plan, path: Path) -> dict[str, Tensor]:
    """The codes of every layer, checked against the range that the plan gives them."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    codes: dict[str, Tensor] = {}
    for layer, precision in plan.precisions.items():
        tensor = tensors.get(layer + _CODES)
        if tensor is not None:
            codes[layer] = read_codes(tensor)
            check_range(codes[layer], layer, precision, path)
    return codes


def check_range(codes: Tensor, layer: str, precision: Precision, path: Path) -> None:
    """Raise if a code is outside the range of the layer's precision."""
    low, high = code_range(precision.weight_bits)
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise FileError(f"{path}: layer {layer!r} has codes beyond {precision.weight_bits} bits, as the plan says")

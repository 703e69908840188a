"""Write weights as integers behind DequantizeLinear, read them back, and check them against the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bitplan.core.codes import code_range
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.records import Plan
from bitplan.exporters.onnx_graph import Draft, Node, Weight, read_codes, type_number, width_of

_CODES = ".codes"  # ends the name of a tensor of codes, which begins with its layer


def dequantize_weights_(draft: Draft, widths: tuple[int, ...], *, cast: bool = False) -> None:
    """Store every weight as codes of one of these widths, and put DequantizeLinear in its place.

    `cast` first converts narrower codes to bytes, which integer kernels take.
    """

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        weight, output = draft.weights[about["layer"]], node.output[0]
        if weight.layer in draft.written:  # the layer runs twice, its codes are stored once
            return [draft.node("Identity", (draft.written[weight.layer],), output, node.name)]
        draft.written[weight.layer] = output
        width = storage_width(weight.bits, widths, weight.layer)
        codes = draft.codes(weight.layer + _CODES, weight.codes, width)
        nodes: list[Node] = []
        if cast and width < 8:
            as_bytes = draft.fresh(f"{weight.layer}.bytes")
            nodes = [draft.node("Cast", (codes,), as_bytes, f"{weight.layer}.cast", to=type_number("INT8"))]
            codes = as_bytes
        if weight.as_matrix:
            nodes += _as_matrix(draft, weight, codes)
            steps = weight.steps.flatten(1).mT if weight.steps.dim() else weight.steps
            weight, codes = replace(weight, steps=steps), nodes[-1].output[0]
        return [*nodes, *_dequantize(draft, weight, codes, output)]

    draft.replace("Weight", rewrite)


def _as_matrix(draft: Draft, weight: Weight, codes: str) -> list[Node]:
    """Return nodes that turn codes (N, C, 1, 1) into (C, N), computed once as the file is loaded."""
    shape = draft.constant(f"{weight.layer}.shape", np.array(weight.codes.shape[:2], dtype=np.int64))
    rows, matrix = draft.fresh(f"{weight.layer}.rows"), draft.fresh(f"{weight.layer}.matrix")
    return [
        draft.node("Reshape", (codes, shape), rows, f"{weight.layer}.reshape"),
        draft.node("Transpose", (rows,), matrix, f"{weight.layer}.transpose", perm=[1, 0]),
    ]


def varying_axes(weight: Weight) -> list[int]:
    """Return the axes along which a weight's steps differ."""
    return [axis for axis, size in enumerate(weight.steps.shape) if size > 1]


def _dequantize(draft: Draft, weight: Weight, codes: str, output: str) -> list[Node]:
    """Return DequantizeLinear of stored codes; as it knows one axis, steps that vary along two are multiplied later."""
    name, steps, varying = weight.layer, weight.steps, varying_axes(weight)
    if weight.size:
        return _dequantize_groups(draft, weight, codes, output)
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


def _dequantize_groups(draft: Draft, weight: Weight, codes: str, output: str) -> list[Node]:
    """Return DequantizeLinear of a matrix whose rows have groups."""
    rows_first = weight.codes.dim() == 2 and weight.codes.shape[0] == weight.steps.shape[0]
    if not rows_first or weight.codes.shape[1] % weight.size:
        raise InputError(
            f"layer {weight.layer!r} of shape {tuple(weight.codes.shape)} has groups of {weight.size} inputs, which "
            "this target has for matrices whose rows they fill: quantize it by another method, or leave it alone"
        )
    inputs = [codes, draft.floats(f"{weight.layer}.step", weight.steps)]
    if weight.zeros is not None:
        kind = next(one for one in draft.graph.initializer if one.name == codes).data_type
        width = width_of(kind)
        inputs.append(draft.codes(f"{weight.layer}.zero", weight.zeros.to(weight.codes.dtype), width))
    about: dict[str, Any] = {"axis": 1, "block_size": weight.size}
    return [draft.node("DequantizeLinear", inputs, output, f"{weight.layer}.dequantize", **about)]


def give_zero_points_(draft: Draft) -> None:
    """Give the weights of Gemm a zero point of 0: without one ONNX Runtime multiplies in floats.

    A linear layer of two dimensions, such as a classifier, is a Gemm. In floats it would dequantize its weight in every
    run.
    """
    makers = draft.makers()
    types = {tensor.name: tensor.data_type for tensor in draft.graph.initializer}
    for node in draft.graph.node:
        weight = makers.get(node.input[1]) if node.op_type == "Gemm" else None
        if weight is None or weight.op_type != "DequantizeLinear" or len(weight.input) > 2:
            continue
        scale = draft.array(weight.input[1])
        if scale is not None and (weight.input[0] in makers or types[weight.input[0]] == type_number("INT8")):
            weight.input.append(draft.constant(f"{weight.name}.zero", np.zeros(scale.shape, np.int8)))


def look_up_codes_(draft: Draft) -> None:
    """Let an embedding look up bytes and dequantize only these; runtimes gather no narrower codes."""
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
    """Return the DequantizeLinear, by output, of each table with one step that a single Gather reads by rows."""
    tensors = {tensor.name: tensor for tensor in draft.graph.initializer}
    stored = {name for name, tensor in tensors.items() if tensor.data_type in map(type_number, ("INT8", "INT16"))}
    gathered = stored | {node.output[0] for node in draft.graph.node if node.op_type == "Cast"}
    tables: dict[str, Node] = {}
    for node in draft.graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] not in gathered:
            continue
        table = node.output[0]
        readers = draft.readers(table)
        if len(readers) != 1 or readers[0].op_type != "Gather" or readers[0].input[0] != table:
            continue
        by_rows = draft.attributes(readers[0]).get("axis", 0) == 0
        if by_rows and not tensors[node.input[1]].dims:
            tables[table] = node
    return tables


def storage_width(bits: int, widths: tuple[int, ...], layer: str) -> int:
    """Return the bits of the narrowest type that holds codes of so many bits."""
    fitting = [width for width in widths if width >= bits]
    if not fitting:
        raise InputError(f"layer {layer!r} has {bits} bits, and this target stores at most {widths[-1]}")
    return fitting[0]


def read_stored_codes(proto: Any, plan: Plan, path: Path) -> dict[str, Tensor]:
    """Return the codes of every layer, checked against the range of its precision in the plan."""
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
